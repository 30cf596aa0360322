"""Where layers and rows are if there is a GPU, and what crosses between them in a step.

No test has a GPU: a second logical CPU device stands for it (tests/support/placement.py).
"""

import json
import math
import os
import subprocess
import sys

import pytest
import tensorflow as tf


@pytest.mark.long
class PlacementTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    done = subprocess.run(
      [sys.executable, '-m', 'tests.support.placement'],
      env=os.environ | {'TF_USE_LEGACY_KERAS': '1', 'TF_CPP_MIN_LOG_LEVEL': '3'},
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
    cls.models = [json.loads(line) for line in done.stdout.splitlines()]

  def test_layers_and_their_optimizer_are_on_the_gpu_and_rows_on_the_host(self):
    for told in self.models:
      self.assertEqual((told['devices'], told['own_ops']), (['CPU:1'], ['CPU:0']), told['model'])

  def test_a_step_there_is_a_step_on_the_host(self):
    for told in self.models:
      self.assertGreater(told['moved'], 0.01)
      self.assertLess(
        told['apart'], 0.05 if told['products'] == 'bfloat16' else 1e-5, told['model']
      )

  def test_weights_and_optimizer_are_float32(self):
    for told in self.models:
      self.assertEqual(told['dtypes'], ['float32', 'int64'])  # int64: the steps taken

  def test_slot_sums_and_their_gradients_cross_and_no_rows(self):
    """Also what layers and loss read of a sample, its prediction, and numbers of the step."""
    samples, slots, columns, width = 20, 3, 2, 4
    sums = [[samples, slots], [samples, slots, width], [samples, width], [samples]]
    labels, norm, dense = [samples], [samples, slots], [samples, columns]
    wanted = {
      'dcnv2': ([sums[1], labels, labels, norm, dense], [sums[1], labels]),
      'dlrm': ([sums[1], labels, labels, norm, dense], [sums[1], labels]),
      'deepfm': ([*sums, labels, labels, norm, dense], [*sums, labels]),
      # Pairs of fields are summed on the host; [samples]: field_squares, and the pairs.
      'ffm': (
        [sums[0], *[[samples]] * 2, labels, labels, dense],
        [sums[0], *[[samples]] * 2, labels],
      ),
      'tasks': ([*sums, *[[samples, 2]] * 2, norm, dense], [*sums, [samples, 2]]),
      # Vectors of the history, their mask, and the candidate.
      'history': (
        [*sums[:3], sums[1], norm, labels, labels, norm, dense],
        [*sums[:3], sums[1], labels],
      ),
    }
    for told in self.models:
      self.assertEqual(told['unknown'], [])
      for way, shapes in zip(('to', 'from'), wanted[told['model']]):
        # Learning rate, weight, loss, counts, and where dropout's draws begin.
        large = [shape for shape in told[way] if math.prod(shape) > 5]
        self.assertCountEqual(large, shapes, f'{told["model"]}, {way} the GPU')
        self.assertLess(sum(math.prod(s) for s in told[way] if s not in large), 20)

  def test_that_is_less_than_rows(self):
    told = self.models[0]
    self.assertLess(sum(math.prod(shape) for shape in told['pooled']), sum(told['rows']))


if __name__ == '__main__':
  tf.test.main()
