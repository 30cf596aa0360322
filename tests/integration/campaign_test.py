"""The campaign of faults in short, and of one process; the long one is `make campaign`."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

KINDS = (
  'signals, single',
  'two of everything',
  'full disks',
  'splits',
  'buckets',
  'items tables',
  'special files',
  'damaged checkpoints',
  'linked layers damaged',
  'damaged prepared passes',
  'damaged exports',
  'damaged configs',
  'streams',
  'topics',
  'configs',
  'TF_CONFIG',
  'messages',
  'peers',
)


@pytest.mark.long
class CampaignTest(tf.test.TestCase):
  def test_no_fault_goes_unnoticed(self):
    results = os.path.join(self.get_temp_dir(), 'results.jsonl')
    command = [sys.executable, '-m', 'campaigns.faults', '--share', '0.01', '--out', results]
    done = subprocess.run([*command, '--only', *KINDS], capture_output=True, text=True, timeout=900)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    begins = done.stdout.index('- **')  # before it, a line for each unit that ended
    for kind in KINDS:
      self.assertIn(f'| {kind} | ', done.stdout)
    again = subprocess.run(
      [*command, '--only', *KINDS], capture_output=True, text=True, timeout=900
    )
    self.assertEqual(again.stdout, done.stdout[begins:], 'what has ended is not done again')

  def test_a_kind_that_is_none(self):
    command = [sys.executable, '-m', 'campaigns.faults', '--only', 'streams', 'stream']
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    self.assertEqual(done.returncode, 2)
    self.assertIn("argument --only: invalid choice: 'stream'", done.stderr)


if __name__ == '__main__':
  tf.test.main()
