"""How predictions are written: into every kind of place, in every format."""

import io
import json
import os
import random
import threading
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import tensorflow as tf

from tests.support import fuzz, small
from trainer.data import carried, text_blocks
from trainer.errors import UserError
from trainer.files import whole_file


class WholeFileTest(tf.test.TestCase):
  """What stood in a file is lost only where the file is named by its own name."""

  def setUp(self):
    super().setUp()
    self.folder = self.get_temp_dir()
    self.path = os.path.join(self.folder, 'app.txt')
    self.begin()

  def begin(self):
    with open(self.path, 'w', encoding='utf-8') as f:
      f.write('before\n')

  def write(self, path):
    with whole_file(path) as f:
      f.write(b'new\n')

  def read(self):
    with open(self.path, encoding='utf-8') as f:
      return f.read()

  def test_descriptors_go_on_where_they_stand(self):
    for mode, want in (('ab', 'before\nnew\n'), ('r+b', 'new\nre\n'), ('wb', 'new\n')):
      for form in ('/dev/fd/{}', '/proc/self/fd/{}', f'/proc/{os.getpid()}/fd/{{}}', 'link'):
        self.begin()
        with open(self.path, mode) as f:
          path = form.format(f.fileno())
          if form == 'link':
            path = os.path.join(self.folder, f'link_{mode}')
            os.symlink(f'/dev/fd/{f.fileno()}', path)
          self.write(path)
          self.assertFalse(f.closed)
          os.fstat(f.fileno())  # it is still open
        self.assertEqual(self.read(), want, (mode, form))

  def test_names_links_pipes_and_devices(self):
    self.write(self.path)
    self.assertEqual(self.read(), 'new\n')
    link, fifo = os.path.join(self.folder, 'l'), os.path.join(self.folder, 'p')
    os.symlink('dangling', link)
    self.write(link)
    self.assertTrue(os.path.islink(link))
    self.assertTrue(os.path.isfile(os.path.join(self.folder, 'dangling')))
    os.mkfifo(fifo)
    found = []

    def read():
      with open(fifo, 'rb') as f:
        found.append(f.read())

    reader = threading.Thread(target=read)
    reader.start()
    self.write(fifo)
    reader.join()
    self.assertEqual(found, [b'new\n'])
    read_end, write_end = os.pipe()
    self.write(f'/dev/fd/{write_end}')
    self.assertEqual(os.read(read_end, 100), b'new\n')
    os.close(read_end)
    os.close(write_end)
    self.write('/dev/null')
    for path in (self.folder, '/dev/fd/9999'):
      with self.assertRaises(OSError):
        self.write(path)

  def test_an_error_leaves_the_old_file(self):
    with self.assertRaises(ValueError), whole_file(self.path) as f:
      f.write(b'half')
      raise ValueError
    self.assertEqual(self.read(), 'before\n')
    self.assertEqual(os.listdir(self.folder), ['app.txt'])
    missing = os.path.join(self.folder, 'missing', 'app.txt')
    with self.assertRaises(FileNotFoundError) as raised, whole_file(missing):
      pass
    self.assertEqual(raised.exception.filename, missing, 'no temporary name')


class FormatTest(tf.test.TestCase):
  def test_each_suffix_writes_what_it_says(self):
    read = {
      '.csv': pd.read_csv,
      '.txt': pd.read_csv,
      '': pd.read_csv,
      '.2024-01-31': pd.read_csv,
      '.tsv': lambda f: pd.read_csv(f, sep='\t'),
      '.json': lambda f: pd.read_json(f, lines=True),
      '.jsonl': lambda f: pd.read_json(f, lines=True),
      '.NDJSON': lambda f: pd.read_json(f, lines=True),
      '.parquet': pd.read_parquet,
      '.pq': pd.read_parquet,
    }
    probabilities = np.random.default_rng(0).random(5).astype(np.float32)
    names = ['a,"b"', 'ü', 'tab\t', "'", 'line']
    for suffix, reader in read.items():
      out = io.BytesIO()
      tables = carried.beside(
        iter([pa.table({'name': names[:3]}), pa.table({'name': names[3:]})]),
        iter([probabilities[:2], probabilities[2:]]),
        ['probability'],
      )
      carried.write_tables(tables, out, carried.out_suffix(f'folder.d/scores{suffix}'))
      table = reader(io.BytesIO(out.getvalue()))
      self.assertEqual(list(table['name']), names, suffix)
      self.assertAllEqual(table['probability'].to_numpy().astype(np.float32), probabilities)

  def test_predictions_of_a_label_stand_beside_it(self):
    log = pa.table({'clicked': [0, 1], 'predicted_clicked': [7, 8]})
    predicted = np.float32([[0.5, 0.25], [0.75, 0.125]])
    (table,) = carried.beside(iter([log]), iter([predicted]), ['clicked', 'bought'])
    wanted = {'predicted_predicted_clicked': [0.5, 0.75], 'bought': [0.25, 0.125]}
    self.assertEqual(table.to_pydict(), log.to_pydict() | wanted)
    items = pa.table({'sample': [0, 0, 1], 'item': ['a', 'b', 'c'], 'score': [3.0, 2.0, 1.0]})
    (table,) = carried.joined(iter([pa.table({'item': ['x', 'y']})]), iter([items]))
    wanted = {'item': ['x', 'x', 'y'], 'predicted_item': ['a', 'b', 'c'], 'score': [3.0, 2.0, 1.0]}
    self.assertEqual(table.to_pydict(), wanted)

  def test_odd_columns_stand_beside_their_own_predictions(self):
    """In every format, over several blocks and passes."""
    with mock.patch.object(text_blocks, 'BLOCK_BYTES', 300):
      for seed in range(80):
        self.assertIsNone(fuzz.carried_trial(random.Random(seed), self.get_temp_dir()), seed)

  def test_another_number_of_records_is_refused_before_a_line_is_written(self):
    path = os.path.join(self.get_temp_dir(), 'ask.jsonl')
    with open(path, 'w', encoding='utf-8') as f:
      f.writelines(json.dumps({'n': n}) + '\n' for n in range(9))
    data = small.config(data={'slots': [{'name': 'n'}]}).data
    tables = carried.carried_tables(data, [(path, 8)], ['n'], '')
    with self.assertRaisesRegex(UserError, 'found 9 records for --columns beside 8 predictions'):
      next(tables)
    with open(path, 'a', encoding='utf-8') as f:
      f.write('{"n": 1, "n": 2}\n')
    tables = carried.carried_tables(data, [(path, 10)], ['n'], '')
    with self.assertRaisesRegex(UserError, "ask.jsonl:10: .* found .the name 'n' twice"):
      next(tables)

  def test_json_lines_hold_json_alone(self):
    table = pa.table({'x': [1.5, float('nan')], 'l': [[float('inf'), 2.0], None]})
    out = io.BytesIO()
    carried.write_tables(iter([table]), out, '.jsonl')
    lines = [json.loads(t, parse_constant=self.fail) for t in out.getvalue().splitlines()]
    self.assertEqual(lines, [{'x': 1.5, 'l': [None, 2.0]}, {'x': None, 'l': None}])

  def test_other_suffixes_are_refused(self):
    for path in ('s.xml', 's.csv.gz', 's.xlsx', 'a.csv/s.Orc'):
      with self.assertRaisesRegex(UserError, f'--out: found {path}; wanted one of .txt, .csv'):
        carried.out_suffix(path)


if __name__ == '__main__':
  tf.test.main()
