"""A job holds no more memory the more passes it has trained on."""

import ctypes
import gc
import os
import signal
import sys
import tempfile
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.support import small
from tests.support.steps import make_config

pytestmark = pytest.mark.reports

PASSES, PASSES_OF_A_DAY, WARM_UP = 50, 5, 20
# A tensor made of a Python number loses 330 bytes in TensorFlow 2.16. A pass may keep some kB: of
# its entry in the ledger, its export, and the features that it brought.
MOST_BYTES, MOST_OBJECTS = 16_000, 250
# A day end adds its event, and the metrics that report.html is drawn from once it is drawn.
MOST_BYTES_A_DAY, MOST_OBJECTS_A_DAY = 100_000, 1_500


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


@pytest.mark.long
class MemoryTest(tf.test.TestCase):
  def test_a_pass_leaves_no_memory_behind(self):
    if not hasattr(ctypes.CDLL(None), 'mallinfo2'):
      self.skipTest('wants the mallinfo2 of glibc 2.33')
    folder, random = tempfile.mkdtemp(dir=self.get_temp_dir()), np.random.default_rng(0)
    for i in range(PASSES):
      with open(f'{folder}/day_{i // PASSES_OF_A_DAY}_{i:03}.csv', 'w', encoding='utf-8') as f:
        f.write('label,user,item\n')
        f.writelines('%d,%d,%d\n' % tuple(random.integers([2, 20, 20])) for _ in range(100))
      os.mknod(f'{f.name}.done')
    cfg = make_config(
      {
        'run_dir': f'{folder}/run',
        'data.train': [],
        'data.watch': folder,
        'data.day_pattern': r'day_(\d+)',
        'data.slots': [{'name': 'user'}, {'name': 'item'}],
        'data.dense': [],
        'train.progressive_validation': True,
        'export': {'delta_every_passes': 1, 'base': True},
      }
    )
    job, figures = small.job(cfg), []
    trained = job.stream.trained

    def note(*meta: object) -> None:
      trained(*meta)
      figures.append(held())
      if len(figures) == PASSES:
        os.kill(os.getpid(), signal.SIGTERM)

    # Nothing is asked of the disk here, and waiting for it would take most of the time.
    with (
      mock.patch.object(job.stream, 'trained', note),
      mock.patch.object(os, 'fsync', lambda _: None),
    ):
      self.assertEqual(0, job.run())
    self.assertLen(figures, PASSES)
    figures = np.array(figures)[WARM_UP:]
    bytes_a_pass, objects_a_pass = np.median(np.diff(figures, axis=0), 0)  # not what happens once
    self.assertLess(bytes_a_pass, MOST_BYTES)
    self.assertLess(objects_a_pass, MOST_OBJECTS)
    bytes_a_day, objects_a_day = np.median(np.diff(figures[::PASSES_OF_A_DAY], axis=0), 0)
    self.assertLess(bytes_a_day - PASSES_OF_A_DAY * bytes_a_pass, MOST_BYTES_A_DAY)
    self.assertLess(objects_a_day - PASSES_OF_A_DAY * objects_a_pass, MOST_OBJECTS_A_DAY)


if __name__ == '__main__':
  tf.test.main()
