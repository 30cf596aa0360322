"""Conversion of logs against a slow parser in plain Python, and every kind of bad input."""

import csv
import gzip
import math
import os
import pathlib
import re
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf

from tests.support import commands, small
from trainer import config
from trainer.data import csv_format as csv_reader
from trainer.data import parquet_format as parquet_reader
from trainer.data import prepared, prepared_writer, text_blocks
from trainer.data.conversion import prepare_pass
from trainer.data.features import hash_keys
from trainer.data.prefetch import prefetch
from trainer.data.prepared import PreparedPass
from trainer.errors import BadPass, UserError, plain_errors

ROOT = pathlib.Path(__file__).resolve().parents[3]
SHARED = ROOT.parent / 'shared' / 'data'


def make_config(data, tables=('default',), loss='log_loss'):
  tables = {'tables': {t: {} for t in tables}}
  return small.config(data={'label': 'click', **data}, model={'loss': loss}, sparse=tables)


MIXED = {
  'slots': [
    {'name': 'user'},
    {'name': 'tags', 'separator': '|', 'table': 'other'},
    {'name': 'item'},
    {'name': 'last', 'shares': 'item'},
    {'name': 'topics', 'separator': '|', 'value_separator': ':'},
  ],
  'dense': [{'name': 'price', 'transform': 'log1p_standardise'}, {'name': 'age'}],
  'weight': 'w',
  'group': 'user',
  'max_bad_share': 1.0,
}
MIXED_TABLES = ('other', 'default')
HEADER = 'click,item,user,tags,extra,price,age,w,last,topics'


def oracle_key(text, slot_id):
  return slot_id << 52 | int(tf.strings.to_hash_bucket_fast([text.strip()], 1 << 52)[0])


def oracle_number(text):
  """A finite float32, NaN where blank, or None."""
  if not text.strip():
    return math.nan
  if not re.fullmatch(r'[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?', text.strip()):
    return None
  with np.errstate(over='ignore'):
    return float(text) if np.isfinite(np.float32(text)) else None


def oracle(text, cfg, names=None, delimiter=','):
  """The good records of a file's text, as (keys by slot, values by slot, dense, label, weight,
  group), and the lines of the bad ones.
  """
  ids, good, bad = cfg.slot_ids(), [], []
  for number, line in enumerate(text.split('\n'), 1):
    line = line.removesuffix('\r')
    if not line:
      continue
    fields = list(csv.reader([line], delimiter=delimiter))[0]
    if names is None:
      names = fields
      continue
    if len(fields) != len(names):
      bad.append(number)
      continue
    row, wrong = dict(zip(names, fields)), False
    label, weight = (
      oracle_number(row[cfg.data.label]),
      oracle_number(row[cfg.data.weight]) if cfg.data.weight else 1.0,
    )
    dense = [oracle_number(row[c.name]) for c in cfg.data.dense]
    wrong |= label not in (0, 1) or weight is None or not weight >= 0 or None in dense
    keys, values = [], []
    for s in cfg.ordered_slots:
      keys.append([])
      values.append([])
      for part in (
        row[s.column or s.name].split(s.separator) if s.separator else [row[s.column or s.name]]
      ):
        x = 1.0
        if s.value_separator and s.value_separator in part:
          part, x = part.rsplit(s.value_separator, 1)
          x = oracle_number(x)
          wrong |= x is None or math.isnan(x) or not part.strip()
        if part.strip():
          keys[-1].append(oracle_key(part, ids[s.name]))
          values[-1].append(x)
    if wrong:
      bad.append(number)
    else:
      good.append(
        (
          keys,
          values,
          dense,
          label,
          weight,
          oracle_key(row[cfg.data.group], 0) if cfg.data.group else 0,
        )
      )
  return good, bad


class PrepareTestCase(tf.test.TestCase):
  def path(self, *names):
    return os.path.join(self.get_temp_dir(), *names)

  def write(self, name, content):
    with open(self.path(name), 'wb') as f:
      f.write(content if isinstance(content, bytes) else content.encode())
    return self.path(name)

  def prepare(self, cfg, content, name='day.csv'):
    raw = self.write(name, content)
    meta = prepare_pass(cfg, raw, self.path('out'))
    return meta, PreparedPass(self.path('out'), cfg)

  def assert_equals_oracle(self, one, good, batch_size=5):
    """Reads the whole pass in small batches and compares every sample."""
    f, samples = one.num_slots, iter(good)
    count = 0
    for batch in one.batches(batch_size):
      b, fast = len(batch.label), not len(batch.segments) and len(batch.keys)
      self.assertEqual(
        [a.dtype for a in batch[:7]],
        [np.int64, np.float32, np.int32, np.float32, np.float32, np.float32, np.int64],
      )
      segments = np.arange(b * f) if fast else batch.segments
      values = np.ones(b * f) if fast else batch.values
      self.assertAllEqual(segments, np.sort(segments))
      for i in range(b):
        keys, xs, dense, label, weight, group = next(samples)
        for s in range(f):
          self.assertAllEqual(batch.keys[segments == i * f + s], keys[s])
          self.assertAllClose(values[segments == i * f + s], xs[s])
        self.assertAllClose(batch.dense[i], np.array(dense, np.float32))
        self.assertAllClose([batch.label[i], batch.weight[i]], [label, weight])
        self.assertEqual(batch.group[i], group)
        count += 1
    self.assertEqual(count, len(good))
    self.assertEqual(one.num_samples, len(good))


