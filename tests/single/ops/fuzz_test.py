"""Whatever an op is called with, it gives a result or an error; the process lives."""

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

CALLS = os.environ.get('FUZZ_CALLS', '40')  # of each op


class FuzzTest(tf.test.TestCase):
  @pytest.mark.long
  def test_wrong_arguments(self):
    log = pathlib.Path(self.get_temp_dir(), 'last_call')
    log.touch()
    # Not commands.run, whose processes imported TensorFlow before this turns its allocator off.
    command = [sys.executable, '-m', 'tests.support.fuzz_ops', '0', CALLS, str(log)]
    try:
      done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
      self.fail(f'no end within 300 s; last call: {log.read_text()}')
    self.assertEqual(done.returncode, 0, f'{done.stderr[-3000:]}\nlast call: {log.read_text()}')
    self.assertIn('ctr_pool', done.stdout.split())  # it fails itself where an op is left out

  def test_a_table_of_an_impossible_number_is_an_error(self):
    from ops import library

    with self.assertRaisesRegex(tf.errors.InvalidArgumentError, 'table_of_field: found 2147483647'):
      library.load().ctr_pool(
        linear=[],
        inverse=tf.zeros([0], tf.int32),
        factors=[],
        offsets=[0],
        values=[],
        segments=tf.zeros([0], tf.int32),
        batch_size=0,
        starts=[0],
        parts=0,
        table_of_field=[2**31 - 1],
        poolings=[],
        averaged=[],
        part_tables=[],
        part_widths=[],
        part_field=[],
        part_slots=[],
        part_totals=[],
      )


if __name__ == '__main__':
  tf.test.main()
