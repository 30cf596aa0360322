"""One log gives one prepared pass and one model in every format on N ranks. Run by horovodrun."""

import json
import os
import shutil
import tempfile
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import tensorflow as tf

from tests.support.ranks import ranks
from tests.support.steps import make_config, rows_of
from trainer.comm.communicator import SingleProcess
from trainer.data import prepared, prepared_writer, shares
from trainer.data.conversion import prepare_pass
from trainer.errors import BadPass
from trainer.training import inputs
from trainer.training.inputs import Inputs
from trainer.training.step import StepFlags, TrainStep

SAMPLES = 300


def write_all(folder: str) -> list[str]:
  """Writes one log, of columns that every format can hold, as day.FORMAT; returns the suffixes."""
  rng = np.random.default_rng(0)
  samples = np.stack([rng.integers(0, n, SAMPLES) for n in (2, 40, 15)], 1).tolist()
  names = ('label', '1', '2')
  texts = {
    'csv': 'label,1,2\n' + ''.join('{},{},{}\n'.format(*s) for s in samples),
    'jsonl': ''.join(json.dumps(dict(zip(names, s))) + '\n' for s in samples),
    'libsvm': ''.join('{} 1:{} 2:{}\n'.format(*s) for s in samples),
    'libffm': ''.join('{} 1:{}:1 2:{}:1\n'.format(*s) for s in samples),
  }
  for suffix, text in texts.items():
    with open(f'{folder}/day.{suffix}', 'w', encoding='utf-8') as f:
      f.write(text)
  table = pa.table(dict(zip(names, zip(*samples))))
  pa.parquet.write_table(table, f'{folder}/day.parquet', row_group_size=100)
  pa.orc.write_table(table, f'{folder}/day.orc')
  with tf.io.TFRecordWriter(f'{folder}/day.tfrecord') as writer:
    for sample in samples:
      features = {
        name: tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        for name, value in zip(names, sample)
      }
      example = tf.train.Example(features=tf.train.Features(feature=features))
      writer.write(example.SerializeToString())
  return [*texts, 'parquet', 'orc', 'tfrecord']


def files_in(folder: str) -> dict[str, bytes]:
  """The files of a prepared pass but meta.json, which says of what it was made."""
  found = {}
  for name in sorted(os.listdir(folder)):
    if name != 'meta.json':
      with open(f'{folder}/{name}', 'rb') as f:
        found[name] = f.read()
  return found


class FormatsTest(tf.test.TestCase):
  def config(self, folder, suffix):
    return make_config(
      {
        'data': {
          'train': [f'{folder}/day.{suffix}'],
          'label': 'label',
          'slots': [{'name': 'user', 'column': '1'}, {'name': 'item', 'column': '2'}],
        },
        'lifecycle': {'admission': 'none', 'eviction': 'none', 'decay': 1.0},
        'model.interactions': ['linear', 'fm'],
        'train.batch_size': 64,
      }
    )

  def trained(self, cfg, communicator, folder):
    """The rows that this process owns when the pass was trained on, and the pass's path."""
    step = TrainStep(cfg, communicator)
    own = Inputs(cfg, communicator, step, lambda: None, folder)
    (one,) = own.of_split('train')
    for staged in own.staged(one, shuffle=True):
      step.train(staged, step.route(staged), None, StepFlags(False, False, False))
    return rows_of(step.store.export_state()), one.path

  def test_every_format_trains_the_same_model(self):
    communicator = ranks()
    is_first = communicator.rank == 0
    folder = communicator.broadcast(tempfile.mkdtemp() if is_first else None)
    suffixes = communicator.broadcast(write_all(folder) if is_first else None)
    alone, path = None, None
    if is_first:
      cfg = self.config(folder, 'csv')
      alone, path = self.trained(cfg, SingleProcess(), f'{folder}/alone')
      self.assertLen(alone, 55)
    for suffix in suffixes:
      cfg = self.config(folder, suffix)
      own, found = self.trained(cfg, communicator, f'{folder}/{suffix}')
      rows = communicator.gather([[key, *row] for key, row in own.items()])
      if is_first:
        self.assertEqual(files_in(found), files_in(path), suffix)
        rows = {key: row for part in rows for key, *row in part}
        self.assertEqual(rows.keys(), alone.keys(), suffix)
        for key, row in alone.items():
          self.assertAllClose(rows[key], list(row), rtol=1e-5, atol=1e-7, msg=suffix)
    communicator.barrier()
    if is_first:
      shutil.rmtree(folder)

  def test_ranks_share_a_file(self):
    communicator = ranks()
    is_first = communicator.rank == 0
    folder = communicator.broadcast(tempfile.mkdtemp() if is_first else None)
    communicator.broadcast(write_all(folder) if is_first else None)
    for module, name, value in (
      (prepared, 'CHUNK', 64),
      (prepared_writer, 'CHUNK', 64),
      (shares, 'CHUNK', 64),
      (shares, 'SCAN_BYTES', 500),
      (shares, 'SHARED_BYTES', 1),
    ):
      self.enter_context(mock.patch.object(module, name, value))
    for suffix in ('csv', 'jsonl', 'libffm', 'parquet', 'orc'):
      cfg = self.config(folder, suffix)
      with mock.patch.object(inputs, 'prepare_part', wraps=inputs.prepare_part) as own:
        one = Inputs(cfg, communicator, None, lambda: None, f'{folder}/{suffix}')
        (found,) = one.of_split('train')
      self.assertEqual(own.call_count, 1)
      if is_first:
        meta = prepare_pass(cfg, cfg.data.train[0], f'{folder}/{suffix}/alone')
        self.assertEqual(found.meta, {k: v for k, v in meta.items() if k != 'crc32'})
        self.assertEqual(files_in(found.path), files_in(f'{folder}/{suffix}/alone'))
        self.assertEqual(os.listdir(f'{folder}/{suffix}/train'), ['day'])
      communicator.barrier()
    with open(f'{folder}/day.csv', 'a', encoding='utf-8') as f:
      if is_first:
        f.write('7,1,1\n')
    communicator.barrier()
    cfg = self.config(folder, 'csv')
    one = Inputs(cfg, communicator, None, lambda: None, f'{folder}/bad')
    with self.assertRaisesRegex(BadPass, rf'day.csv:{SAMPLES + 2}: .*; 1 of {SAMPLES + 1} records'):
      one.of_split('train')
    communicator.barrier()
    if is_first:
      self.assertEmpty(os.listdir(f'{folder}/bad/train'))
      shutil.rmtree(folder)


if __name__ == '__main__':
  tf.test.main()
