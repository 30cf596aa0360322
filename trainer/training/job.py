"""A job: trains passes day by day, evaluates, saves and exports, as the config asks."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from ops.sharding import shards_of
from trainer import config, files, runtime
from trainer.comm import horovod
from trainer.comm.communicator import Communicator
from trainer.comm.heartbeat import Heartbeat
from trainer.data.features import dense_stats
from trainer.data.labels import one_class
from trainer.data.log_files import modified
from trainer.data.passes import passes
from trainer.data.prepared import PreparedPass
from trainer.embedding.slot_statistics import SlotStatistics, shards_to_read
from trainer.errors import BadPass, UserError
from trainer.model.metrics import State, result
from trainer.reporting import closing
from trainer.reporting.events import EventLog, read_events
from trainer.reporting.live_line import LiveLine, shortened
from trainer.storage import chain, export
from trainer.storage.run_lock import RunLock
from trainer.training import gate
from trainer.training.day_end import end_day, table_counts
from trainer.training.evaluation import Evaluation
from trainer.training.importance import MOST_SAMPLES, slot_importance
from trainer.training.inputs import Inputs
from trainer.training.ledger import TRAINED
from trainer.training.loop import train_in_lockstep
from trainer.training.run_state import Progress, RunState, open_run_dir
from trainer.training.step import Step, TrainStep
from trainer.training.stopwatch import Stopwatch
from trainer.training.stream import EndDay, Finished, Stopped, Stream, TrainPass, Wait

SECONDS_BETWEEN_LOOKS = 0.5  # at the watched directory
FEW_STEPS = 50  # in which a model has hardly left what it began with
WAITING_TOLD = 0.1  # the share of the time that steps wait for input, from which on it is shown


class Job:
  """Leads a model through its passes and days: trains, evaluates, saves, exports, reports.

  Args:
    cfg: the job's config.
    communicator: how the processes meet.
    step: of the ranks, or of the parameter servers' workers.
    progress_made: called once a step or a chunk of slow work; the heartbeat tells the others.
    prepared_folder: where converted passes go; None: run_dir/prepared.
    init_from: a run_dir whose model a new run begins with.

  Attributes:
    state: the place in the data, and checkpoints.
    stream: which pass comes next.
    inputs: gives each process its share of the passes.
    evaluation: scores passes.
    lock: keeps other jobs off the run_dir from `open_run` on.
    stop_requested: the number of the signal that asked this process to stop, or 0.
  """

  def __init__(
    self,
    cfg: config.Config,
    communicator: Communicator,
    step: Step,
    progress_made: Callable[[], None] = lambda: None,
    prepared_folder: str | None = None,
    init_from: str | None = None,
  ):
    self._init_from = init_from
    self.cfg, self.communicator, self.step = cfg, communicator, step
    self.progress_made = progress_made
    self.state = RunState(cfg, communicator, step)
    folder = prepared_folder or os.path.join(cfg.run_dir, 'prepared')
    self.inputs = Inputs(
      cfg, communicator, step, progress_made, folder, lambda text: self._live.show(text)
    )
    self.evaluation = Evaluation(cfg, communicator, step, self.inputs, progress_made)
    self.stream = Stream(cfg, communicator, self.state, self._pass_told)
    self.stop_requested = 0
    self._save_is_due = False
    self._one_class_told = False
    self._marker: str | None = None  # of the pass that was trained last
    self._evaluated: dict[str, list[PreparedPass]] = {}  # data.valid and data.test
    self.lock = RunLock(cfg.run_dir)
    self._clock = Stopwatch()
    self._replay = chain.Replay()
    self._begun_at: int | None = None  # the step that a run was continued at
    self._had_work = True
    self._events = EventLog('', active=False)
    self._live = LiveLine(active=False)

  @property
  def progress(self) -> Progress:
    """The place in the data."""
    return self.state.progress

  def run(self) -> int:
    """Trains what the config asks for, from the last checkpoint on where there is one.

    Returns:
      0 where all was done; where the job was asked to stop and its state was saved, the number of
      the signal, the same on every process.
    """
    train = self.cfg.train
    if train.dense_optimizer.kind == 'ftrl' and (train.plateau or train.schedule):
      logging.warning(
        "train.dense_optimizer.kind: found 'ftrl', whose weights shrink with its learning rate, "
        'which %s changes; wanted another kind, or rates that stay',
        'train.plateau' if train.plateau else 'train.schedule',
      )
    if (reason := self.cfg.uncalibrated()) and self.communicator.rank == 0:
      logging.warning('%s', reason)
    try:
      self.open_run()
      return self._run()
    finally:
      self.inputs.stop()
      self.lock.release()

  def _run(self) -> int:
    cfg = self.cfg
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._request_stop)
    for split in ('valid', 'test'):
      found = passes(cfg, getattr(cfg.data, split), f'data.{split}')
      self._evaluated[split] = self.inputs.prepared(found, split)
    valid, test = self._evaluated['valid'], self._evaluated['test']
    while True:
      if not self._epoch():
        self.save()
        self._live.show(
          f'stopped at step {self.progress.step}; the state is saved: run the same command again '
          'to continue',
          keep=True,
        )
        self._write('end', status='stopped')
        stopped_by = min(filter(None, self.communicator.gather(self.stop_requested)))
        # SIGTERM is how a supervisor ends a process that follows a stream.
        return 0 if cfg.data.watch and stopped_by == signal.SIGTERM else stopped_by
      if valid and self.progress.unvalidated:
        self._validate(valid)
      self.progress.unvalidated = False
      if not self.state.is_saved:
        self.save()
      if self.progress.finished or self.progress.epoch + 1 >= cfg.train.epochs:
        break
      self.progress.epoch += 1
      self.progress.done, self.progress.last = 0, ''
      self.stream.epoch_begins()
    self._live.show(self._fates(), keep=True)
    self._had_work = self.progress.step != self._begun_at
    self.warn_of_untrained()
    if test:
      if self.progress.best is not None:
        self.state.restore(best=True)
      self._evaluate_split(test, 'test')
    if scored := test or valid:
      with self._clock.of('evaluate'):
        found = slot_importance(
          cfg, self.communicator, self.step, scored, self.progress_made, MOST_SAMPLES
        )
      self._write('importance', split='test' if test else 'valid', **found)
    self._write('end', status='finished')
    return 0

  def open_run(self) -> None:
    """Opens `run_dir`, restores its last checkpoint where there is one, and opens the reports."""
    is_first = self.communicator.rank == 0

    def open_here() -> None:
      if is_first:
        os.makedirs(self.cfg.run_dir, exist_ok=True)
        self.lock.acquire()
        open_run_dir(self.cfg)
        self.inputs.remove_unfinished()

    self.communicator.together(f'cannot use run_dir {self.cfg.run_dir}', open_here)
    self.lock.id = self.communicator.broadcast(self.lock.id)
    resumed = self.state.restore()
    taken = None
    if not resumed and self._init_from:
      taken = self.state.start_from(self._init_from)
    self._begun_at = self.progress.step if resumed else None
    self.state.keep_best()
    self.open_reports(is_first, self.progress.metrics_position)
    if taken:
      self._live.show(f'begins with the model of {taken}', keep=True)
    self._write(
      'start',
      processes=self.communicator.size,
      mode=self.cfg.sync.mode,
      epoch=self.progress.epoch,
      day=self.progress.day,
    )
    self._events.describe(self.cfg)
    for what, fate in self.state.taken:
      self._live.show(f'{what:40} {fate}', keep=True)
    if resumed:
      logging.info(
        'continuing at epoch %d, pass %d, batch %d, step %d',
        self.progress.epoch,
        self.progress.done,
        self.progress.batch,
        self.progress.step,
      )

  def close(self) -> list[str]:
    """Prints the closing table and writes report.html, on process 0.

    Returns:
      What of the run's reports could not be written, a line each.
    """
    if self.communicator.rank == 0:
      with self._events.guarded('report.html'):
        if self._had_work:
          closing.close(self.cfg)
        else:
          print(self._nothing_left())
          closing.write_report(self.cfg)
    return self._events.troubles

  def _nothing_left(self) -> str:
    run_dir, epochs = self.cfg.run_dir, self.progress.epoch + 1
    why = ', where train.plateau ended it' if self.progress.finished else ''
    more = '' if self.progress.finished else 'raise train.epochs or add passes to data.train; to '
    return (
      f'nothing left to train; {run_dir} has trained {epochs} of {self.cfg.train.epochs} epochs'
      f'{why}, and {run_dir}/report.html shows them; settings that are new have trained nothing. '
      f'To train more, {more}train with other settings, give another --run_dir; --init_from '
      f'{run_dir} begins with what this one has learned'
    )

  def check_trained(self) -> None:
    """Checks that each layer was trained. Raises: UserError, naming those that were not."""
    if self.state.untrained:
      raise UserError(
        f'run_dir {self.cfg.run_dir}: its config adds or extends '
        f'{", ".join(f"layer {name}" for name in self.state.untrained)}, and no step has trained '
        'that yet; wanted more training (raise train.epochs or add passes to data.train), or a '
        'start with the config without it'
      )

  def warn_of_untrained(self) -> None:
    """Warns where `check_trained` raises."""
    try:
      self.check_trained()
    except UserError as e:
      if self.communicator.rank == 0:
        logging.warning('%s', e)

  def open_reports(self, active: bool, keep_bytes: int | None) -> None:
    """As trainer.reporting.events.EventLog, and the live line."""
    self._events = EventLog(self.cfg.run_dir, active, keep_bytes)
    self._live = LiveLine(active, runtime.is_terminal())

  def save(self) -> None:
    """Writes a checkpoint; every process calls it."""
    self.communicator.together(f'cannot use run_dir {self.cfg.run_dir}', self.lock.check)
    started = time.monotonic()
    with self._clock.of('save'):
      self.state.save(self._events.position)
    self._write('save', seconds=round(time.monotonic() - started, 3))
    self._save_is_due = False
    progress, keep = self.progress, self.cfg.data.keep_prepared_passes
    is_last_epoch = progress.epoch + 1 >= self.cfg.train.epochs
    if keep is not None and is_last_epoch and self.communicator.rank == 0:
      settled = [e for e in self.state.ledger if e.epoch == progress.epoch and e.fate != 'entered']
      trained = [e.name for e in settled if e.fate in TRAINED]
      kept = trained[len(trained) - keep :] if keep < len(trained) else trained
      self.inputs.remove({e.name for e in settled}.difference(kept), 'train')

  def tell_lost(self, reason: str) -> None:
    """Notes that a rank was lost, and the job ends; any thread may call it."""
    self._events.append({'event': 'lost', 'step': self.step.steps, 'reason': reason})

  def _request_stop(self, number: int, *_: Any) -> None:
    # Servers that hear of Ctrl-C ask their workers to stop as well, by SIGTERM; Ctrl-C counts.
    self.stop_requested = min(number, self.stop_requested or number)

  # Passes

  def _epoch(self) -> bool:
    """Trains on every pass of this epoch that is left, in the order of the stream.

    Returns:
      Whether all were trained on; False where the job was asked to stop.
    """
    data, is_waiting = self.cfg.data, False
    if not data.watch:
      with self._clock.of('convert'):
        self._meet_passes()
    while True:
      action = self.stream.next(self.stop_requested != 0)
      self.progress_made()
      # What a checkpoint holds of the end of a day or an epoch, it holds of the pass before too.
      if self._save_is_due and isinstance(action, (TrainPass, Wait)):
        self.save()
      match action:
        case TrainPass():
          is_waiting = False
          if not self._take(action):
            return False
        case EndDay():
          self._end_day(action)
        case Wait(reason):
          if not is_waiting:
            self._live.show(reason, keep=True)
          is_waiting = True
          time.sleep(SECONDS_BETWEEN_LOOKS)
        case Stopped():
          return False
        case Finished():
          return True

  def _meet_passes(self) -> None:
    """What is done with an epoch's passes before one of them is trained on."""
    if not self.stream.limit:
      try:
        self.inputs.look_at(self.stream.upcoming(), 'train')
      except BadPass as e:
        raise self.stream.too_many(str(e)) from None

  def _convert_ahead(self) -> None:
    """Has passes that come next converted while one is trained on; every process calls it."""
    data = self.cfg.data
    is_bounded = data.watch or data.keep_prepared_passes is not None
    following = self.stream.upcoming(self.communicator.size if is_bounded else None)
    self.inputs.convert_ahead(following, 'train', self._converting())

  def _converting(self) -> int:
    """How many processes convert passes ahead."""
    return self.communicator.size

  def _take(self, action: TrainPass) -> bool:
    """Trains on a pass, or sets it aside where it cannot be read.

    Returns:
      Whether the stream goes on; False where the job was asked to stop.
    """
    cfg, progress, one = self.cfg, self.progress, action.one
    if not self.inputs.is_ready(one, 'train'):
      self._live.show(f'epoch {progress.epoch} · {one.name} · waiting for its conversion')
    try:
      with self._clock.of('convert'):
        (prepared,) = self.inputs.prepared([one], 'train')
        if progress.batch == 0:
          self._check_classes(prepared)
        self._convert_ahead()
    except BadPass as e:
      self.stream.refused(e)
      return True
    if not action.late:
      progress.day = one.day if cfg.data.day_pattern else None
    if self.step.steps == 0:
      # What dense columns are standardised with follows the first pass, for good.
      self.step.dense.set_dense_stats(dense_stats(cfg.data.dense, prepared.meta['dense']))
    if cfg.train.progressive_validation and progress.batch == 0:
      values = self._evaluate_split([prepared], 'next', one.name)
      if cfg.export.gate and self.step.steps:
        gate.judge(cfg.export.gate, progress, values, gate.presence(cfg, prepared))
        if progress.withheld:
          self._write('withheld', reason=progress.withheld, **{'pass': one.name})
          self._live.show(f'no export after {one.name}: {progress.withheld}', keep=True)
    progress.unvalidated = True
    if not self._train_pass(prepared, action):
      return False
    self.stream.trained()
    progress.done, progress.last, progress.batch = progress.done + 1, one.name, 0
    self._marker = one.marker
    if cfg.export.delta_every_passes and progress.done % cfg.export.delta_every_passes == 0:
      self._export('delta')
    every = cfg.checkpoint.every_passes
    self._save_is_due |= every is not None and progress.done % every == 0
    return True

  def _check_classes(self, prepared: PreparedPass) -> None:
    """Looks whether a pass has both classes of every label; every process calls it.

    A small pass of a stream may well have no click: that is told, once.

    Raises:
      BadPass: where it has one class, and is no pass of a stream or misread.
    """
    found = one_class(self.cfg, prepared)
    if found is None:
      return
    if found.is_misread or not self.cfg.data.watch:
      raise BadPass(found.text)
    if not self._one_class_told:
      self._one_class_told = True
      self._live.show(f'{found.text} (further such passes are not told)', keep=True)

  def _pass_told(self, name: str, fate: str, reason: str) -> None:
    """Reports a pass that is not simply trained on."""
    self._write('pass', **{'pass': name, 'fate': fate, 'reason': reason})
    self._live.show(f'{fate}: {reason}', keep=True)
    if self.communicator.rank == 0:  # until the next checkpoint, which brings it up to date
      with self._events.guarded('ledger.jsonl'):
        self.state.ledger.write(self.cfg.run_dir)

  def _fates(self) -> str:
    fates = ', '.join(f'{n:,} {fate}' for fate, n in self.state.ledger.counts().items())
    return f'passes: {fates or "none"}'

  # Training

  def _train_pass(self, prepared: PreparedPass, action: TrainPass) -> bool:
    """Trains on one pass from `progress.batch` on.

    Returns:
      Whether it was finished; False where the job was asked to stop.
    """
    name = action.one.name
    if self.progress.batch == 0:
      self.step.dense.metrics.reset()
    started, steps, shown, waited = time.monotonic(), 0, self._metric_sums(), self._clock.waited
    before, shown_at = result(shown)['examples'], started

    def figures(state: State, before: int, since: float) -> dict[str, Any]:
      now = result(state)
      rate = (now['examples'] - before) / max(time.monotonic() - since, 1e-9)
      return now | {'examples_per_second': round(rate, 1)}

    where = {'pass': name, 'epoch': self.progress.epoch, 'day': self.progress.day}

    def on_step() -> None:
      nonlocal steps, shown, shown_at, waited
      steps += 1
      self.progress_made()
      if steps % self.cfg.train.log_every_steps == 0:
        sums, counts = self._metric_sums(), self._counts()
        # Since the line changed.
        window = figures({key: sums[key] - shown[key] for key in sums}, 0, shown_at)
        self._write('window', **window, **counts, **where, learning_rate_factor=self._rate())
        waiting = (self._clock.waited - waited) / max(time.monotonic() - shown_at, 1e-9)
        waited = self._clock.waited
        shown, shown_at, now = sums, time.monotonic(), result(sums)
        seconds = max(time.monotonic() - started, 1e-9)
        batches = prepared.num_batches(self.cfg.train.batch_size)
        share = self.progress.batch / max(1, batches)
        left = (batches - self.progress.batch) * seconds / steps
        rate = (now['examples'] - before) / seconds
        epoch = f'epoch {self.progress.epoch} · ' if self.cfg.train.epochs > 1 else ''
        told = f'{left:,.0f} s left'
        if waiting >= WAITING_TOLD:
          told = f'waits for input {waiting:.0%}'
        self._live.show(
          f'{epoch}{shortened(name, 12)} {share:4.0%} · {told} · {_quality(window)} · {rate:,.0f}/s'
        )

    exchanged = self.step.exchange_seconds
    with self._clock.of('step'):
      finished = self.train_on(prepared, on_step)
      self.step.consolidate()
    if exchanged := self.step.exchange_seconds - exchanged:
      self._clock.move(exchanged, 'exchange', within='step')
    state = self._metric_sums()
    now = figures(state, before, started) | self._counts()
    if finished:
      self._live.show(self._line(name, now), keep=True)
      self.progress.examples += now['examples']
      slots = self._slot_statistics(now['features'])
      present = gate.presence(self.cfg, prepared, most_samples=1 << 19)
      for slot, share in present.items():
        slots.setdefault(slot, {})['blank'] = 1 - share
      fields = now | self.step.traffic() | where | {'learning_rate_factor': self._rate()}
      fields |= {
        'slots': slots,
        'bad': prepared.meta.get('bad', {}).get('records', 0),
        'seconds': self._clock.taken(),
      }
      if self.cfg.data.watch:
        fields |= {'waiting': action.waiting, 'seconds_behind': action.seconds_behind}
      self._write('train', **fields)
    return finished

  def train_on(self, prepared: PreparedPass, on_step: Callable[[], None]) -> bool:
    """Trains on this process's share of a pass from `progress.batch` on.

    Args:
      prepared: the pass.
      on_step: called after each step.
    Returns:
      Whether it was finished; False where a process was asked to stop.
    """
    batches = self.inputs.staged(
      prepared, self.progress.epoch, self.cfg.data.shuffle, self.progress.batch
    )
    batches = self._clock.waiting(batches)
    return train_in_lockstep(
      self.cfg,
      self.step,
      self.communicator,
      self.state,
      batches,
      save=self.save,
      stop_requested=lambda: self.stop_requested != 0,
      on_step=on_step,
    )

  def _rate(self) -> float:
    """What the learning rates of the last step were multiplied by."""
    return round(float(self.step.dense.rate_at(max(0, self.step.steps - 1))), 6)

  def _metric_sums(self) -> State:
    """Sums over the samples trained on since the pass began, over all processes."""
    return self.communicator.sum_arrays(self.step.dense.metrics.state())

  def _slot_statistics(self, features: int) -> dict[str, dict[str, Any]]:
    """What the tables hold of each slot, from as many rows as are quick to read."""
    statistics = SlotStatistics(self.cfg, {t.name: t.width for t in self.step.store.tables})
    own = shards_of(self.communicator.rank, self.communicator.size)
    shards, share = shards_to_read(features, own)
    for chunk in self.step.store.export_state(shards=shards):
      statistics.add(chunk)
    state = statistics.state() | {'share': np.array([share, 1.0])}
    state = self.communicator.sum_arrays(state)
    share, processes = state.pop('share')
    self._events.histograms('norm', self.step.steps, statistics.norm_histograms(state))
    return statistics.result(state, share / processes)

  def _counts(self) -> dict[str, int]:
    return table_counts(self.step.store, self.communicator)

  # Evaluation

  def _evaluate_split(
    self,
    prepared: Sequence[PreparedPass],
    split: str,
    name: str | None = None,
    day: int | None = None,
  ) -> dict[str, Any]:
    """Evaluates passes as the split's, and reports it.

    Args:
      prepared: the passes.
      split: next, valid or test.
      name: of the pass in the event; None: theirs.
      day: in the event; None: the open one.
    """
    day = self.progress.day if day is None else day
    shown = name or (prepared[0].name if len(prepared) == 1 else f'{len(prepared)} passes')
    name = name or ' '.join(p.name for p in prepared)
    started = time.monotonic()
    with self._clock.of('evaluate'):
      values = self.evaluation.evaluate(prepared, in_log=split == 'next')
    rate = values['examples'] / max(time.monotonic() - started, 1e-9)
    fields = values | self._counts() | {'pass': name, 'examples_per_second': round(rate, 1)}
    if self.evaluation.predictions is not None:
      histograms = {'predictions': self.evaluation.predictions}
      self._events.histograms(split, self.step.steps, histograms)
    self._write('eval', split=split, epoch=self.progress.epoch, day=day, **fields)
    self._live.show(f'{split:5} · {shown} · {_quality(values)}', keep=True)
    base_logloss = values.get('base_logloss')
    is_worse = base_logloss is not None and values['logloss'] > base_logloss
    if split != 'next' and is_worse and self.communicator.rank == 0:
      logging.warning(
        '%s: logloss %.4f is worse than the %.4f of predicting the share of clicks for all: %s',
        split,
        values['logloss'],
        base_logloss,
        _likely_cause(self.cfg, values['calibration'], self.step.steps),
      )
    return values

  def _validate(self, valid: Sequence[PreparedPass]) -> None:
    """Evaluates, keeps the best state, and on a plateau lowers the learning rates or stops."""
    progress, plateau = self.progress, self.cfg.train.plateau
    metric = self.cfg.deciding_metric
    values = self._evaluate_split(valid, 'valid')
    if plateau and plateau.task:
      values = values['tasks'][plateau.task]
    value = values[metric]
    if value is None:
      logging.warning('data.valid: weighs nothing, or is of one class: it has no %s', metric)
      return
    value = -value if metric in ('logloss', 'rmse') else value
    if progress.best is None or value > progress.best + (plateau.min_delta if plateau else 0):
      progress.best, progress.stalls, progress.best_step = value, 0, self.step.steps
      self._live.show(f'valid {metric} is the best so far', keep=True)
    elif plateau:
      progress.stalls += 1
      self._live.show(
        f'valid {metric} is not better than the best, {abs(progress.best):.4f}', keep=True
      )
      progress.finished = progress.stalls >= plateau.stop_after
      if progress.stalls % plateau.patience == 0:
        progress.rate *= plateau.factor
        self.step.set_rate(progress.rate)
      if progress.finished:
        self._live.show(
          f'stopping after epoch {progress.epoch}; the best is that of step {progress.best_step:,}',
          keep=True,
        )
      elif progress.stalls % plateau.patience == 0:
        configured = 'scheduled ones' if self.cfg.train.schedule else 'configured ones'
        self._live.show(f'learning rates are now {progress.rate:g} of the {configured}', keep=True)

  # Days and exports

  def _end_day(self, ended: EndDay) -> None:
    """Exports, then decay, eviction and ageing, once a day, on every process."""
    if not ended.is_empty:
      if self.cfg.export.base:
        self._export('base')
      if self.cfg.export.saved_model:
        self._export('saved_model')
    by_slot = end_day(self.step.store, self.communicator, self.cfg.own_slot_ids())
    evicted, counts = sum(by_slot.values()), self._counts()
    is_empty = True if ended.is_empty else None
    slots = {slot: {'evicted': n} for slot, n in by_slot.items()}
    fields = counts | self._disk()
    self._write('day_end', day=ended.day, evicted=evicted, empty=is_empty, slots=slots, **fields)
    self._live.show(
      f'day {ended.day} ended{" without a pass" if is_empty else ""} · {evicted:,} features '
      f'evicted · {counts["features"]:,} left, {counts["admitted"]:,} admitted',
      keep=True,
    )
    self.stream.day_ended(ended)
    if self.cfg.data.watch:
      for split, prepared in self._evaluated.items():
        if prepared and not ended.is_empty:
          self._evaluate_split(prepared, split, day=ended.day)
      if self.communicator.rank == 0:
        with self._events.guarded('report.html'):
          closing.write_report(self.cfg)
      self._save_is_due |= self.cfg.checkpoint.every_passes is not None

  def _export(self, kind: str) -> None:
    progress = self.progress
    if progress.withheld or self.state.untrained:  # the next export has all changes since
      return
    self.step.consolidate()
    with self._clock.of('export'):
      written = export.write(
        self.cfg,
        kind,
        {
          'epoch': progress.epoch,
          'passes': progress.done,
          'last': progress.last,
          'day': progress.day,
        },
        store=self.step.store,
        model=self.step.dense.model,
        dense_stats=self.step.dense.embedding.stats,
        communicator=self.communicator,
        replay=self._replay,
      )
    fields = {'pass': progress.last} | self._latency()
    self._write(
      'export',
      kind=kind,
      path=written.path,
      rows=written.rows,
      slots={slot: {'rows': n} for slot, n in written.slots.items()} or None,
      tombstones=written.tombstones,
      seconds=round(written.seconds, 3),
      day=progress.day,
      **fields,
    )

  def _disk(self) -> dict[str, int]:
    """Of a run that never ends: what it takes of its disk, and what is left there."""
    if not self.cfg.data.watch or self.communicator.rank:
      return {}
    free = shutil.disk_usage(self.cfg.run_dir).free
    return {'disk_bytes': files.size_of(self.cfg.run_dir), 'disk_free': free}

  def _latency(self) -> dict[str, float]:
    """In watch mode, how long ago the pass that was trained last was announced."""
    announced = None if self._marker is None else modified(self._marker)
    if announced is None:
      return {}
    return {'seconds_since_announced': round(time.time() - announced, 3)}

  # Reports

  def _write(self, event: str, **fields: Any) -> None:
    self._events.write(event, self.step.steps, **fields)

  def _line(self, name: str, now: dict[str, Any]) -> str:
    return (
      f'epoch {self.progress.epoch} · {name} · {_quality(now)} · '
      f'{now["examples_per_second"]:,.0f} samples/s'
    )