class CsvTest(PrepareTestCase):
  def random_text(self, seed, n, end):
    """A file with everything in it:

    blanks, quotes, other alphabets, bad records of every kind, blank lines.
    """
    rng = np.random.default_rng(seed)

    def pick(*choices):
      return choices[rng.integers(len(choices))]

    lines = [HEADER]
    for _ in range(n):
      lines.append(
        ','.join(
          [
            pick('0', '1', '1.0', *(['2', 'yes', '', 'nan'] if rng.random() < 0.1 else [])),
            pick('i1', 'i2', '', '"a,b"', 'größe', ' i1 '),
            pick('u1', 'u2', '7', '', '用户'),
            pick('', 'a', 'a|b', '|a||a|', ' b | c '),
            pick('x', '"say ""hi"""'),
            pick(
              '',
              '1',
              '-2.5',
              '1e3',
              ' 4 ',
              '+5',
              *(['inf', 'nan', '1e39', 'x', '1_0'] if rng.random() < 0.1 else []),
            ),
            pick('', '30'),
            pick('1', '0.5', '0', *(['', '-1', 'inf'] if rng.random() < 0.1 else [])),
            pick('i1', 'i3', ''),
            pick(
              '',
              's',
              's:0.5',
              's:0.5|t:2|u',
              'a:b:-1e-1',
              *(['s:', 's:x', ':1', 's:nan'] if rng.random() < 0.1 else []),
            ),
          ]
        )
      )
      if rng.random() < 0.05:
        lines.append(pick('', 'too,few', ','.join('x' * 12)))
    return end.join(lines) + pick('', end)

  def test_against_plain_python(self):
    cfg = make_config(MIXED, MIXED_TABLES)
    for seed, end, block in (
      (0, '\n', 1 << 20),
      (1, '\r\n', 700),
      (2, '\n', 300),
      (3, '\r\n', 1 << 20),
    ):
      text = self.random_text(seed, 200, end)
      good, bad = oracle(text, cfg)
      with mock.patch.object(text_blocks, 'BLOCK_BYTES', block):
        meta, one = self.prepare(cfg, text)
      self.assert_equals_oracle(one, good)
      self.assertGreater(len(bad), 10)
      self.assertEqual(
        (meta['bad']['records'], meta['bad']['of']), (len(bad), len(bad) + len(good))
      )
      self.assertEqual([e['line'] for e in meta['bad']['examples']], bad[:10])
      self.assertEqual(
        [e['text'] for e in meta['bad']['examples']],
        [text.split('\n')[b - 1].rstrip('\r') for b in bad[:10]],
      )
      seen = np.array([g[2] for g in good])
      seen[:, 0] = np.sign(seen[:, 0]) * np.log1p(np.abs(seen[:, 0]))
      for column, x in zip(('price', 'age'), seen.T):
        x = x[~np.isnan(x)]
        self.assertAllClose(
          meta['dense'][column], [len(x), x.mean(), np.square(x - x.mean()).sum()], 1e-5, 1e-5
        )

  def test_clean_text_however_much_of_it_is_parsed_at_once(self):
    cfg = make_config(
      {'slots': [{'name': 'a'}, {'name': 'x'}], 'dense': [{'name': 'x'}, {'name': 'y'}]}
    )
    rng = np.random.default_rng(0)
    rows = [
      f'{i},{i % 5 or ""},{rng.choice(["", "-1.5", " 2e3", "7"])},{i % 2}' for i in range(200)
    ]
    rows[40] = f'{"long" * 30},1,2,0'
    for quoted in (False, True):
      rows[90] = '"q,""x",1,"3",0' if quoted else rows[90]
      text = 'a,x,y,click\n' + ''.join(f'{row}\n' for row in rows)
      for parsed in (60, 200, 1 << 20):
        with mock.patch.object(csv_reader, 'PARSED_BYTES', parsed):
          meta, one = self.prepare(cfg, text)
        self.assertEqual(meta['bad']['records'], 0)
        self.assert_equals_oracle(one, oracle(text, cfg)[0])

  def test_fast_path_where_every_slot_has_one(self):
    cfg = make_config({'slots': [{'name': 'a'}, {'name': 'b', 'separator': '|'}]})
    text = 'a,b,click\n' + ''.join(f'{i % 7},{i % 3},{i % 2}\n' for i in range(40))
    with mock.patch.object(text_blocks, 'BLOCK_BYTES', 50):
      _, one = self.prepare(cfg, text)
    self.assertEqual(list(one.meta['arrays']), ['bases', 'codes', 'keys', 'label'])
    batch = next(one.batches(16))
    shapes = [a.shape for a in batch[:7]]
    self.assertEqual(shapes, [(32,), (0,), (0,), (16, 0), (16,), (16,), (16,)])
    self.assert_equals_oracle(one, oracle(text, cfg)[0])

  def test_a_blank_or_a_value_late_in_the_file(self):
    # What was written for the fast path must be completed.
    cfg = make_config({'slots': [{'name': 'a'}, {'name': 'b', 'value_separator': ':'}]})
    regular = ''.join(f'{i % 7},{i % 3},{i % 2}\n' for i in range(40))
    for last in (',x,1', 'x,x:0.5,1', ',,0\n,,1\nx,x:0,1'):
      text = 'a,b,click\n' + regular + last
      with (
        mock.patch.object(text_blocks, 'BLOCK_BYTES', 50),
        mock.patch.object(prepared, 'CHUNK', 16),
        mock.patch.object(prepared_writer, 'CHUNK', 16),
      ):
        _, one = self.prepare(cfg, text)
        self.assertEqual('splits' in one.meta['arrays'], ',,' in last or last.startswith(','))
        self.assertEqual('values' in one.meta['arrays'], ':' in last)
        self.assert_equals_oracle(one, oracle(text, cfg)[0])

  def test_all_slots_blank(self):
    cfg = make_config({'slots': [{'name': 'a'}, {'name': 'b'}]})
    _, one = self.prepare(cfg, 'a,b,click\n,,1\n , ,0\n')
    batch = next(one.batches(2))
    self.assertAllEqual([len(batch.keys), len(batch.segments), len(batch.label)], [0, 0, 2])

  def test_columns_without_header(self):
    cfg = make_config(
      {
        'columns': ['click', 'a', 'x'],
        'slots': [{'name': 'slot', 'column': 'a'}],
        'dense': [{'name': 'x'}],
        'delimiter': '\t',
      }
    )
    rows = '1\tu\t2\n0\t\t\n'
    good, _ = oracle(rows, cfg, ['click', 'a', 'x'], '\t')
    for text in (
      rows,
      '\ufeff' + rows,
      'click\ta\tx\n' + rows,
      'click\ta\tx\r\n' + rows.replace('\n', '\r\n'),
    ):
      _, one = self.prepare(cfg, text)
      self.assert_equals_oracle(one, good)

  def test_a_suffix_or_a_key_says_what_separates_fields(self):
    cfg = make_config({'slots': [{'name': 'a'}, {'name': 'b'}]})
    tabs, commas = (f'a{d}b{d}click\nu{d}v,w{d}1\nx{d}y{d}0\n' for d in ('\t', ','))
    good, _ = oracle(tabs, cfg, delimiter='\t')
    self.assert_equals_oracle(self.prepare(cfg, tabs, 'day.TSV')[1], good)
    self.assert_equals_oracle(self.prepare(cfg, gzip.compress(tabs.encode()), 'z.tsv.gz')[1], good)
    by_key = make_config({'delimiter': ',', 'slots': [{'name': 'a'}, {'name': 'b'}]})
    commas = commas.replace('v,w', 'v')
    self.assert_equals_oracle(self.prepare(by_key, commas, 'b.tsv')[1], oracle(commas, cfg)[0])
    with self.assertRaisesRegex(UserError, r"""as by --set 'data.delimiter="\\t"'$"""):
      self.prepare(cfg, tabs, 'tabs.csv')

  def test_compressed_and_bytes_that_are_no_text(self):
    cfg = make_config({'slots': [{'name': 'a'}], 'max_bad_share': 0.5})
    raw = b'a,click\n\xff\xfe,1\n\xff\n'
    meta, one = self.prepare(cfg, gzip.compress(raw), 'day.csv.gz')
    self.assertEqual(meta['bad']['records'], 1)
    self.assertAllEqual(next(one.batches(9)).keys, hash_keys([b'\xff\xfe'], 1))

  def test_open_quotes_spoil_their_line_only(self):
    cfg = make_config({'slots': [{'name': 'a'}, {'name': 'b'}], 'max_bad_share': 1.0})
    meta, one = self.prepare(
      cfg, 'a,b,click\n1,2,1\n4,"5,0\n7,8,1\n1,2",0\n"a""b",x"y,1\n1,2\r3,1\n9,9,1'
    )
    self.assertEqual([e['line'] for e in meta['bad']['examples']], [3, 7])
    texts = ['1', '2', '7', '8', '1', '2"', 'a"b', 'x"y', '9', '9']
    self.assertAllEqual(
      next(one.batches(9)).keys, [oracle_key(t, 1 + i % 2) for i, t in enumerate(texts)]
    )

  def test_a_line_is_accepted_whatever_the_others_are(self):
    cfg = make_config({'slots': [{'name': 'a'}, {'name': 'b'}], 'max_bad_share': 1.0})
    lines = ['1,2,1', '3,4\r,0', '5,"6,0', '7,8,1', 'x"y,"z,1', '"1\r2",3,1', '9,9,1\r', '"",,0']
    lines += ['too,few', '"a""b",c"d,0', '"a"b,c,1', '1,2,1\r\r', '\r']
    accepted = {}
    for line in lines:
      _, one = self.prepare(cfg, f'a,b,click\n{line}\n1,1,1\n')
      accepted[line] = one.num_samples - 1
    self.assertEqual(sum(accepted.values()), 6)
    rng = np.random.default_rng(0)
    for _ in range(30):
      some = [lines[i] for i in rng.integers(len(lines), size=20)]
      _, one = self.prepare(cfg, 'a,b,click\n' + '\n'.join(some) + '\n1,1,1\n')
      self.assertEqual(one.num_samples, 1 + sum(accepted[line] for line in some))

  def test_repeated_header_lines_are_left_out(self):
    rng = np.random.default_rng(2)
    names = ['label, "x"', 'click', 'a', 'b', 'd']
    header = '"label, ""x""",click,a,b,d'
    variants = [header, header + '\r', '"label, ""x""","click","a",b,d']
    for trial in range(40):
      # A line with one name too few, or with other fields beside them, is no header.
      rows = [f'n{i},{i % 2},{rng.integers(4)},b,1.5' for i in range(rng.integers(1, 30))]
      if trial % 2:  # the block is read line by line
        rows.insert(0, 'too,few')
      if trial % 3 == 0:
        rows += ['a,1,a,b,2', 'x,0,a,a,']
      tree = {'slots': [{'name': 'a'}, {'name': 'b'}], 'max_bad_share': 0.9}
      tree |= {} if trial % 3 else {'label_positive': '1'}
      tree |= {'dense': [{'name': 'd'}]} if trial % 7 else {}  # which is read as numbers
      tree |= {'columns': names} if trial % 5 == 0 else {}
      cfg, labelled = make_config(tree), bool(trial % 4)
      first = [] if trial % 10 == 0 else [header]
      plain = self.write('plain.csv', '\n'.join(first + rows) + '\n')
      wanted = prepare_pass(cfg, plain, self.path('plain'), labelled)
      repeated, places = list(rows), sorted(rng.integers(1, len(rows) + 1, rng.integers(1, 9)))
      for place in reversed(places):
        repeated.insert(place, variants[rng.integers(len(variants))])
      raw = self.write('repeated.csv', '\n'.join(first + repeated) + '\n')
      with self.assertLogs('absl', 'WARNING') as logs:
        meta = prepare_pass(cfg, raw, self.path('repeated'), labelled)
      line = len(first) + places[0] + 1
      times = 'once' if len(places) == 1 else f'{len(places)} times'
      told = f'{raw}:{line}: found the line of names again, {times} in the file'
      self.assertIn(told, ' '.join(logs.output))
      self.assertEqual(meta['bad']['records'], wanted['bad']['records'])
      found, want = (
        next(PreparedPass(self.path(name), cfg).batches(99)) for name in ('repeated', 'plain')
      )
      for a, b in zip(found, want):
        self.assertAllEqual(a, b)

  def test_a_record_like_the_header_in_a_file_of_one_column(self):
    """People search for "query", too; and a blank line is told."""
    texts = ['shoes', 'query', 'lamp', 'query', 'red shirt']
    for quoted in (False, True):
      written = [f'"{text}"' for text in texts] if quoted else texts
      for tree, first in (({}, ['query']), ({'columns': ['query']}, [])):
        cfg = make_config({'slots': [{'name': 'query'}], **tree})
        raw = self.write('one.csv', '\n'.join([*first, *written[:3], '', *written[3:]]) + '\n')
        with self.assertLogs('absl', 'WARNING') as logs:
          prepare_pass(cfg, raw, self.path('one'), labelled=False)
        (batch,) = PreparedPass(self.path('one'), cfg).batches(99)
        self.assertAllEqual(batch.keys, hash_keys(texts, cfg.slot_ids()['query']))
        like, blank = sorted(logs.output)
        line = len(first) + 2
        told = (
          f"one.csv:{line}: found the column's name, 2 times in a file of one column; taken for a"
        )
        self.assertIn(told, blank if 'name' in blank else like)
        self.assertIn(f'one.csv:{line + 2}: found a blank line, once', ' '.join(logs.output))

  def test_a_first_record_like_data_columns_is_one(self):
    cfg = make_config({'slots': [{'name': 'query'}], 'columns': ['query']})
    raw = self.write('first.csv', 'query\nlamp\n')
    with self.assertLogs('absl', 'WARNING') as logs:
      prepare_pass(cfg, raw, self.path('first'), labelled=False)
    self.assertIn("first.csv:1: found the column's name, once", ' '.join(logs.output))
    self.assertEqual(PreparedPass(self.path('first'), cfg).num_samples, 2)

  def test_files_that_were_put_together(self):
    """Each file's byte-order mark stands before its line of names."""
    cfg = make_config({'slots': [{'name': 'a'}], 'label_positive': 'yes'})
    text = '\ufeffclick,a\nyes,1\nno,2\n'
    _, one = self.prepare(cfg, text * 3)
    self.assertAllEqual(next(one.batches(9)).label, [1, 0] * 3)
    cfg = make_config({'slots': [{'name': 'click'}], 'label': 'a'})
    raw = self.write('new.csv', '\ufeffclick\n1\n2\n' * 3)
    self.assertEqual(prepare_pass(cfg, raw, self.path('new'), labelled=False)['samples'], 6)

  def test_a_line_of_names_in_another_order_refuses_the_file(self):
    records = ''.join(f'{i},{i + 1},{i % 2}\n' for i in range(400))
    tree = {'slots': [{'name': 'user'}, {'name': 'item'}], 'max_bad_share': 0.5}
    told = r"log.csv:402: found a line of names with 'item' in the place of the column 'user'"
    for other in ('item,user,click', '"item","user",click\r', '\ufeffitem,user, click'):
      for names in (None, ['user', 'item', 'click']):
        raw = self.write('log.csv', f'user,item,click\n{records}{other}\n{records}')
        with self.assertRaisesRegex(BadPass, told):
          prepare_pass(make_config(tree | {'columns': names}), raw, self.path('out'))
    for other in ('user,item,price,click', 'item,user,click,extra'):
      raw = self.write('log.csv', f'user,item,click\n{records}{other}\n{records}')
      with self.assertRaisesRegex(BadPass, r"log.csv:402: found a line of names with '.*' in the "):
        prepare_pass(make_config(tree), raw, self.path('out'))
    # With data.columns, the first line too; a record may have names of columns in it.
    raw = self.write('log.csv', f'item,user,click\n{records}')
    with self.assertRaisesRegex(BadPass, "log.csv:1: found a line of names with 'item' in the pl"):
      prepare_pass(make_config(tree | {'columns': ['user', 'item', 'click']}), raw, self.path('o'))
    text = 'event,role,click,user,item\nclick,user,1,5,7\n'
    _, one = self.prepare(make_config(tree), text)
    self.assertEqual(one.num_samples, 1)

  def test_quoting(self):
    texts = [
      '"Weird Al" Sample',
      'a, b',
      '6" nail',
      '"',
      '"x"',
      'back\\slash',
      'end\\',
      '\\"',
      'a""b',
    ]
    write = {
      'doubled': lambda text: '"' + text.replace('"', '""') + '"',
      'backslash': lambda text: '"' + text.replace('\\', r'\\').replace('"', r'\"') + '"',
      'none': str,
    }
    for quoting, written in write.items():
      by = '\t' if quoting == 'none' else ','
      cfg = make_config({'slots': [{'name': 'a'}], 'quoting': quoting, 'delimiter': by})
      header = by.join(('click', written('a')))
      lines = [f'1{by}{written(text)}' for text in texts]
      for blank in ('', '\n'):  # then each line is read by itself
        with self.subTest(quoting, blank=blank), self.assertNoLogs('absl', 'WARNING'):
          _, one = self.prepare(cfg, '\n'.join([header, *lines, blank]) + '\n')
          self.assertAllEqual(next(one.batches(99)).keys, hash_keys(texts, 1))

  def test_quotes_that_are_not_of_the_key_are_told(self):
    cfg = make_config({'slots': [{'name': 'a'}]})
    good = ['1,"a ""b"""', '1,"""b"" c"', '1,""', '1,"a"",""b"', '1,""""', '0,a', '1,"x,"""']
    with self.assertNoLogs('absl', 'WARNING'):
      self.prepare(cfg, '\n'.join(['click,a', *good]))
    for odd in ('1,"Weird Al" Sample', '1,6" nail', r'1,"say \"x\" y"', '1, "a"'):
      with self.assertLogs('absl', 'WARNING') as logs:
        self.prepare(cfg, '\n'.join(['click,a', 'click,a', *good, odd]))
      self.assertRegex(' '.join(logs.output), r':10: found a quote .*data.quoting: none for a log')

  def test_quoted_blocks_are_parsed_once(self):
    cfg = make_config({'slots': [{'name': 'a'}], 'dense': [{'name': 'x'}]})
    with mock.patch.object(csv_reader.pa.csv, 'read_csv', wraps=pa.csv.read_csv) as read:
      self.prepare(cfg, 'click,a,x\n1,"u, v",1.5\n0,w,\n')
    self.assertEqual(read.call_count, 1)

  def test_a_long_quoted_field(self):
    cfg = make_config({'slots': [{'name': 'a'}], 'max_bad_share': 0.5})
    _, one = self.prepare(cfg, 'a,click\n"' + 'x' * 200_000 + '",1\nopen,"1\n')
    self.assertAllEqual(next(one.batches(9)).keys, hash_keys(['x' * 200_000], 1))

  def test_label_positive(self):
    cfg = make_config(
      {'slots': [{'name': 'a'}], 'label_positive': r'>50K\.?', 'max_bad_share': 0.5}
    )
    meta, one = self.prepare(cfg, 'a, click\nx, >50K\nx, <=50K\nx, >50K.\nx,\nx,>50K+\n')
    self.assertAllEqual(next(one.batches(9)).label, [1, 0, 1, 0])
    self.assertEqual(meta['bad']['kinds'], {'label': 1})

  def test_real_labels(self):
    cfg = make_config({'slots': [{'name': 'a'}], 'max_bad_share': 0.6}, loss='squared_error')
    _, one = self.prepare(cfg, 'a,click\nx,-2.5\nx,7\nx,\nx,inf\n')
    self.assertAllEqual(next(one.batches(9)).label, [-2.5, 7])


