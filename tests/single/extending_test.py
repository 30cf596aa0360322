"""One of each kind of extension is added to a copy of the trainer, in as few files as may be."""

import os
import pathlib
import shutil
import subprocess
import sys

import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What to do, as docs/extending.md says, by file of trainer/: its text, or (before which line of it,
# new lines).
KEY = {
  'config/train.py': (
    '  keep: PositiveInt = 3',
    """  keep_days: int = 0
  \"\"\"How many days are kept.\"\"\"

  def mistakes(self, cfg):
    if self.keep_days > self.keep:
      yield 'keep_days', f'found {self.keep_days}; wanted at most keep'

""",
  )
}
FORMAT = {
  'config/formats.py': ("  'orc':", "  'pipes': Format(('.pipes',), has_lines=True),\n"),
  'data/pipes_format.py': """
from trainer.data import csv_format


def blocks(path, data, wanted, *part):
  return csv_format.blocks(path, data.model_copy(update={'delimiter': '|'}), wanted, *part)
""",
}
MADE = {
  'config/columns.py': (
    'MADE = {',
    """class Ending(Made):
  how = 'text'
  ending: str


""",
    '  for made in (Bins,',
    '  for made in (Ending,',
  ),
  'data/columns/ending.py': """
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from trainer.data.columns.graph_columns import GraphColumn


def arrow(made, reader):
  column = reader.texts(made.ending)
  texts = pc.utf8_slice_codeunits(column.dictionary, -1)
  return pa.DictionaryArray.from_arrays(column.indices, texts)


def graph(made, reader):
  return GraphColumn.single(tf.strings.substr(reader.texts(made.ending), -1, 1))
""",
}
INTERACTION = {
  'model/layers/length.py': """
import tensorflow as tf


class Length(tf.keras.layers.Layer):
  kind = 'length'
  needs = {'totals'}
  reads_dense = False

  def call(self, inputs, training=False):
    return tf.add_n([tf.reduce_sum(tf.square(t), 1, keepdims=True) for t in inputs.totals])
"""
}
METRIC = {
  'config/metrics.py': ("  'rmse':", "  'bias': Metric('bias', direction=-1),\n"),
  'model/metrics.py': ("    'ctr':", "    'bias': _ratio(predicted, weight),\n"),
}
# The most files that each may touch.
EXTENSIONS = {'key': (KEY, 1), 'format': (FORMAT, 2), 'made column': (MADE, 2)}
EXTENSIONS |= {'interaction': (INTERACTION, 1), 'metric': (METRIC, 2)}

USE = """
import pandas as pd
import trainer
from trainer.errors import UserError

with open('log.pipes', 'w') as f:
  f.write('label|user\\n' + '1|anna\\n0|bob\\n0|bib\\n' * 40)
config = {
  'data': {
    'train': ['log.pipes'],
    'valid': ['log.pipes'],
    'slots': [{'name': 'user'}, {'name': 'end', 'from': {'ending': 'user'}}],
  },
  'model': {'interactions': ['linear', 'length']},
  'train': {'epochs': 2, 'plateau': {'metric': 'bias'}},
}
try:
  trainer.fit(config, ['checkpoint.keep_days=9'], 'run')
except UserError as e:
  print(e)
run = trainer.fit(config, run_dir='run')
print('bias', run.evaluate('log.pipes')['bias'])
print('score', *run.predict(pd.DataFrame({'user': ['anna', 'x']})).round(3))
"""


class ExtendingTest(tf.test.TestCase):
  def test_one_of_each(self):
    folder = pathlib.Path(self.get_temp_dir()).resolve()
    for part in ('trainer', 'ops'):
      shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns('__pycache__'))
    for name, (files, most) in EXTENSIONS.items():
      self.assertLessEqual(len(files), most, name)
      for file, what in files.items():
        path = folder / 'trainer' / file
        if isinstance(what, str):
          self.assertFalse(path.exists(), file)
          path.write_text(what, encoding='utf-8')
          continue
        text = path.read_text(encoding='utf-8')
        before, new, *replaced = what
        self.assertEqual(text.count(before), 1, before)
        text = text.replace(before, new + before)
        path.write_text(text.replace(*replaced) if replaced else text, encoding='utf-8')
    done = subprocess.run(
      [sys.executable, '-c', USE],
      cwd=folder,
      env=os.environ | {'PYTHONPATH': str(folder)},
      capture_output=True,
      text=True,
      timeout=300,
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn('keep_days', done.stdout)
    self.assertIn('wanted at most keep', done.stdout)
    self.assertRegex(done.stdout, r'bias 0\.\d+')
    self.assertRegex(done.stdout, r'score 0\.\d+ 0\.\d+')


if __name__ == '__main__':
  tf.test.main()
