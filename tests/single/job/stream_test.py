"""The stream: which pass is trained when, when days end, and what becomes of every pass."""

import json
import os
import tempfile
import time
import types
from unittest import mock

import tensorflow as tf

from tests.support import small
from trainer.comm.communicator import SingleProcess
from trainer.data import passes
from trainer.errors import BadPass, UserError
from trainer.job import ready_passes
from trainer.job.stream import End, EndDay, Stream, TrainPass, Wait
from trainer.training.ledger import FILE, Ledger
from trainer.training.run_state import Progress

HOUR = 3600.0


class StreamTest(tf.test.TestCase):
  """Drives a stream as trainer.job.job does, without training."""

  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    self.now, self.told = 1.75e9, []  # in 2025

  def write(self, name, text=None):
    path = os.path.join(self.folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w', encoding='utf-8') as f:
      f.write(name if text is None else text)
    return path

  def announce(self, *names):
    for name in names:
      self.write(name)
      self.write(name + '.done', '')

  def start(self, state=None, watch=True, train=(), epochs=1, **data):
    """Makes a stream; with `state`, as after a restart from a checkpoint that holds it."""
    tree = {
      'watch': self.folder if watch else None,
      'train': [os.path.join(self.folder, one) for one in train],
      'slots': [{'name': 'a'}],
      'day_pattern': r'day_(\d+(?:-\d+-\d+)?)',
    }
    self.cfg = small.config(data=tree | data, train={'epochs': epochs})
    if state is None:
      self.state = types.SimpleNamespace(progress=Progress(), ledger=Ledger())
    else:
      ledger, progress = json.loads(json.dumps(state))
      self.state = types.SimpleNamespace(progress=Progress(**progress), ledger=Ledger(ledger))
    self.stream = Stream(
      self.cfg, SingleProcess(), self.state, lambda *told: self.told.append(told), lambda: self.now
    )

  def saved(self):
    return self.state.ledger.state(), vars(self.state.progress).copy()

  def run_until_idle(self, bad=(), limit=100):
    """Takes what the stream says until it waits or is finished; returns it in short."""
    taken, progress = [], self.state.progress
    for _ in range(limit):
      match self.stream.next():
        case TrainPass(one, late):
          if one.name in bad:
            self.stream.refused(BadPass(f'{one.name} is bad'))
            continue
          if not late:
            progress.day = one.day if self.cfg.data.day_pattern else None
          taken.append(('late ' if late else '') + one.name)
          self.stream.trained()
          progress.done, progress.last = progress.done + 1, one.name
        case EndDay(data_pass=one) if one and one.name in bad:
          self.stream.refused(BadPass(f'{one.name} is bad'))
        case EndDay(day, is_empty) as ended:
          taken.append(f'{"empty" if is_empty else "end"} {day}')
          self.stream.day_ended(ended)
        case Wait():
          return taken
        case End(is_finished=True):
          return taken + ['finished']
    raise AssertionError('the stream does not come to an end')

  def next_train(self):
    """Takes what the stream says until a pass is to be trained on; returns its name."""
    while not isinstance(action := self.stream.next(), TrainPass):
      self.stream.day_ended(action)
    self.state.progress.day = action.data_pass.day
    return action.data_pass.name

  def fates(self):
    return {entry.name: entry.fate for entry in self.state.ledger}

  def test_the_order_of_a_listing_is_that_of_its_days(self):
    for name in ('day_10.csv', 'day_2_h_10.csv', 'day_2_h_9.csv', 'day_1.csv'):
      self.write(name)
    wanted = ['day_1', 'end 1', 'day_2_h_9', 'day_2_h_10', 'end 2', 'day_10', 'end 10', 'finished']
    self.start(watch=False, train=['day_*.csv'])
    self.assertEqual(self.run_until_idle(), wanted)
    self.assertEqual(self.run_until_idle(), ['finished'])
    self.stream.epoch_begins()
    self.state.progress.epoch = 1
    self.assertEqual(self.run_until_idle(), wanted, 'the next epoch has them all again')
    self.assertEqual(self.state.ledger.counts(), {'trained': 8})

  def test_a_watched_directory_is_taken_in_order_wherever_it_is_taken_up_again(self):
    days = [f'day_{day}.csv' for day in (9, 10, 11)]
    self.announce(*days)
    wanted = ['day_9', 'end 9', 'day_10', 'end 10', 'day_11']
    self.start()
    self.assertEqual(self.run_until_idle(), wanted)
    self.start(self.saved())
    self.assertEqual(self.run_until_idle(), [])
    self.announce('day_12.csv')
    self.assertEqual(self.run_until_idle(), ['end 11', 'day_12'])

  def test_a_pass_that_was_begun_comes_first(self):
    self.announce('day_1.csv', 'day_2.csv')
    self.start()
    self.assertEqual(self.stream.next().data_pass.name, 'day_1')
    self.announce('day_0.csv')
    self.start(self.saved())
    self.assertEqual(self.stream.next().data_pass.name, 'day_1')
    self.stream.trained()

  def test_what_was_folded_since_a_look_is_not_seen_anew(self):
    """The look is used again, and has trained passes of which the ledger keeps a hash alone."""
    names = [f'day_1_h_{hour}' for hour in range(9)]
    self.announce(*names)
    announced = passes.announced

    def slowly(*args):
      self.now += 0.1
      return announced(*args)

    self.start()
    with mock.patch.object(ready_passes, 'announced', slowly):
      for name in names:
        self.assertEqual(self.next_train(), name)
        self.stream.trained()
        self.state.ledger.fold(2)
    self.assertEqual(self.run_until_idle(), [])
    self.assertEqual(self.state.ledger.counts(), {'trained': 9})
    self.assertEqual(self.fates(), dict.fromkeys(names[-2:], 'trained'))

  def test_a_look_that_takes_long_is_not_repeated_at_once(self):
    """So looking takes a small share of the time, and new passes are found within seconds."""
    looks = []

    def slowly(*args):
      looks.append(self.now)
      self.now += 0.1 if len(looks) < 3 else 60
      return passes.announced(*args)

    self.enter_context(mock.patch.object(ready_passes, 'announced', slowly))
    self.announce('day_1.csv', 'day_2.csv')
    self.start()
    self.assertEqual(self.run_until_idle(), ['day_1', 'end 1', 'day_2'])
    self.announce('day_3.csv')
    self.now += 4.9
    self.assertEqual(self.run_until_idle(), [])
    self.assertLen(looks, 1)
    self.now += 0.2
    self.assertEqual(self.run_until_idle(), ['end 2', 'day_3'])
    self.now += 5.1
    self.assertEqual(self.run_until_idle(), [])
    self.assertLen(looks, 3)
    self.now += 10.1  # at the latest, whatever a look takes
    self.run_until_idle()
    self.assertLen(looks, 4)

  def test_late_passes(self):
    self.announce('day_1.csv', 'day_3.csv')
    for late, wanted, fate in (
      ('train', ['day_1', 'end 1', 'day_3', 'late day_2', 'end 3', 'day_4'], 'late'),
      ('skip', ['day_1', 'end 1', 'day_3', 'end 3', 'day_4'], 'skipped'),
    ):
      self.start(late=late)
      taken = self.run_until_idle()
      self.announce('day_2.csv')
      taken += self.run_until_idle()
      self.announce('day_4.csv')
      self.assertEqual(taken + self.run_until_idle(), wanted)
      self.assertEqual(self.fates()['day_2'], fate)
      (told,) = self.told
      self.assertEqual(told[:2], ('day_2', fate))
      self.assertIn('its day 2 is over', told[2])
      for name in ('day_2', 'day_4'):
        os.remove(f'{self.folder}/{name}.csv.done')
      self.told.clear()
    self.start(late='fail')
    self.run_until_idle()
    self.announce('day_2.csv')
    with self.assertRaisesRegex(UserError, "day_2.csv: its day 2 is over.*data.late is 'fail'"):
      self.run_until_idle()

  def test_a_late_pass_is_told_what_ended_its_day(self):
    def told_of(late_day):
      name = f'day_{late_day}_late.csv'
      self.announce(name)
      self.run_until_idle()
      return self.told[-1][2].partition(f'{name}: its day {late_day} is over')[2]

    self.announce('day_1.csv', 'day_3.csv')
    with self.subTest('a later day is open'):
      self.start()
      self.run_until_idle()
      self.assertEqual(told_of(2), ': the newest day so far is 3')
    with self.subTest('a pass of a later day has come, but is not begun'):
      self.start()
      while not isinstance(action := self.stream.next(), EndDay):
        self.state.progress.day = action.data_pass.day
        self.stream.trained()
      self.stream.day_ended(action)
      self.assertEqual(told_of(1), ': it ended when a pass of day 2 came')
    with self.subTest('the log has ended'):
      self.start(watch=False, train=['day_1.csv'])
      self.run_until_idle()
      saved = self.saved()
      self.start(saved)
      self.assertEqual(told_of(1), ': it ended when data.train ended')
      del saved[1]['closed_when']  # as earlier versions saved it
      self.start(saved)
      self.assertEqual(told_of(1), '')
    with self.subTest('no pass came'):
      self.start(close_day_after_hours=30)
      self.run_until_idle()
      self.now += 31 * HOUR
      self.run_until_idle()
      self.assertEqual(told_of(3), ': it ended when no pass had come for 30 hours')

  def test_a_pass_is_trained_once(self):
    self.announce('day_1.csv', 'day_2.csv')
    self.start(watch=False, train=['day_1.csv', 'day_2.csv'])
    self.assertEqual(self.run_until_idle()[-1], 'finished')
    self.start(self.saved())
    self.assertEqual(self.run_until_idle(), [], 'trained from data.train, then announced')
    self.write('day_2_again.csv', 'day_2.csv')  # the same bytes
    self.write('day_2_again.csv.done', '')
    os.makedirs(f'{self.folder}/archive')
    os.rename(f'{self.folder}/day_1.csv', f'{self.folder}/archive/day_1.csv')
    self.write('archive/_SUCCESS', '')
    self.assertEqual(self.run_until_idle(), [])
    self.assertEqual([told[1] for told in self.told], ['seen', 'seen'])
    reasons = {told[0]: told[2] for told in self.told}
    self.assertRegex(reasons['day_2_again'], 'its content is that of .*day_2.csv$')
    self.assertRegex(reasons['archive/day_1'], 'is that of .*day_1.csv, which is gone')

  def test_a_file_that_changes_after_training_is_told_once(self):
    self.announce('day_1.csv')
    self.start()
    self.run_until_idle()
    self.write('day_1.csv', 'more than before')
    with self.assertLogs('absl', 'WARNING') as logs:
      self.assertEqual(self.run_until_idle() + self.run_until_idle(), [])
    self.assertRegex(str(logs.output), 'day_1.csv: has changed since it was trained on .9 bytes')
    self.assertLen(logs.output, 1)

  def test_a_file_that_changes_after_its_pass_was_begun_is_trained_as_it_is_then(self):
    """As after a restart, or after going back to the checkpoint before the pass."""
    self.announce('day_1.csv')
    self.start()
    self.assertIsInstance(self.stream.next(), TrainPass)
    self.write('day_1.csv', 'more than before')
    self.start(self.saved())
    with self.assertNoLogs('absl', 'WARNING'):
      self.assertEqual(self.run_until_idle() + self.run_until_idle(), ['day_1'])
    self.assertEqual([entry.size for entry in self.state.ledger], [len('more than before')])

  def test_what_was_trained_may_go_while_its_marker_stays(self):
    self.announce('day_1.csv')
    self.start()
    self.run_until_idle()
    os.remove(os.path.join(self.folder, 'day_1.csv'))
    with self.assertNoLogs('absl', 'WARNING'):
      self.assertEqual(self.run_until_idle(), [])

  def test_a_marker_without_its_file_waits(self):
    self.write('day_1.csv.done', '')
    self.announce('day_2.csv')
    self.start()
    with self.assertLogs('absl', 'WARNING') as logs:
      self.assertEqual(self.run_until_idle(), ['day_2'])
    self.assertRegex(str(logs.output), 'day_1.csv: is announced but not there')
    self.write('day_1.csv')
    self.assertEqual(self.run_until_idle(), ['late day_1'])

  def test_bad_passes_are_set_aside_up_to_a_limit(self):
    self.announce('day_1.csv', 'day_2.csv', 'day_3.csv', 'other.csv')
    self.start(max_refused_passes=2)
    self.assertEqual(self.run_until_idle(bad=['day_2']), ['day_1', 'end 1', 'day_3'])
    self.assertEqual(
      self.fates(),
      {'other.csv': 'refused', 'day_1': 'trained', 'day_2': 'refused', 'day_3': 'trained'},
    )
    self.write('day_2.csv', 'repaired')
    self.assertEqual(self.run_until_idle(), ['late day_2'])
    self.announce('day_4.csv', 'day_5.csv', 'day_6.csv')
    bad = ['day_4', 'day_5', 'day_6']
    message = 'day_6 is bad; 3 passes in a row were refused, data.max_refused_passes allows 2'
    with self.assertRaisesRegex(UserError, message):
      self.run_until_idle(bad)
    for name in bad[1:]:
      os.remove(f'{self.folder}/{name}.csv.done')
    self.start(self.saved(), max_refused_passes=2)
    self.assertEqual(self.run_until_idle(), [], 'what was refused is taken away')
    self.start(watch=False, train=['day_1.csv'])
    message = '^day_1 is bad$'
    with self.assertRaisesRegex(BadPass, message):
      self.run_until_idle(bad=['day_1'])

  def test_a_bad_pass_of_a_later_day_ends_no_day(self):
    self.announce('day_1.csv', 'day_2.csv')
    self.start()
    self.assertEqual(self.run_until_idle(bad=['day_2']), ['day_1'])
    self.announce('day_1_again.csv')
    self.assertEqual(self.run_until_idle(), ['day_1_again'], 'it is not late')
    self.write('day_2.csv', 'repaired')
    self.assertEqual(self.run_until_idle(), ['end 1', 'day_2'])

  def test_a_run_of_refused_passes_alone_is_an_error(self):
    for bad in (['day_1'], ['day_1', 'day_2'], ['day_2'], []):
      self.write('day_1.csv')
      self.write('day_2.csv')
      self.start(watch=False, train=['day_*.csv'], max_refused_passes=2)
      if len(bad) < 2:
        self.run_until_idle(bad)
        continue
      message = '^day_2 is bad; no pass of data.train was trained on$'
      with self.assertRaisesRegex(BadPass, message):
        self.run_until_idle(bad)

  def test_a_bad_pass_now_and_then_never_ends_the_run(self):
    self.start(max_refused_passes=2)
    for week in range(1, 20):
      names = [f'day_{week}_{i}' for i in range(4)]
      self.announce(*(f'{name}.csv' for name in names))
      self.assertEqual(self.run_until_idle(bad=names[:2])[-2:], names[2:])
      self.start(self.saved(), max_refused_passes=2)

  def test_passes_that_vanish_do_not_count(self):
    self.start(max_refused_passes=1)
    for day in range(1, 5):
      self.announce(f'day_{day}.csv')
      self.assertEqual(self.next_train(), f'day_{day}')
      os.remove(f'{self.folder}/day_{day}.csv')
      self.stream.refused(BadPass('no such file'))
    self.assertEqual(self.run_until_idle(), [])
    self.assertEqual(set(self.fates().values()), {'refused'})
    self.write('day_4.csv')
    self.assertEqual(self.run_until_idle(), ['day_4'], 'it is there again')

  def test_a_pass_far_ahead_is_refused_until_its_day_is_near(self):
    for days, near, far in (
      (['day_1', 'day_2'], ['day_9'], ['day_17', 'day_2024-01-01', 'day_90000000']),
      (
        ['day_2024-02-27'],
        ['day_2024-03-01'],
        ['day_2024-03-13', 'day_90000000', 'day_5000-01-01'],
      ),
    ):
      self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
      self.start()
      self.announce(*(f'{name}.csv' for name in days + far))
      self.assertEqual([x for x in self.run_until_idle() if x.startswith('day')], days)
      self.assertCountEqual([told[0] for told in self.told], far)
      self.assertRegex(self.told[0][2], r'days after .*; data.max_days_ahead allows 14')
      self.start(self.saved())
      self.assertEqual(self.run_until_idle(), [], 'it is told once')
      self.announce(*(f'{name}.csv' for name in near))
      taken = [x for x in self.run_until_idle() if x.startswith('day')]
      self.assertEqual(taken, near + far[:1], 'its day has come near')
      self.told.clear()
    self.start(self.saved(), max_days_ahead=None)
    taken = [x for x in self.run_until_idle() if x.startswith('day')]
    self.assertEqual(taken, ['day_5000-01-01', 'day_90000000'])

  def test_the_first_pass_of_dates_is_compared_with_today(self):
    self.now = time.mktime((2024, 2, 27, 12, 0, 0, 0, 0, -1))
    self.announce('day_90000000.csv', 'day_2024-03-13.csv', 'day_2025-02-27.csv')
    self.start()
    self.assertEqual(self.run_until_idle(), [])
    self.assertRegex(self.told[0][2], '13.*15 days after 20240227, today; .*allows 14')
    self.announce('day_2024-02-20.csv')
    self.assertEqual(self.run_until_idle(), ['day_2024-02-20'])

  def test_a_pause_within_the_bound_is_caught_up_with_day_by_day(self):
    self.announce(*(f'day_{day}.csv' for day in range(1, 400, 14)))
    self.start()
    self.assertLen(self.run_until_idle(), 29 + 28)
    self.assertEmpty(self.told)

  def test_days_end_by_time(self):
    self.announce('day_2024-02-27.csv')
    self.start(close_day_after_hours=30)
    self.assertEqual(self.run_until_idle(), ['day_2024-02-27'])
    self.now += 29 * HOUR
    self.assertEqual(self.run_until_idle(), [])
    self.now += 2 * HOUR
    self.assertEqual(self.run_until_idle(), ['end 20240227'])
    self.start(self.saved(), close_day_after_hours=30)
    self.now += 22 * HOUR
    self.assertEqual(self.run_until_idle(), [])
    self.now += 25 * HOUR  # nearly two days after the last one's end
    self.assertEqual(self.run_until_idle(), ['empty 20240228'])
    self.now += 24 * HOUR
    self.assertEqual(self.run_until_idle(), ['empty 20240229'])
    self.announce('day_2024-03-03.csv', 'day_2024-02-29.csv')
    self.assertEqual(
      self.run_until_idle(),
      ['late day_2024-02-29', 'empty 20240301', 'empty 20240302', 'day_2024-03-03'],
    )
    self.assertEqual(self.state.progress.empty_days, 4)

  def test_a_clock_that_leaps_ends_one_day(self):
    self.announce('day_2024-02-27.csv')
    self.start(close_day_after_hours=30)
    self.assertEqual(self.run_until_idle(), ['day_2024-02-27'])
    self.now += 60 * 24 * HOUR
    self.assertEqual(self.run_until_idle(), ['end 20240227'])
    for _ in range(3):
      self.start(self.saved(), close_day_after_hours=30)
      self.assertEqual(self.run_until_idle(), [])
    self.now += 24 * HOUR
    self.assertEqual(self.run_until_idle(), ['empty 20240228'])
    self.now -= 60 * 24 * HOUR
    self.assertEqual(self.run_until_idle(), [])
    self.announce('day_2024-03-02.csv')
    self.assertEqual(self.run_until_idle(), ['empty 20240229', 'empty 20240301', 'day_2024-03-02'])

  def test_a_clock_that_is_set_back_keeps_no_day_open(self):
    self.announce('day_1.csv')
    self.start(close_day_after_hours=30)
    self.assertEqual(self.run_until_idle(), ['day_1'])
    self.now -= 1000 * HOUR
    self.assertEqual(self.run_until_idle(), [])
    self.now += 31 * HOUR
    self.assertEqual(self.run_until_idle(), ['end 1'])

  def test_without_closing_by_time_empty_days_do_not_count(self):
    self.announce('day_1.csv', 'day_5.csv')
    self.start()
    self.assertEqual(self.run_until_idle(), ['day_1', 'end 1', 'day_5'])
    self.now += 1000 * HOUR
    self.assertEqual(self.run_until_idle(), [])

  def test_how_far_behind(self):
    self.announce('day_1.csv', 'day_2.csv')
    os.utime(f'{self.folder}/day_1.csv.done', (self.now - 50, self.now - 50))
    os.utime(f'{self.folder}/day_2.csv.done', (self.now - 20, self.now - 20))
    self.start()
    first = self.stream.next()
    self.assertEqual((first.waiting, first.seconds_behind), (1, 50.0))

  def test_stop_and_a_directory_that_is_away(self):
    self.start()
    self.assertEqual(self.stream.next(stop=True), End(is_finished=False))
    self.start(watch=False)
    self.cfg = self.cfg.model_copy(
      update={'data': self.cfg.data.model_copy(update={'watch': f'{self.folder}/away'})}
    )
    stream = Stream(self.cfg, SingleProcess(), self.state, print)
    with self.assertLogs('absl', 'WARNING') as logs:
      self.assertIsInstance(stream.next(), Wait)
    self.assertRegex(str(logs.output), 'away: No such file or directory; waiting for it')

  def test_the_ledger_for_people(self):
    self.announce('day_1.csv')
    self.start()
    self.run_until_idle()
    self.state.ledger.write(self.folder)
    with open(os.path.join(self.folder, FILE), encoding='utf-8') as f:
      (line,) = f
    self.assertRegex(line, '"path": "/.*day_1.csv", "name": "day_1", "day": 1, .*"size": 9')
    self.assertIn('"fate": "trained"', line)

  def test_passes_of_long_ago_are_known_by_what_is_left_of_them(self):
    """Whatever the number of whole entries, a pass that comes again has the same fate."""
    for whole in (0, 1, 1000):
      self.folder, self.told = tempfile.mkdtemp(dir=self.get_temp_dir()), []
      days = [f'day_{day}.csv' for day in range(1, 6)]
      self.announce(*days, 'day_6.csv')
      self.start()
      wanted = [x for day in range(1, 6) for x in (f'day_{day}', f'end {day}')]
      self.assertEqual(self.run_until_idle(bad=['day_6']), wanted[:-1])
      size = len(json.dumps(self.state.ledger.state()))
      self.state.ledger.fold(whole)
      if not whole:
        self.assertLess(len(json.dumps(self.state.ledger.state())), size / 4)
      self.start(self.saved())
      self.assertEqual(self.run_until_idle(), [], 'the same paths')
      self.assertLen(self.told, 1)  # of day_6
      self.assertEqual(self.state.ledger.counts(), {'trained': 5, 'refused': 1})
      os.makedirs(f'{self.folder}/old')
      os.rename(f'{self.folder}/day_1.csv', f'{self.folder}/old/day_1_copy.csv')  # the same bytes
      self.write('old/_SUCCESS', '')
      self.write('day_2.tsv', 'the same name')
      self.write('day_2.tsv.done', '')
      self.assertEqual(self.run_until_idle(), [])
      self.assertEqual(
        {told[:2] for told in self.told[1:]}, {('old/day_1_copy', 'seen'), ('day_2', 'seen')}
      )
      self.announce('day_2_late.csv')
      self.assertEqual(self.run_until_idle(), ['late day_2_late'], 'what is new is new')

  def test_folded_passes_cost_no_look(self):
    self.announce(*(f'day_{day}.csv' for day in range(1, 6)))
    self.start()
    self.run_until_idle()
    self.state.ledger.fold(0)
    self.start(self.saved())
    with mock.patch.object(passes, 'is_prepared', side_effect=AssertionError):
      with mock.patch.object(ready_passes, 'stamp_if_any', side_effect=AssertionError):
        self.assertEqual(self.run_until_idle(), [])

  def test_a_new_epoch_forgets_the_marks_of_the_one_before(self):
    self.announce('day_1.csv', 'day_2.csv')
    self.start(watch=False, train=['day_*.csv'], epochs=3)
    for epoch in range(3):
      self.state.progress.epoch = epoch
      self.stream.epoch_begins()
      self.assertLen(self.run_until_idle(), 5)
      self.state.ledger.fold(0)
      self.assertLen(self.state.ledger.state()['marks'], 64)
    self.assertEqual(self.state.ledger.counts(), {'trained': 6})


if __name__ == '__main__':
  tf.test.main()