class ParquetTest(PrepareTestCase):
  def test_same_keys_as_csv(self):
    rows = {
      'user': [5, None, -7, 5],
      'item': ['a b', 'größe', None, ''],
      'flag': [True, False, None, True],
      'tags': ['x|y', None, '', 'y'],
      'price': [1.5, None, -2.0, 1e19],
      'click': [1, 0, 0, 1],
    }
    table = pa.table(rows).append_column(
      'lists', pa.array([['x', 'y'], [None, ' '], None, [' z ']])
    )
    table = table.append_column('numbers', pa.array([[1, 2], [], None, [3]], pa.list_(pa.int32())))
    table = table.set_column(1, 'item', table['item'].dictionary_encode())
    pa.parquet.write_table(table, self.path('day.parquet'), row_group_size=3)
    slots = [{'name': n} for n in ('user', 'item', 'flag')] + [
      {'name': n, 'separator': '|'} for n in ('tags', 'lists', 'numbers')
    ]
    data = {'slots': slots, 'dense': [{'name': 'price'}]}
    with mock.patch.object(parquet_reader, 'BLOCK_ROWS', 2):
      prepare_pass(
        make_config(data | {'format': 'parquet'}), self.path('day.parquet'), self.path('parquet')
      )
    text = (
      'user,item,flag,tags,price,click,lists,numbers\n5,a '
      'b,true,x|y,1.5,1,x|y,1|2\n,größe,false,,,0,,\n'
      '-7,,,,-2,0,,\n5,,true,y,1e19,1,z,3\n'
    )
    cfg = make_config(data)
    prepare_pass(cfg, self.write('day.csv', text), self.path('csv'))
    for a, b in zip(
      next(PreparedPass(self.path('parquet')).batches(9)),
      next(PreparedPass(self.path('csv')).batches(9)),
    ):
      self.assertAllEqual(a, b)
    self.assert_equals_oracle(PreparedPass(self.path('parquet')), oracle(text, cfg)[0])

  def test_bad_rows_and_types(self):
    cfg = make_config({'slots': [{'name': 'a'}], 'dense': [{'name': 'x'}], 'format': 'parquet'})
    table = pa.table({'a': ['u', 'v', 'w'], 'x': [1.0, math.nan, 2], 'click': [1, 0, 1]})
    pa.parquet.write_table(table, self.path('p'))
    with self.assertRaisesRegex(
      UserError,
      r"p:2: column 'x': found nan; wanted a finite number, or blank.*; 1 of 3 records is bad",
    ):
      prepare_pass(cfg, self.path('p'), self.path('out'))
    pa.parquet.write_table(table.set_column(0, 'a', pa.array([0.5, 1, 2])), self.path('p'))
    with self.assertRaisesRegex(
      UserError, "p:1: column 'a': found 0.5; wanted a whole number or a text"
    ):
      prepare_pass(cfg, self.path('p'), self.path('out'))
    pa.parquet.write_table(table.slice(0, 0), self.path('p'))
    with self.assertRaisesRegex(UserError, 'p: found no records'):
      prepare_pass(cfg, self.path('p'), self.path('out'))
    told = "q: not a Parquet file .*; it looks like text, as it begins with 'a,b'$"
    with self.assertRaisesRegex(UserError, told):
      prepare_pass(cfg, self.write('q', 'a,b\n1,2\n'), self.path('out'))
    pa.parquet.write_table(table.rename_columns(['user', 'x', 'click']), self.path('p'))
    with self.assertRaisesRegex(UserError, r"p: no column 'a' \(slot 'a'\).*valid names are"):
      prepare_pass(cfg, self.path('p'), self.path('out'))


