"""A job: trains pass by pass and day by day, evaluates, saves and exports."""

import os
import signal
import time
from collections.abc import Callable, Sequence

from absl import logging

from trainer import config
from trainer.comm.communicator import Communicator
from trainer.command_line import wrapped
from trainer.data.labels import nothing_to_learn
from trainer.data.passes import Pass
from trainer.data.prepared import PreparedPass
from trainer.errors import BadPass, Stopped, UserError
from trainer.evaluation.task import task_of
from trainer.evaluation.validation import Validation
from trainer.job.callback import Callback
from trainer.job.day_end import end_day
from trainer.job.exporter import Exporter
from trainer.job.initial_values import set_initial_values
from trainer.job.job_status import JobStatus
from trainer.job.pass_meter import PassMeter
from trainer.job.stop_request import StopRequest
from trainer.job.stream import End, EndDay, Stream, TrainPass, Wait
from trainer.reporting.status import Status
from trainer.reporting.tensorboard import TensorBoard
from trainer.storage.bucket import Bucket
from trainer.storage.run_lock import RunLock
from trainer.training.advice import nothing_left, placed
from trainer.training.inputs import Inputs
from trainer.training.loop import train_in_lockstep
from trainer.training.run_log import RunLog
from trainer.training.run_state import Progress, RunState
from trainer.training.save_policy import SavePolicy
from trainer.training.step import Step
from trainer.wings import wing

SECONDS_BETWEEN_LOOKS = 0.5  # between looks at the watched directory