def _quality(values: dict[str, Any]) -> str:
  if 'tasks' in values:
    return ' · '.join(f'{name} {_quality(of_task)}' for name, of_task in values['tasks'].items())
  shown = ('rmse',) if 'rmse' in values else ('logloss', 'auc')
  return ' · '.join(
    f'{"AUC" if name == "auc" else name} '
    + ('-' if values[name] is None else f'{values[name]:.4f}')
    for name in shown
  )


def _likely_cause(cfg: config.Config, calibration: float | None, steps: int) -> str:
  """Why a model predicts worse than a constant."""
  for name, table in cfg.sparse.tables.items():
    for part, rule in (('factors', table.factors), ('linear', table.linear)):
      wanted = config.row_defaults(rule.kind)['learning_rate']
      if rule.kind in ('adam', 'rmsprop') and rule.learning_rate > wanted:
        return (
          f'sparse.tables.{name}.{part} takes steps of {rule.kind} at learning_rate '
          f'{rule.learning_rate:g}; this rule wants about {wanted:g}'
        )
  if steps < FEW_STEPS:
    return f'it was trained for {steps} steps only; more epochs or a smaller train.batch_size help'
  if reason := cfg.uncalibrated():
    return reason
  if calibration is not None and not 0.8 < calibration < 1.25:
    return (
      f'the predictions add up to {calibration:.2f} times the clicks; are both logs sampled '
      'alike (model.negative_sampling_rate), and labelled alike?'
    )
  return 'the model overfits or diverges; lower the learning rates, train fewer epochs, or set l2'