class BadInputTest(PrepareTestCase):
  CONFIG = {
    'slots': [{'name': 'user'}, {'name': 'topics', 'separator': '|', 'value_separator': ':'}],
    'dense': [{'name': 'price'}],
    'weight': 'w',
  }
  GOOD = 'click,user,topics,price,w\n' + '1,u,s:1,1,1\n' * 9

  def test_bad_records(self):
    for record, kind, message in (
      ('1,u,s:1,1', 'malformed', 'malformed record: found 4 fields; wanted 5 fields'),
      ('1,u,s:1,1,1,1', 'malformed', 'malformed record: found 6 fields; wanted 5 fields'),
      (
        '1,"u,s:1,1,1',
        'malformed',
        'malformed record: found an open quote or a stray line end; wanted 5 fields',
      ),
      (
        'yes,u,s:1,1,1',
        'label',
        "column 'click': found 'yes'; wanted 0 or 1, or data.label_positive, which says what text "
        'is a 1',
      ),
      (
        '2,u,s:1,1,1',
        'label',
        "column 'click': found '2'; wanted 0 or 1; data.label_positive says which are a 1, as "
        "'4|5'; model.loss: squared_error predicts the number",
      ),
      (
        '-1,u,s:1,1,1',
        'label',
        "column 'click': found '-1'; wanted 0 or 1; data.label_positive: '\\+?1' takes 1 and +1 as "
        '1, and -1 as 0',
      ),
      (',u,s:1,1,1', 'label', "column 'click': found ''; wanted 0 or 1"),
      (
        '1,u,s:1,NaN,1',
        'dense',
        "column 'price': found 'NaN'; wanted a finite number, or blank for missing; a text that "
        "stands for a missing number belongs in data.missing_values: ['NaN']",
      ),
      (
        '1,u,s:1,-inf,1',
        'dense',
        "column 'price': found '-inf'; wanted a finite number, or blank for missing",
      ),
      (
        '1,u,s:1,cheap,1',
        'dense',
        "column 'price': found 'cheap'; wanted a finite number, or blank for missing; a "
        'column of texts is a slot (data.slots); a text that stands for a missing number belongs '
        "in data.missing_values: ['cheap']",
      ),
      (
        '1,u,s:1,12 EUR,1',
        'dense',
        "column 'price': found '12 EUR'; wanted a finite number, or blank for missing; a "
        'column of texts is a slot (data.slots); a number is written without a unit',
      ),
      ('1,u,s:1,1,-1', 'weight', "column 'w': found '-1'; wanted a finite number >= 0"),
      ('1,u,s:1,1,', 'weight', "column 'w': found ''; wanted a finite number >= 0"),
      (
        '1,u,s:1|t:x,1,1',
        'value',
        "column 'topics': found 's:1|t:x'; wanted features as NAME or NAME:NUMBER",
      ),
    ):
      with self.subTest(record):
        raw = self.write('day.csv', self.GOOD + record + '\n')
        with self.assertRaises(UserError) as caught:
          prepare_pass(make_config(self.CONFIG), raw, self.path('out'))
        self.assertEqual(
          str(caught.exception),
          f'{raw}:11: {message}; 1 of 10 records is bad, data.max_bad_share allows 0 of them',
        )
        self.assertEqual(os.listdir(self.get_temp_dir()), ['day.csv'])
        with self.assertLogs('absl', 'WARNING') as logs:
          meta = prepare_pass(
            make_config(self.CONFIG | {'max_bad_share': 0.1}), raw, self.path('good')
          )
        self.assertIn(f'{raw}:11: {message}; dropped 1 bad of 10 records', logs.output[0])
        self.assertEqual((meta['samples'], meta['bad']['kinds']), (9, {kind: 1}))
        self.assertEqual(meta['bad']['examples'][0]['text'], record)
        tf.io.gfile.rmtree(self.path('good'))

  def test_files_that_are_no_log_are_refused(self):
    cfg = make_config(self.CONFIG)
    for content, message in (
      ('', 'the file is empty'),
      ('click,user,topics,price,w\n', 'found no records'),
      ('click,user,topics,price,w', 'found no records'),
      (
        'click,usr,topics,price,w\n1,u,,,1\n',
        r":1: no column 'user' \(slot 'user'\) among 5 columns; the nearest valid name is 'usr'",
      ),
      (
        'click,user,user,topics,price,w\n',
        r":1: column 'user' \(slot 'user'\) is there 2 times; wanted once",
      ),
      ('\n1,u,,,1\n', r':1: no column'),
    ):
      with self.assertRaisesRegex(UserError, 'day.csv(: )?' + message):
        prepare_pass(cfg, self.write('day.csv', content), self.path('out'))
    with self.assertRaisesRegex(UserError, 'nothing.csv: no such file'):
      prepare_pass(cfg, self.path('nothing.csv'), self.path('out'))
    os.mkdir(self.path('empty'))
    with self.assertRaisesRegex(BadPass, 'the directory holds no files; wanted part files'):
      prepare_pass(cfg, self.path('empty'), self.path('out'))
    with self.assertRaisesRegex(UserError, 'cannot read x: .*; wanted a file or a directory that'):
      with plain_errors('cannot read x'):
        os.listdir(self.write('file', ''))
    os.mkfifo(self.path('pipe'))
    with self.assertRaisesRegex(UserError, 'pipe: is a device, a pipe or a socket; wanted a file'):
      prepare_pass(cfg, self.path('pipe'), self.path('out'))
    for content, message in (
      ('click,user\r1,u\r0,v\r', 'found lines that end in CR; wanted LF or CRLF'),
      ('"click,user\n1,u\n', ':1: found an open quote or a stray line end in the first line'),
      (b'PAR1' + bytes(100), 'found a Parquet file; wanted text, or data.format: parquet'),
      ('click,user\n'.encode('utf-16'), 'found UTF-16 text; wanted UTF-8'),
      ('click,user\n'.encode('utf-16-be'), 'found zero bytes, as UTF-16 text has'),
      (gzip.compress(b'a'), 'found gzip-compressed data; wanted text, or the suffix .gz'),
      ('click;user;topics;price;w\n1;u;;;1\n', ':1: the first line has one field by .*";"'),
      ('1,5,s,2,1\n', ":1: no column 'click'.* looks like a record, .* or data.columns"),
      (b'c\x07ick,user\xff\n1,2\n', r":1: .* first line is no text, it begins with 'c\\x07ick,us"),
      (
        b'clicc\xff,u\n1,2\n',
        r":1: no column 'click' \(.*\) among 2 columns; the nearest valid name is 'u';",
      ),
      (
        'Click,user,topics,price,w\n',
        ":1: no column 'click' .*; the nearest valid name is 'Click'",
      ),
    ):
      with self.assertRaisesRegex(UserError, 'day.csv(: )?' + message):
        prepare_pass(cfg, self.write('day.csv', content), self.path('out'))
    with self.assertRaisesRegex(UserError, r'day.csv.gz: cannot be read'):
      prepare_pass(cfg, self.write('day.csv.gz', 'no gzip'), self.path('out'))
    with (
      mock.patch.object(text_blocks, 'MAX_LINE_BYTES', 10),
      mock.patch.object(text_blocks, 'BLOCK_BYTES', 8),
      self.assertRaisesRegex(UserError, 'found no line end in .* bytes'),
    ):
      prepare_pass(cfg, self.write('day.csv', b'\0' * 100), self.path('out'))

  def test_config(self):
    raw = self.write('day.csv', self.GOOD)
    for change, message in (
      ({'delimiter': ',,'}, "data.delimiter: found ',,'; wanted one ASCII character"),
      ({'delimiter': '\\t'}, 'a tab is written "\\\\t" in double quotes'),
      ({'columns': ['click', 'user']}, "data.columns: no column 'w'"),
    ):
      with self.assertRaisesRegex(UserError, message):
        prepare_pass(make_config(self.CONFIG | change), raw, self.path('out'))

  def test_command_line(self):
    os.makedirs(self.path('logs', 'a'))
    os.makedirs(self.path('logs', 'b'))
    self.write('logs/b/day.csv', 'click,user\n1,u\n0,v\n')
    raw = self.write('logs/a/day.csv', 'click,user\n1,u\n7,v\n')
    data = {'train': [self.path('logs', '*', 'day.csv')], 'label': 'click'}
    given = small.write(self.path('c.yaml'), data=data | {'slots': [{'name': 'user'}]})
    flags = '--config', given, '--out', self.path('out')
    done = commands.run('-m', 'trainer.cli.prepare', *flags)
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertIn(
      f"error: {raw}:3: column 'click': found '7'; wanted 0 or 1; data.label_positive says which "
      "are a 1, as '4|5'; model.loss: squared_error predicts the number; 1 of 2 records is bad",
      done.stderr,
    )
    self.assertNotIn('Traceback', done.stderr)
    done = commands.run('-m', 'trainer.cli.prepare', *flags, '--set', 'data.max_bad_share=0.5')
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertIn('train/a/day: 1 samples, 1 features, 1 bad records dropped', done.stdout)
    self.assertCountEqual(os.listdir(self.path('out', 'train')), ['a+day', 'b+day'])
    self.assertEqual(PreparedPass(self.path('out', 'train', 'a+day')).num_samples, 1)


