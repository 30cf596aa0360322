"""Events: whatever happens to the reports, the training goes on, and the trouble is told."""

import os
import signal
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

from trainer import command_line
from trainer.reporting.events import EventLog, read_events
from trainer.reporting.listener import Listener
from trainer.reporting.status import Status
from trainer.reporting.tensorboard import TensorBoard
from trainer.training.run_log import RunLog


class EventLogTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.run_dir = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.path = os.path.join(self.run_dir, 'metrics.jsonl')

  def open(self, keep_bytes=None):
    return EventLog(self.run_dir, True, keep_bytes)

  def steps(self):
    return read_events(self.run_dir)['step'].tolist()

  def test_what_a_checkpoint_had_not_seen_is_removed(self):
    log = self.open(0)
    log.write('train', 1)
    place = log.position
    log.write('train', 2)
    log = self.open(place)
    log.write('train', 3)
    self.assertEqual((self.steps(), log.troubles), ([1, 3], []))

  def test_what_became_of_the_job_stays(self):
    log = self.open(0)
    log.write('start', 0)
    place = log.position
    log.write('save', 0)
    log.write('train', 1)
    log.append({'event': 'lost', 'step': 2, 'reason': 'rank 1 was lost: it hung up. The job ends'})
    log = self.open(place)
    log.write('start', 0)
    log.write('train', 1)
    events = read_events(self.run_dir)
    self.assertEqual(events['event'].tolist(), ['start', 'save', 'lost', 'start', 'train'])

  def test_a_bound(self):
    log = EventLog(self.run_dir, True, 0, most_bytes=1000)
    log.write('start', 0)
    places = []
    for step in range(1, 200):
      log.write('train', step)
      places.append(log.position)
      self.assertLessEqual(os.path.getsize(self.path), 1000)
    self.assertLess(places[-1] - places[0], 60 * 200)
    self.assertAllGreater(np.diff(places), 0)
    first, *steps = self.steps()
    self.assertEqual((first, steps), (0, list(range(steps[0], 200))))
    self.assertGreater(len(steps), 7)
    self.assertEqual(read_events(self.run_dir)['dropped'].iloc[0], places[steps[0] - 2])
    log = EventLog(self.run_dir, True, places[196 - 1], most_bytes=1000)  # as a run that continues
    self.assertEqual(log.position, places[196 - 1])
    self.assertEqual(self.steps()[-1], 196)
    for step in range(197, 300):
      log.write('train', step)
    log = EventLog(self.run_dir, True, places[1])  # a checkpoint from before all that is left
    log.write('train', 3)
    self.assertEqual((self.steps(), log.troubles), ([0, 3], []))

  def test_cut_while_it_is_written(self):
    log = self.open(0)
    log.write('train', 1)
    log.write('train', 2)
    os.truncate(self.path, 20)
    log.write('train', 3)
    log.write('train', 4)
    self.assertEqual(self.steps(), [3, 4])
    self.assertLen(log.troubles, 1)
    self.assertRegex(log.troubles[0], 'metrics.jsonl: was cut while the run wrote to it: earlier')

  def test_a_removed_file_is_written_anew_and_told(self):
    log = self.open(0)
    log.write('train', 1)
    os.remove(self.path)
    log.write('train', 2)
    log.write('train', 3)
    self.assertEqual(self.steps(), [2, 3])
    self.assertLen(log.troubles, 1)
    self.assertRegex(log.troubles[0], 'metrics.jsonl: was removed or replaced while the run')

  def test_a_rotated_file_is_written_anew_and_told(self):
    log = self.open(0)
    for step in range(9):
      log.write('train', step)
    place = log.position
    os.rename(self.path, self.path + '.1')
    log.write('train', 9)
    self.assertEqual(self.steps(), [9])
    again = self.open(place)
    again.write('train', 10)
    self.assertEqual(self.steps(), [9, 10], 'nothing is filled with zeros, nothing cut')
    self.assertRegex(again.troubles[0], 'metrics.jsonl: has changed .* at this checkpoint')

  def test_cut_within_a_line(self):
    log = self.open(0)
    log.write('train', 1)
    log.write('train', 2)
    os.truncate(self.path, log.position - 5)
    log.write('train', 3)
    self.assertEqual(self.steps(), [1, 3])

  def test_bytes_that_are_no_text(self):
    log = self.open(0)
    for step in range(3):
      log.write('train', step)
    with open(self.path, 'r+b') as f:
      f.seek(f.read().index(b'train', 40))
      f.write(b'\xff')
    self.assertEqual(self.steps(), [0, 2])

  def test_a_report_that_fails_ends_nothing(self):
    log = self.open(0)
    with log.guarded('report.html'):
      raise TypeError('found a text')
    self.assertEqual(log.troubles, ['report.html: TypeError: found a text'])

  def test_a_full_disk_is_told_once(self):
    log = self.open(0)
    log.tell([TensorBoard(self.run_dir, {})])
    full = OSError(28, 'No space left on device')
    with mock.patch.object(log, '_write_line', side_effect=full):
      log.write('train', 1)
      log.write('train', 2)
    with mock.patch.object(TensorBoard, 'scalars', side_effect=full):
      log.write('train', 3, auc=0.5)
    log.write('train', 4)
    self.assertEqual(self.steps(), [3, 4])
    self.assertLen(log.troubles, 2)
    self.assertRegex(log.troubles[0], 'metrics.jsonl: No space left on device')
    self.assertRegex(log.troubles[1], 'tensorboard/: No space left on device')

  def test_whoever_writes_tells_the_listeners(self):
    """In mode ps_async a worker may become the first one, which writes, and so may it again."""
    log = RunLog(self.run_dir, mock.Mock(steps=3), Status('trainer', 60))
    heard = mock.create_autospec(Listener, instance=True, what='a test')
    log.listeners = [heard]
    for is_first, times in ((False, 0), (True, 1), (False, 1), (True, 2)):
      log.open(is_first)
      log.write('train', auc=0.5)
      for call in (heard.begin, heard.wrote, heard.scalars):
        self.assertEqual(call.call_count, times)
    self.assertEqual(self.steps(), [3, 3])

  def test_unwritten_reports_change_the_status(self):
    self.assertEqual(command_line.status(0, []), 0)
    self.assertEqual(command_line.status(0, ['x']), 1)
    for number, wanted in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
      self.assertEqual(command_line.status(number, []), wanted)
      self.assertEqual(command_line.status(number, ['x']), wanted)


if __name__ == '__main__':
  tf.test.main()
