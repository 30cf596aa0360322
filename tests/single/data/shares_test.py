"""Parts of one file, joined, are the pass that one process prepares, byte for byte."""

import json
import os
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import tensorflow as tf

from tests.support import small
from trainer.data import prepared, prepared_writer, shares, text_blocks
from trainer.data.conversion import join_parts, prepare_part, prepare_pass
from trainer.errors import BadPass

CHUNK = 256


class SharesTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    # Small figures, so that small files are cut in many ways.
    self.enter_context(mock.patch.object(prepared, 'CHUNK', CHUNK))
    self.enter_context(mock.patch.object(prepared_writer, 'CHUNK', CHUNK))
    self.enter_context(mock.patch.object(shares, 'CHUNK', CHUNK))
    self.enter_context(mock.patch.object(shares, 'SCAN_BYTES', 1000))
    self.enter_context(mock.patch.object(shares, 'SHARED_BYTES', 1))
    self.enter_context(mock.patch.object(text_blocks, 'BLOCK_BYTES', 3000))

  def path(self, *names):
    return os.path.join(self.get_temp_dir(), self.id(), *names)

  def write(self, name, text):
    os.makedirs(self.path(), exist_ok=True)
    with open(self.path(name), 'w', encoding='utf-8', newline='') as f:
      f.write(text)
    return self.path(name)

  def config(self, **data):
    slots = [{'name': 'user'}, {'name': 'tags', 'separator': '|', 'value_separator': ':'}]
    tree = {'label': 'click', 'slots': slots, 'dense': [{'name': 'price'}], 'weight': 'w'}
    return small.config(data=tree | {'group': 'user', 'max_bad_share': 0.2} | data)

  def samples(self, n):
    rng = np.random.default_rng(n)
    return [
      {
        'click': int(rng.integers(2)),
        'user': int(rng.integers(500)),
        # The first samples have one tag each, without a value; so have many parts.
        'tags': f't{rng.integers(9)}'
        if i < 700
        else '|'.join(f't{t}:{t / 4}' for t in rng.integers(9, size=rng.integers(4))),
        'price': float(rng.integers(99)) / 8,
        'w': 1.5,
      }
      for i in range(n)
    ]

  def files_in(self, folder):
    found = {}
    for name in sorted(os.listdir(folder)):
      with open(f'{folder}/{name}', 'rb') as f:
        found[name] = f.read()
    return found

  def check(self, cfg, raw, sizes=(2, 3, 5)):
    prepare_pass(cfg, raw, self.path('alone'))
    want = self.files_in(self.path('alone'))
    file = shares.shareable(cfg.data, raw)
    for size in sizes:
      counted = [shares.count_lines(cfg.data, file, r, size) for r in range(size)]
      parts = shares.parts_of(cfg.data, file, counted, size)
      self.assertGreater(len(parts), 1)
      folders = [self.path(f'part{r}') for r in range(len(parts))]
      for part, folder in zip(parts, folders):
        prepare_part(cfg, file, part, folder)
      join_parts(cfg, raw, folders, self.path('joined'))
      found = self.files_in(self.path('joined'))
      self.assertEqual(found.keys(), want.keys())
      for name, data in want.items():
        self.assertEqual(found[name], data, f'{size}: {name}')

  def csv(self, samples):
    lines = [','.join(map(str, s.values())) for s in samples]
    return 'click,user,tags,price,w\n' + '\n'.join(lines) + '\n'

  def test_shared_text_gives_the_same_pass(self):
    for n in (1300, 5 * CHUNK, 2 * CHUNK + 1):
      samples = self.samples(n)
      with self.subTest(samples=n):
        self.check(self.config(), self.write(f'{n}.csv', self.csv(samples)))
    self.check(self.config(), self.write('open.csv', self.csv(samples).removesuffix('\n')))
    crlf = '\ufeff' + self.csv(samples).replace('\n', '\r\n')
    self.check(self.config(), self.write('crlf.csv', crlf))
    named = self.config(columns=['click', 'user', 'tags', 'price', 'w'])
    self.check(named, self.path('open.csv'))
    self.check(named, self.write('none.csv', self.csv(samples).partition('\n')[2]))
    self.check(
      self.config(), self.write('day.jsonl', ''.join(json.dumps(s) + '\n' for s in samples))
    )

  def test_the_last_samples_have_no_features(self):
    samples = self.samples(2 * CHUNK + 3)
    for sample in samples[-3:]:
      sample |= {'user': '', 'tags': ''}
    self.check(self.config(), self.write('blank.csv', self.csv(samples)))

  def test_a_name_that_some_parts_lack(self):
    samples = self.samples(1000)
    for sample in samples[:400]:
      del sample['tags']
    text = ''.join(json.dumps(s) + '\n' for s in samples)
    self.check(self.config(), self.write('day.jsonl', text))

  def test_dropped_records_and_blank_lines(self):
    """They shift the chunks; lines keep their numbers."""
    lines = self.csv(self.samples(1300)).split('\n')
    for at, text in ((5, 'x,1,,0,1'), (90, ''), (300, '1,"open'), (900, '1,2'), (1200, '7,,,,1')):
      lines.insert(at, text)
    self.check(self.config(), self.write('bad.csv', '\n'.join(lines)))
    with self.assertRaisesRegex(BadPass, r'bad.csv:6: .*; 4 of 1,304 records are bad'):
      self.check(self.config(max_bad_share=0), self.path('bad.csv'))

  def test_libsvm_and_libffm(self):
    data = {'label': 'label', 'dense': [], 'weight': None, 'group': None}
    users = np.random.default_rng(0).integers(0, 99, 1000)
    slots = [{'name': 'user', 'column': '1'}]
    text = ''.join(f'1 1:{u}\n' for u in users)
    self.check(self.config(**data, slots=slots), self.write('day.libsvm', text))
    text = ''.join(f'0 1:{u}:0.5\n' for u in users)
    self.check(self.config(**data, slots=slots), self.write('day.libffm', text))

  def test_shared_tables_give_the_same_pass(self):
    table = pa.Table.from_pylist(self.samples(1300))
    os.makedirs(self.path())
    many = pa.concat_tables([table] * 8)
    pa.orc.write_table(many, self.path('day.orc'), stripe_size=1, batch_size=1024)
    self.assertGreater(pa.orc.ORCFile(self.path('day.orc')).nstripes, 3)
    self.check(self.config(), self.path('day.orc'))
    for rows in (100, 256, 5000):
      pa.parquet.write_table(table, self.path('day.parquet'), row_group_size=rows)
      self.check(self.config(), self.path('day.parquet'))

  def test_what_is_shared(self):
    cfg = self.config()
    self.assertIsNone(shares.shareable(cfg.data, self.write('day.csv.gz', 'x')))
    self.assertIsNone(shares.shareable(cfg.data, self.write('day.tfrecord', 'x')))
    self.assertIsNone(shares.shareable(cfg.data, self.path('nothing.csv')))
    raw = self.write('day.csv', 'x\n')
    self.assertEqual(shares.shareable(cfg.data, raw).path, raw)
    with mock.patch.object(shares, 'SHARED_BYTES', 3):
      self.assertIsNone(shares.shareable(cfg.data, raw))


if __name__ == '__main__':
  tf.test.main()
