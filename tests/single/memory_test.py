"""A job holds no more memory the more passes it has trained on."""

import ctypes
import gc
import os
import sys
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.support.steps import make_config
from trainer.comm.communicator import SingleProcess
from trainer.training.job import Job
from trainer.training.step import TrainStep

PASSES, WARM_UP = 50, 20
# A tensor made of a Python number loses 330 bytes in TensorFlow 2.16. A pass may keep some kB: of
# its entry in the ledger, its export, and the features that it brought.
MOST_BYTES, MOST_OBJECTS = 16_000, 250


class MallocInfo(ctypes.Structure):
  """What mallinfo2 of glibc returns."""

  _fields_ = [
    (name, ctypes.c_size_t)
    for name in (
      'arena',
      'ordblks',
      'smblks',
      'hblks',
      'hblkhd',
      'usmblks',
      'fsmblks',
      'uordblks',
      'fordblks',
      'keepcost',
    )
  ]


def held() -> tuple[int, int]:
  """Returns the bytes that malloc has given out, and the number of Python's small objects."""
  gc.collect()
  mallinfo = ctypes.CDLL(None).mallinfo2
  mallinfo.restype = MallocInfo
  info = mallinfo()
  return info.uordblks + info.hblkhd, sys.getallocatedblocks()


class MemoryTest(tf.test.TestCase):
  def test_a_pass_leaves_no_memory_behind(self):
    if not hasattr(ctypes.CDLL(None), 'mallinfo2'):
      self.skipTest('wants the mallinfo2 of glibc 2.33')
    folder, random = tempfile.mkdtemp(dir=self.get_temp_dir()), np.random.default_rng(0)
    for i in range(PASSES):
      with open(f'{folder}/day_{i // 50}_{i:03}.csv', 'w', encoding='utf-8') as f:
        f.write('label,user,item\n')
        f.writelines('%d,%d,%d\n' % tuple(random.integers([2, 20, 20])) for _ in range(100))
    cfg = make_config(
      {
        'run_dir': f'{folder}/run',
        'data.train': [f'{folder}/day_*.csv'],
        'data.day_pattern': r'day_(\d+)',
        'data.slots': [{'name': 'user'}, {'name': 'item'}],
        'data.dense': [],
        'train.progressive_validation': True,
        'export': {'delta_every_passes': 1, 'base': True},
      }
    )
    job, figures = Job(cfg, SingleProcess(), TrainStep(cfg, SingleProcess())), []
    trained = job.stream.trained

    def note() -> None:
      trained()
      figures.append(held())

    # Nothing is asked of the disk here, and waiting for it would take most of the time.
    with (
      mock.patch.object(job.stream, 'trained', note),
      mock.patch.object(os, 'fsync', lambda _: None),
    ):
      self.assertEqual(0, job.run())
    self.assertLen(figures, PASSES)
    grown = np.diff(np.array(figures)[WARM_UP:], axis=0)
    bytes_a_pass, objects_a_pass = np.median(grown, 0)  # what happens once does not count
    self.assertLess(bytes_a_pass, MOST_BYTES)
    self.assertLess(objects_a_pass, MOST_OBJECTS)


if __name__ == '__main__':
  tf.test.main()