class PreparedTest(PrepareTestCase):
  CONFIG = {
    'slots': [{'name': 'user'}, {'name': 'item'}],
    'dense': [{'name': 'x'}],
    'day_pattern': r'(\d+)',
  }

  def test_fields_of_chunks_are_those_of_the_samples(self):
    cfg = make_config(MIXED, MIXED_TABLES)
    rng = np.random.default_rng(0)
    lines = [HEADER]
    for _ in range(200):
      tags, topics = ('|'.join(rng.choice(list('abc'), rng.integers(4))) for _ in range(2))
      lines.append(f'1,i{rng.integers(5)},u{rng.integers(9)},{tags},,1,2,1,,{topics}')
    with mock.patch.object(prepared, 'CHUNK', 64), mock.patch.object(prepared_writer, 'CHUNK', 64):
      _, one = self.prepare(cfg, '\n'.join(lines) + '\n')
      batch = next(one.batches(200))
      self.assertEqual(one.num_chunks, 4)
      for slot in range(one.num_slots):
        found = [one.fields(chunk, slot) for chunk in range(4)]
        keys = np.concatenate([np.repeat(of, np.repeat(n, size)) for n, size, of in found])
        own = batch.keys[batch.segments % one.num_slots == slot]
        self.assertAllEqual(np.sort(keys), np.sort(own))
        self.assertEqual(sum(n.sum() for n, _, _ in found), 200)

  def test_used_again_only_when_unchanged(self):
    cfg = make_config(self.CONFIG)
    raw = self.write('day_7.csv', 'click,user,item,x\n1,u,i,1\n')

    def convert(cfg=cfg):
      with mock.patch('trainer.data.conversion.Writer', side_effect=KeyError('converts')):
        prepare_pass(cfg, raw, self.path('out'))

    with self.assertRaises(KeyError):
      convert()
    self.assertEqual(prepare_pass(cfg, raw, self.path('out'))['day'], 7)
    convert()
    for change in (
      {'slots': [{'name': 'item'}, {'name': 'user'}]},
      {'label_positive': '1'},
      {'day_pattern': None},
      {'dense': []},
    ):
      with self.assertRaises(KeyError):
        convert(make_config(self.CONFIG | change))
    os.utime(raw, ns=(0, 0))
    with self.assertRaises(KeyError):
      convert()
    prepare_pass(cfg, raw, self.path('out'))
    convert()

  def test_another_schema(self):
    _, _ = self.prepare(make_config(self.CONFIG), 'click,user,item,x\n1,u,i,1\n')
    for change, message in (
      (
        {'slots': [{'name': 'user'}]},
        r"its 'slots' has \['item', 2\], the config wants None; prepare it again",
      ),
      (
        {'slots': [{'name': 'item'}, {'name': 'user'}]},
        r"'slots' has \['user', 1\], the config wants \['item', 1\]",
      ),
      (
        {'dense': [{'name': 'x', 'transform': 'log1p'}]},
        r"'dense' has \['x', False\], the config wants \['x', True\]",
      ),
      ({'group': 'user'}, "'group' has None, the config wants 'user'"),
      ({'label': 'other'}, r"'label' has \['click', False\], the config wants \['other', False\]"),
    ):
      with self.assertRaisesRegex(UserError, message):
        PreparedPass(self.path('out'), make_config(self.CONFIG | change))

  def test_no_or_damaged_pass(self):
    self.prepare(make_config(self.CONFIG), 'click,user,item,x\n1,u,i,1\n0,u,,1\n')
    with self.assertRaisesRegex(UserError, 'not a prepared pass, it holds no meta.json'):
      PreparedPass(self.get_temp_dir())
    for damage, message in (
      (lambda f: os.truncate(f, 130), r'splits.npy: has 130 bytes; wanted 1\d\d; prepare the pass'),
      (os.remove, r'splits.npy: cannot be read \(.*; prepare the pass again'),
    ):
      damage(self.path('out', 'splits.npy'))
      with self.assertRaisesRegex(BadPass, message):
        PreparedPass(self.path('out'))

  def test_a_damaged_pass_whose_log_is_there_is_converted_again(self):
    cfg = make_config(self.CONFIG | {'group': 'user', 'weight': 'x'})
    text = 'click,user,item,x\n' + '1,u,i,1\n0,u,,1\n0,v,w,2\n' * 9
    self.prepare(cfg, text)
    wanted = next(PreparedPass(self.path('out')).batches(99))

    def flip(file):
      data = bytearray(pathlib.Path(file).read_bytes())
      data[-1] ^= 1
      pathlib.Path(file).write_bytes(data)

    for name in sorted(os.listdir(self.path('out'))):
      for damage in (flip, os.remove, lambda file: os.truncate(file, 20)):
        damage(self.path('out', name))
        with self.assertLogs('absl', 'WARNING') as told:
          prepare_pass(cfg, self.path('day.csv'), self.path('out'))
        self.assertRegex('\n'.join(told.output), '^[^\n]*; now converted again$')
        for a, b in zip(next(PreparedPass(self.path('out'), cfg).batches(99)), wanted):
          self.assertAllEqual(a, b)

  def test_no_flipped_bit_is_trained_on(self):
    cfg = make_config(self.CONFIG | {'group': 'user', 'weight': 'x'})
    self.prepare(cfg, 'click,user,item,x\n' + '1,u,i,1\n0,u,,1\n0,v,w,2\n' * 9)
    wanted = next(PreparedPass(self.path('out')).batches(99))
    rng = np.random.default_rng(0)
    names = sorted(os.listdir(self.path('out')))
    self.assertLen(names, 8)
    refused = 0
    for i in range(300):
      file = self.path('out', names[i % len(names)])
      with open(file, 'rb') as f:
        good = bytearray(f.read())
      bad = bytearray(good)
      bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
      with open(file, 'wb') as f:
        f.write(bad)
      try:
        found = next(PreparedPass(self.path('out'), cfg).batches(99))
        for a, b in zip(found, wanted):
          self.assertAllEqual(a, b)  # the bit was of a header, which is not read
      except UserError as e:
        refused += 1
        self.assertNotIn('\n', str(e))
      with open(file, 'wb') as f:
        f.write(good)
    self.assertGreater(refused, 100)

  def test_pass_without_samples(self):
    meta, one = self.prepare(
      make_config(self.CONFIG | {'max_bad_share': 1.0}), 'click,user,item,x\n5,u,i,1\n'
    )
    self.assertEqual((meta['samples'], one.num_batches(4), list(one.batches(4))), (0, 0, []))