@contextlib.contextmanager
def finished_job(
  run_dir: str,
  overrides: Sequence[str] = (),
  checkpoint: str = 'best',
  here: runtime.Runtime = runtime.Runtime(),
  only_trained: bool = False,
) -> Iterator[Job]:
  """Takes up a run, to evaluate, predict or export.

  It changes nothing in the run_dir, where a trainer may be at work: what it converts goes to a
  temporary directory, which is removed in the end. That one lies in the run_dir only where ranks
  run on several hosts, which share nothing else.

  Args:
    run_dir: of trainer.run.
    overrides: as for trainer.run.
    checkpoint: best (the best by validation, or the last where there was none) or last.
    here: where this process stands among the ranks that share the work; by default it is alone.
    only_trained: whether to refuse layers that no step has trained, rather than to warn of them.
  Raises:
    UserError: where there is no checkpoint; as of `check_trained`.
  """
  path = os.path.join(run_dir, 'config.yaml')
  if not os.path.exists(path):
    raise UserError(
      f'--run_dir {run_dir}: no config.yaml there; wanted the run_dir of a training run'
    )
  cfg = config.load_of_run(run_dir, overrides)
  with contextlib.ExitStack() as stack:
    progress_made = lambda: None
    if here.size > 1:
      progress_made = stack.enter_context(Heartbeat(here, cfg)).progress
    runtime.start(cfg, here)
    communicator = horovod.communicator(here, cfg.sync)
    folder = tempfile.TemporaryDirectory(
      prefix='ctr-trainer-', dir=here.host and run_dir, ignore_cleanup_errors=True
    )
    prepared_folder = communicator.broadcast(stack.enter_context(folder))
    step = TrainStep(cfg, communicator)
    job = Job(cfg, communicator, step, progress_made, prepared_folder=prepared_folder)
    if not _restore(job.state, checkpoint == 'best'):
      raise UserError(
        f'--run_dir {run_dir}: no finished checkpoint there; wanted a run that was trained'
      )
    if only_trained:
      job.check_trained()
    job.warn_of_untrained()
    with contextlib.suppress(OSError):  # metrics.jsonl may be gone
      events = read_events(run_dir)
      evaluated = events[events['event'] == 'eval']
      if 'slots' in evaluated:
        job.evaluation.slots_before.extend(s for s in evaluated['slots'] if isinstance(s, dict))
    yield job
    communicator.barrier()  # process 0's folder is everybody's


_RESTORE_ATTEMPTS = 3  # a trainer at work may delete a checkpoint while it is read


def _restore(state: RunState, best: bool) -> bool:
  """Reads the best state, where one is kept, or the last. Returns: whether there was one."""
  for attempt in range(_RESTORE_ATTEMPTS):
    try:
      return (best and state.restore(best=True)) or state.restore()
    except UserError:
      if attempt + 1 == _RESTORE_ATTEMPTS:
        raise
  return False