class Job:
  """Trains a model on its passes and days. Every process of the job runs one.

  Args:
    step: the training step of ranks, or of workers on parameter servers.
    figures: told of each step, each chunk of slow work and what the job does, if anybody asks.
    init_from: the run_dir of another run, whose model a new run takes over.
    bucket: where the run_dir is copied to.
  """

  def __init__(
    self,
    cfg: config.Config,
    communicator: Communicator,
    step: Step,
    figures: Status | None = None,
    init_from: str | None = None,
    callbacks: Sequence[Callback] = (),
    bucket: Bucket | None = None,
  ):
    self._init_from, self._callbacks, self._bucket = init_from, callbacks, bucket
    self.cfg, self.communicator, self.step = cfg, communicator, step
    figures = figures or Status('trainer', cfg.sync.stalled_peer_seconds)
    self.progress_made = figures.progress
    most_bytes = cfg.report.keep_mb and cfg.report.keep_mb * 10**6
    self._figures, self.log = figures, RunLog(cfg.run_dir, step, figures, most_bytes)
    # How far the run has come, and its checkpoints; `saves` says when one is written.
    self.state = RunState(cfg, communicator, step)
    folder = os.path.join(cfg.run_dir, 'prepared')
    self.inputs = Inputs(cfg, communicator, step, figures.progress, folder, self.log.show)
    task = task_of(cfg)
    judge = task.evaluator(self.inputs)
    self.validation = Validation(cfg, judge, self.inputs, self.state, self.log)
    self.stream = Stream(cfg, communicator, self.state, self._tell_fate)
    self._shown = JobStatus(cfg.run_dir, bool(cfg.data.stream), self.stream, self.log, figures)
    self.exporter = Exporter(cfg, task, self.inputs, self.state, self.log)
    shown = bucket.run_dir if bucket else cfg.run_dir
    self.log.listeners = [
      *([TensorBoard(cfg.run_dir, cfg.settings())] if 'tensorboard' in cfg.report.to else ()),
      *wing('listeners')(cfg, self.inputs, self.state, self.log, shown),
    ]
    # Taken in `open_run`; prevents other jobs from using the run_dir.
    self.lock = RunLock(cfg.run_dir)
    self.stop_request = StopRequest()
    goes_back = bool(self.stream.limit)
    self.saves = SavePolicy(cfg.checkpoint, self.state, bool(cfg.data.stream), goes_back)
    self._nothing_told = False
    self._continued_at: int | None = None  # the step of the checkpoint that the job continues from
    self._nothing_left: str | None = None  # a text for the user, if the run was finished before

  @property
  def progress(self) -> Progress:
    return self.state.progress

  @property
  def _is_reporter(self) -> bool:  # the first of the present processes
    return self.communicator.rank == 0

  def run(self) -> int:
    """Trains as the config says, continuing from the last checkpoint if there is one.

    Returns:
      0 if all is trained. If a signal stopped the job, the state is saved, and the result is the
      number of the signal; for SIGTERM it is 0 if the job follows a stream (data.watch). The result
      is the same on every process.
    """
    try:
      self.open_run()
      self.stop_request.listen()
      for callback in self._callbacks:
        callback.on_train_begin()
      self.validation.open()
      self._export(self.exporter.export_due)
      while self._train_epoch():
        try:
          self._end_epoch()
        except BadPass as e:
          self._go_back(e, in_pass=False)
          continue
        if self.progress.finished or self.progress.epoch + 1 >= self.cfg.train.epochs:
          self._finish()
          return 0
        self.progress.epoch += 1
        self.progress.done, self.progress.last = 0, ''
        if self.cfg.counted_fields():
          # Otherwise the counts that a sample reads would include its own label.
          self.step.store.forget_counts()
        self.stream.epoch_begins()
      return self._stop()
    except Stopped:
      return self._stop()
    finally:
      self._figures.end()
      self.inputs.stop()
      self.lock.release()

  def open_run(self) -> None:
    """Opens `run_dir` and the reports, and restores the last checkpoint if there is one."""

    def open_here() -> str:
      os.makedirs(self.cfg.run_dir, exist_ok=True)
      self.lock.acquire()
      self.state.check_run_dir()
      if self._bucket:
        self._bucket.take()
      self.inputs.remove_unfinished()
      return self.lock.id

    what = f'cannot use run_dir {self.cfg.run_dir}'
    self.lock.id = self.communicator.on_first(what, open_here)
    is_continued, begins_with = self.state.restore(), None
    if is_continued:
      self._continued_at = self.progress.step
    elif self._init_from:
      begins_with = self.state.start_from(self._init_from)
    # Only now, so that a checkpoint that does not suit the config leaves the run_dir as it was.
    self.communicator.on_first(what, lambda: config.write_of_run(self.cfg))
    self.state.keep_best()
    self.log.open(self._is_reporter, self.progress.metrics_position)
    if begins_with:
      self.log.show(f'begins with the model of {begins_with}', keep=True)
    place = {'epoch': self.progress.epoch, 'day': self.progress.day}
    self.log.write('start', processes=self.communicator.size, mode=self.cfg.sync.mode, **place)
    self._shown.begin(self.state.ledger.counts())
    for name, fate in self.state.fates:
      self.log.show(f'{name:40} {fate}', keep=True)
    if is_continued:
      p, passes = self.progress, f'{self.progress.done} passes'
      trained = f'{passes} and {p.batch} batches of the next' if p.batch else passes
      self.log.show(f'continuing after step {p.step}: epoch {p.epoch} has trained {trained}', True)

  def close(self) -> list[str]:
    """Ends the reports of process 0; returns a line for each that could not be written."""
    if self._is_reporter:
      if self._nothing_left:
        print(wrapped(self._nothing_left))
      for listener in self.log.listeners:
        with self.log.events.guarded(listener.what):
          listener.close(self._nothing_left is None)
      if self._bucket:
        self._bucket.upload()
    return self.log.events.troubles

  def save(self) -> None:
    """Writes a checkpoint; every process calls it."""
    self.communicator.together(f'cannot use run_dir {self.cfg.run_dir}', self.lock.check)
    started = time.monotonic()
    with self.log.clock.of('save'):
      self.state.save(self.log.events.position)
    self.log.write('save', seconds=round(time.monotonic() - started, 3))
    self.saves.saved()
    self.inputs.remove_settled(self.state.ledger, self.progress.epoch)
    self._upload()

  def _export(self, export: Callable[[], None]) -> None:
    """Exports. If that fails, saves the state first, from which a new start exports again."""
    try:
      export()
    except UserError:
      if self.saves.would_lose():
        self.save()
      raise

  def _upload(self) -> None:
    if self._bucket:
      self.communicator.on_first('', self._bucket.upload)

  def tell_lost(self, reason: str) -> None:
    """Writes the event `lost`: another process is lost, so the job ends. Thread-safe."""
    self.log.events.append({'event': 'lost', 'step': self.step.steps, 'reason': reason})

  # Passes

  def _train_epoch(self) -> bool:
    """Trains on the remaining passes of this epoch. Returns False if the job was asked to stop."""
    is_waiting = False
    if not self.cfg.data.stream and not self.stream.limit:
      with self.log.clock.of('convert'):
        try:  # an obvious mistake ends the job before it trains
          self.inputs.look_at(self.stream.upcoming(), 'train')
        except BadPass as e:
          raise self.stream.refusal_error(str(e)) from None
    while True:
      action = self.stream.next(bool(self.stop_request))
      self._shown.next(action)
      if isinstance(action, (TrainPass, Wait)) and self.saves.goes_on():
        try:
          self.save()
        except BadPass as e:
          self._go_back(e, in_pass=False)
          continue
      match action:
        case TrainPass():
          is_waiting = False
          if not self._train_on_pass(action):
            return False
        case EndDay(data_pass=following):
          if following is None or self._prepare(following) is not None:
            self._end_day(action)
        case Wait(reason):
          if not is_waiting:
            self.log.show(reason, keep=True)
          is_waiting = True
          time.sleep(SECONDS_BETWEEN_LOOKS)
        case End(is_finished):
          return is_finished

  def _convert_ahead(self) -> None:
    data = self.cfg.data
    is_bounded = data.stream or data.keep_prepared_passes is not None
    following = self.stream.upcoming(self.communicator.size if is_bounded else None)
    self.inputs.convert_ahead(following, 'train', self._converting_processes())

  def _converting_processes(self) -> int:
    return self.communicator.size

  def _train_on_pass(self, action: TrainPass) -> bool:
    """Trains on a pass, or refuses it. Returns False if the job was asked to stop within it."""
    if (prepared := self._prepare(action.data_pass)) is None:
      return True
    if self.saves.pass_begins():
      self.save()
    try:
      items = self.inputs.items()
      self._begin_pass(action, prepared, items)
      meter = PassMeter(
        self.cfg, self.inputs, self.progress, self.log, prepared, action.data_pass.name, items
      )
      with self.log.clock.of('step'):
        is_finished = self.train_on(prepared, meter.on_step)
        self.step.consolidate()
      if is_finished:
        self._end_pass(action, prepared, meter)
      return is_finished
    except BadPass as e:
      self._go_back(placed(e, prepared), in_pass=True)
      return True

  def _begin_pass(
    self, action: TrainPass, prepared: PreparedPass, items: PreparedPass | None
  ) -> None:
    cfg, progress, is_new = self.cfg, self.progress, self.progress.batch == 0
    if not action.late:
      progress.day = action.data_pass.day if cfg.data.has_days else None
    set_initial_values(cfg, self.step, progress, prepared, items)
    if cfg.train.progressive_validation and is_new:
      self.validation.judge(prepared, action.data_pass.name)
    progress.unvalidated = True
    if is_new:
      self.validation.pass_begins(prepared)
    self.step.dense.begin_pass(prepared, self.step.store, is_new)

  def _end_pass(self, action: TrainPass, prepared: PreparedPass, meter: PassMeter) -> None:
    cfg, progress, name = self.cfg, self.progress, action.data_pass.name
    lag = {'waiting': action.waiting, 'seconds_behind': action.seconds_behind}
    figures = meter.finish(lag | action.of_topic if cfg.data.stream else {})
    self.state.texts.learn(prepared)
    for listener in self.log.listeners:
      listener.trained(prepared, name)
    self.stream.trained(prepared.meta)
    progress.done, progress.last, progress.batch = progress.done + 1, name, 0
    self._export(lambda: self.exporter.export_pass(action.data_pass.marker))
    self._upload()
    for callback in self._callbacks:
      callback.on_pass_end(name, figures)
    self.saves.pass_ended()

  def _go_back(self, error: BadPass, in_pass: bool) -> None:
    """Restores the state before the pass that ruined it, and refuses this pass or raises `error`.

    If several passes were trained on since the last checkpoint, none is refused yet. They are
    trained on again, with a checkpoint after each, until one cannot be saved. `in_pass` says that
    training failed within a pass; if not, the state could not be saved.
    """
    unsaved = self.state.ledger
    if not self.stream.limit or not self.state.go_back():
      raise error
    self.log.events.cut(self.progress.metrics_position)
    self.log.show(f'goes back to the state of step {self.step.steps:,}', keep=True)
    self.saves.went_back(self.stream.went_back(unsaved, error, in_pass))

  def _prepare(self, data_pass: Pass) -> PreparedPass | None:
    """Converts and opens a pass. Returns None if the pass cannot be read and was refused."""
    if not self.inputs.is_ready(data_pass, 'train'):
      self.log.show(f'epoch {self.progress.epoch} · {data_pass.name} · waiting for its conversion')
    try:
      with self.log.clock.of('convert'):
        (prepared,) = self.inputs.prepared([data_pass], 'train')
        if self.progress.batch == 0:
          self._check_pass(prepared)
        self._convert_ahead()
    except BadPass as e:
      self.stream.refused(e)
      return None
    return prepared

  def _check_pass(self, prepared: PreparedPass) -> None:
    """Raises BadPass for a pass in which all labels are the same, or all weights 0.

    In a stream (data.watch), such a pass may be right, for example one without clicks. So a stream
    accepts it, and reports the first one. But it refuses a pass whose log has the text of the
    positive label in other capitals than the config.
    """
    alike = nothing_to_learn(self.cfg, prepared)
    if alike is None:
      return
    if alike.is_refused:
      raise BadPass(alike.text)
    if not self._nothing_told:
      self._nothing_told = True
      self.log.show(f'{alike.text} (reported once)', keep=True)

  def train_on(self, prepared: PreparedPass, on_step: Callable[[], None]) -> bool:
    """Trains on this process's share of a pass, from batch `progress.batch` on.

    Returns True if the pass is finished, False if a process was asked to stop.
    """
    progress, ready = self.progress, self.step.dense.for_step
    batches = self.inputs.staged(
      prepared, progress.epoch, self.cfg.data.shuffle, progress.batch, ready
    )
    return train_in_lockstep(
      self.inputs,
      self.state,
      self.log.clock.waiting(batches),
      saves=self.saves,
      save=self.save,
      stop_requested=lambda: bool(self.stop_request),
      on_step=on_step,
    )

  def _tell_fate(self, name: str, fate: str, reason: str) -> None:
    """Reports a pass that is late, skipped, seen before or refused, as a line and an event."""
    lag = self.stream.lag() if self.cfg.data.stream and self._is_reporter else {}
    self.log.write('pass', **{'pass': name, 'fate': fate, 'reason': reason}, **lag)
    self.log.show(f'{fate}: {reason}', keep=True)
    if self._is_reporter:  # if this fails, the next checkpoint writes it
      with self.log.events.guarded('ledger.jsonl'):
        self.state.ledger.write(self.cfg.run_dir)

  # Ends

  def _end_day(self, ended: EndDay) -> None:
    """Exports, then decays, evicts and ages features. Every process calls it once a day.

    In a stream (data.watch), it also evaluates data.valid and data.test.
    """
    if not ended.is_empty:
      self._export(self.exporter.export_day)
      self._upload()
    end_day(self.cfg, self.inputs, self.log, ended.day, ended.is_empty)
    self.stream.day_ended(ended)
    self.saves.day_ended()
    if self.cfg.data.stream:
      if not ended.is_empty:
        self.validation.evaluate_day(ended.day)
    for listener in self.log.listeners:
      listener.day_ended(ended.day, ended.is_empty)

  def _end_epoch(self) -> None:
    values = self.validation.evaluate_epoch()
    if self.saves.would_lose():
      self.save()
    for callback in self._callbacks:
      callback.on_epoch_end(self.progress.epoch, values)

  def _finish(self) -> None:
    """Ends a run that has trained all epochs: evaluates and exports its best, or last, state."""
    fates = ', '.join(f'{n:,} {fate}' for fate, n in self.state.ledger.counts().items())
    progress = self.progress
    epochs = f' in {progress.epoch + 1} epochs' if progress.epoch else ''
    self.log.show(f'passes: {fates or "none"}{epochs}', keep=True)
    if progress.step == self._continued_at:
      run_dir, epochs = self.cfg.run_dir, self.cfg.train.epochs
      self._nothing_left = nothing_left(run_dir, progress.epoch + 1, epochs, progress.finished)
    if (untrained := self.state.untrained_told()) and self._is_reporter:
      logging.warning('%s', untrained)
    took_best = self.state.take_best()
    values = self.validation.finish(took_best)
    if took_best:
      self.exporter.export_kept(progress.step)
    self.log.write('end', status='finished')
    for callback in self._callbacks:
      callback.on_train_end(values)

  def _stop(self) -> int:
    self.save()
    told = 'the state is saved: the same command continues'
    self.log.show(f'stopped at step {self.progress.step}; {told}', keep=True)
    self.log.write('end', status='stopped')
    stopped_by = min(filter(None, self.communicator.gather(self.stop_request.signal)))
    # SIGTERM is how a supervisor ends a process that follows a stream.
    return 0 if self.cfg.data.stream and stopped_by == signal.SIGTERM else stopped_by