class PrefetchTest(tf.test.TestCase):
  def test_order_and_end(self):
    self.assertEqual(list(prefetch(iter(range(100)), 3)), list(range(100)))
    self.assertEqual(list(prefetch([])), [])

  def test_an_error_comes_out_after_what_came_before_it(self):
    def fails():
      yield 1
      raise UserError('told')

    items = prefetch(fails())
    self.assertEqual(next(items), 1)
    with self.assertRaisesRegex(UserError, 'told'):
      next(items)

  def test_stops_with_its_consumer(self):
    made = []

    def endless():
      while True:
        made.append(0)
        yield 0

    for depth in (1, 4):
      made.clear()
      items = prefetch(endless(), depth)
      next(items)
      items.close()  # returns only once the thread has ended
      self.assertLessEqual(len(made), 2 * depth + 3)


class PublicLogsTest(PrepareTestCase):
  def convert(self, name, split, data=()):
    if not SHARED.is_dir():
      self.skipTest('../shared/data is not here')
    cfg = config.load(
      ROOT / 'configs' / f'{name}.yaml', [f'data.{k}={v}' for k, v in dict(data).items()]
    )
    (raw,) = (ROOT / p for p in getattr(cfg.data, split))
    prepare_pass(cfg, str(raw), self.path('out'))
    return cfg, raw.read_text(), PreparedPass(self.path('out'), cfg)

  def test_criteo(self):
    cfg, text, one = self.convert('criteo', 'test')
    good, bad = oracle(text, cfg, cfg.data.columns, '\t')
    self.assertEqual((len(good), len(bad), one.num_slots), (391, 0, 26))
    self.assert_equals_oracle(one, good, 100)
    cfg, text, one = self.convert(
      'criteo', 'train', {'train': '[../shared/data/criteo_10k/criteo_first10000.txt]'}
    )
    self.assertEqual((one.num_samples, sum(b.label.sum() for b in one.batches(999))), (10000, 2182))

  @pytest.mark.long
  def test_avazu(self):
    cfg, text, one = self.convert('avazu', 'test')
    self.assert_equals_oracle(one, oracle(text, cfg, cfg.data.columns)[0], 100)
    cfg, text, one = self.convert('avazu', 'train')  # with a header
    self.assertEqual((one.num_samples, sum(b.label.sum() for b in one.batches(999))), (8087, 1397))
    cfg, text, one = self.convert(
      'avazu', 'train', {'train': '[../shared/data/avazu_9k/ycjuan.tr.rx.csv]'}
    )  # CRLF
    self.assertEqual(one.num_samples, 2994)

  def test_adult(self):
    for split, samples in (('train', 32561), ('test', 16281)):
      cfg, text, one = self.convert('adult', split)
      batch = next(one.batches(samples))
      self.assertAllEqual(
        batch.label, [line.rstrip('.').endswith('>50K') for line in text.splitlines()]
      )
      self.assertAllEqual(
        batch.dense[:, 0], [float(line.split(',')[0]) for line in text.splitlines()]
      )
      fields = text.split('\n')[0].split(',')
      self.assertAllEqual(
        batch.keys[:8],
        [oracle_key(fields[i], slot) for slot, i in enumerate([1, 3, 5, 6, 7, 8, 9, 13], 1)],
      )


if __name__ == '__main__':
  tf.test.main()
