"""The state of a run: its place in the data, and how it is saved and restored."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping

from absl import logging

from trainer import config, files
from trainer.comm.communicator import Communicator
from trainer.errors import DataLoss, OtherModel, UserError
from trainer.plain_data import Json, JsonObject
from trainer.storage import checkpoint
from trainer.storage.checkpoint import Checkpoints
from trainer.storage.kept_texts import KeptTexts
from trainer.storage.merger import Merger, Scrub
from trainer.training.continuing import Change, differences, parts
from trainer.training.ledger import WHOLE_ENTRIES, Ledger
from trainer.training.step import Step
from trainer.training.warm_start import Fate, WarmStart

# Checkpoints without an export between them that a state remembers. After more, a delta that would
# follow an export of an older one has all rows.
MOST_ANCESTORS = 1000


@dataclasses.dataclass
class Progress:
  """How far a run has come; part of every checkpoint."""

  epoch: int = 0
  done: int = 0  # passes of this epoch that are finished
  last: str = ''  # the name of the last finished pass
  batch: int = 0  # batches of the next pass that were trained on
  step: int = 0
  examples: int = 0
  day: int | None = None  # the day that is open
  rate: float = 1.0  # the factor by which plateaus have lowered learning rates
  best: float | None = None  # the best validation metric, negated if lower is better
  # The metric and the passes of data.valid by which `best` was measured.
  judged_by: JsonObject = dataclasses.field(default_factory=dict)
  best_passes: int = 0  # passes of its epoch that the best state had been trained on
  stalls: int = 0  # evaluations since the best one
  finished: bool = False  # train.plateau has ended the run
  unvalidated: bool = False  # passes were trained on since data.valid was evaluated
  best_step: int | None = None  # the step of the best state
  closed_day: int | None = None  # the last day that has ended
  closed_when: str = ''  # what ended it, as in 'data.train ended'
  empty_days: int = 0  # days that ended without a pass
  refused_in_a_row: int = 0  # passes refused since one was trained on
  # When the last pass was trained on, in seconds since 1970; for data.close_day_after_hours.
  last_time: float | None = None
  withheld: str | None = None  # why nothing is exported (Listener.predicted)
  gate_reference: JsonObject | None = None  # what export.gate compares the next pass with
  bins: JsonObject = dataclasses.field(default_factory=dict)  # samples by bin (trainer.tools.drift)
  first_step: int = 0  # steps of the run of --init_from, which train.schedule does not count
  # The model in which the weights were trained, as trainer.training.continuing.parts describes it.
  trained: dict[str, JsonObject | None] = dataclasses.field(default_factory=dict)
  metrics_position: int = 0  # bytes of metrics.jsonl that belong to this state
  # What led to this state: the last base or delta and the checkpoints since, as their checksums
  # (trainer.storage.export_writer). A delta may follow an export of these alone.
  ancestors: list[int] = dataclasses.field(default_factory=list)
  # Tasks whose bias has not been set yet, as no pass had labels of both classes.
  unset_biases: list[str] = dataclasses.field(default_factory=list)
  # By topic: `offsets`, the next one of each partition; `time`, the beginning of the last pass's
  # window in ms since 1970; and what shows that it is the same topic (trainer.topics.topic_passes).
  topics: dict[str, JsonObject] = dataclasses.field(default_factory=dict)
  delta_due: bool = False  # a delta was due after the last pass, and is not written

  def forget_best(self) -> None:
    """Forgets the best state, so that the next evaluation of data.valid becomes the best so far."""
    self.best, self.best_step, self.stalls = None, None, 0


class RunState:
  """The state of a run: its progress, and what its checkpoints hold.

  Attributes:
    progress: how far the run has come.
    run_dir: where the run is.
    ledger: what became of every pass.
    texts: the texts of features, for the slots in data.keep_texts.
    fates: what became of slots and layers if the restored checkpoint had other settings.
    last_save: when the last checkpoint was written, as time.monotonic().
  """

  def __init__(self, cfg: config.Config, communicator: Communicator, step: Step):
    self._cfg, self._communicator, self._step = cfg, communicator, step
    self.run_dir = cfg.run_dir
    kinds = cfg.kinds_of_labels.items()
    self.progress = Progress(unset_biases=[name for name, kind in kinds if kind != 'losses'])
    self.ledger = Ledger()
    ids = {name: cfg.slot_ids()[name] for name in cfg.data.keep_texts}
    self.texts = KeptTexts(ids, communicator, step.store)
    self.fates: list[Fate] = []
    self.last_save = time.monotonic()
    self._saved = dataclasses.replace(self.progress)
    folder, best = (os.path.join(cfg.run_dir, name) for name in ('checkpoints', 'best'))
    merger = Merger(folder, Scrub()) if communicator.rank == 0 else None
    keep, most_layers = cfg.checkpoint.keep, 1 + cfg.checkpoint.max_increments
    self._checkpoints = Checkpoints(folder, communicator, keep, most_layers, merger)
    self._best = Checkpoints(best, communicator, merger=merger)
    self._parts = parts(cfg)
    self._config_text = config.dump(cfg)
    self._read = self._config_text, cfg

  @property
  def is_saved(self) -> bool:
    """Whether the last checkpoint holds the present place in the data."""
    position = self._saved.metrics_position
    return self._saved == dataclasses.replace(self.progress, metrics_position=position)

  @property
  def untrained(self) -> list[str]:
    """Returns a text for each difference between the config's model and the one last trained.

    There is none once this process has trained a step.
    """
    is_trained = self._step.steps != self.progress.step
    return [] if is_trained else differences(self.progress.trained, self._parts)

  def untrained_told(self) -> str | None:
    """Returns a warning if the model of the config is not the one that was trained, or None."""
    if not self.untrained:
      return None
    return (
      f'run_dir {self.run_dir}: no step has trained the model of its config: '
      f'{"; ".join(self.untrained)}; wanted more training (raise train.epochs or add passes to '
      'data.train), or a start with the settings that were trained'
    )

  def handed_over(self) -> JsonObject:
    """Returns what `take_over` sets on a worker that joins within a pass."""
    progress, saved = dataclasses.asdict(self.progress), dataclasses.asdict(self._saved)
    progress['batch'] = max(1, progress['batch'])
    ledger = self.ledger.state()
    latest = self._checkpoints.latest
    return {'progress': progress, 'saved': saved, 'ledger': ledger, 'latest': latest}

  def take_over(self, state: Mapping[str, Json]) -> None:
    """Sets the place in the data, and the last checkpoint, to those of the other workers."""
    self.progress, self._saved = Progress(**state['progress']), Progress(**state['saved'])
    self.ledger, self._checkpoints.latest = Ledger(state['ledger']), state['latest']

  def note_model(self) -> None:
    """Records in `progress.trained` which model the weights belong to.

    If that is another model than before, it forgets the best value so far.
    """
    progress, now = self.progress, self._parts
    if self._step.steps == progress.step:
      # A checkpoint does not keep the trained form of parts that this config leaves out or changes.
      # So they do not count as trained if a later config has them again.
      progress.trained = {k: v if v == now.get(k) else None for k, v in progress.trained.items()}
    elif progress.trained != now:
      progress.trained = now
      progress.forget_best()

  def save(self, metrics_position: int) -> None:
    """Writes a checkpoint. Every process calls it.

    If the state is the best so far, the checkpoint is also linked into run_dir/best. On process 0,
    `metrics_position` is the number of bytes of metrics.jsonl that belong to the state.
    """
    self.note_model()
    self.progress.step = self._step.steps
    self.progress.metrics_position = self._communicator.broadcast(metrics_position)
    # Between passes there are no metric sums to save.
    metrics = self._step.dense.metrics.state() if self.progress.batch else {}
    metrics = self._communicator.sum_arrays(metrics)
    started = time.monotonic()
    self.ledger.fold(max(WHOLE_ENTRIES, self._cfg.data.keep_prepared_passes or 0))
    path = self._checkpoints.save(
      self.progress.step,
      store=self._step.store,
      dense=self._step.dense_state() | {f'metrics/{k}': v for k, v in metrics.items()},
      progress=dataclasses.asdict(self.progress) | {'ledger': self.ledger.state()},
      config_text=self._config_text,
      texts=self.texts,
    )
    self.last_save = time.monotonic()
    if self._communicator.rank == 0:
      logging.debug('checkpoint %s in %.1f s', path, self.last_save - started)
    self._came_through_checkpoint()
    run_dir = self.run_dir
    self._communicator.on_first(f'cannot write in {run_dir}', lambda: self.ledger.write(run_dir))
    self.keep_best()

  def keep_best(self) -> None:
    """Keeps the checkpoint that was written or read last in run_dir/best too, if it is the best.

    If there is no best state, it removes run_dir/best; predictions then use the last state. It
    forgets the best state if run_dir/best does not hold it, because the run went back to an earlier
    checkpoint, or holds it damaged, and no checkpoint does. Then the scrub begins a round.
    """
    best_step, scrub = self.progress.best_step, self._checkpoints.scrub
    folder, best = self._checkpoints.directory, self._best.directory
    latest = self._checkpoints.latest

    def keep_here() -> bool:
      checkpoints = checkpoint.candidates(folder)
      source = latest if best_step is not None and best_step == self.progress.step else None
      for path, serial in checkpoint.candidates(best).items():
        if serial is None or path in scrub.damaged:
          same = os.path.join(folder, os.path.basename(path))
          source = source or (same if checkpoints.get(same) and same not in scrub.damaged else None)
          files.remove(path)
          scrub.damaged.discard(path)
      if source:
        checkpoint.link(source, best, copied=self._cfg.checkpoint.keep > 1)
      kept = checkpoint.candidates(best)
      is_kept = any(files.read_manifest(path)['step'] == best_step for path in kept)
      if not is_kept and latest:
        files.remove(best)
      scrub.begin([*checkpoints, *kept])
      if not is_kept and best_step is not None:
        logging.warning('the best state, of step %d, is gone: the best is chosen anew', best_step)
      return is_kept

    what = f'cannot keep the best checkpoint in {best}'
    if not self._communicator.on_first(what, keep_here):
      self.progress.forget_best()

  def check_run_dir(self) -> None:
    """Refuses a run_dir that holds another model; prints each key whose value has changed."""
    # That of a checkpoint, because a run may have died just after writing config.yaml.
    if old := self._config_in(self._checkpoints.directory):
      change = Change(old, self._cfg)
      change.check(self.run_dir)
      change.tell()

  def _config_in(self, directory: str) -> config.Config | None:
    """Returns the newest intact config of the checkpoints in a directory; None if there is none."""
    for path in checkpoint.candidates(directory):
      with contextlib.suppress(DataLoss):  # restoring it will report the damage
        listed = checkpoint.check(path)['files']
        return self._config_of(files.read_checked(path, 'config.yaml', listed).decode(), path)
    return None

  def _config_of(self, text: str, path: str) -> config.Config:
    """Returns a stored config: most often the present one, or the one that was read last."""
    if text != self._read[0]:
      self._read = text, config.parse(text, path)
    return self._read[1]

  def restore(self, best: bool = False) -> bool:
    """Restores the newest intact checkpoint or, if `best`, the best state. Returns whether it did.

    Any number of processes may have written it.
    """
    return self._restore(self._best if best else self._checkpoints)

  @property
  def has_checkpoint(self) -> bool:
    return bool(self._checkpoints.latest)

  @property
  def is_saved_within_pass(self) -> bool:
    """Whether the last checkpoint was saved when a pass was trained on in part."""
    return self._saved.batch > 0

  def go_back(self) -> bool:
    """Restores the newest checkpoint that was saved between two passes. Returns whether it did."""
    return self._restore(self._checkpoints, between_passes=True)

  def take_best(self) -> bool:
    """Restores the best state, if it is not the last one. Returns whether it did.

    If run_dir/best is gone or damaged, it restores the last state and returns False.
    """
    is_last = self.progress.best_step in (None, self._step.steps)
    if self._communicator.broadcast(is_last):
      return False
    for _ in range(2):
      with contextlib.suppress(DataLoss):  # it was told
        if self.restore(best=True):
          return True
      self.restore()
      self.keep_best()  # brings back what is among the checkpoints, or forgets it
    return False

  def back_to_best(self) -> None:
    """Restores the weights of the best state; the place in the data stays the present one.

    Raises UserError if run_dir/best is gone, or damaged; it is then removed.
    """
    kept, ledger, steps, is_there = self.progress, self.ledger, self._step.steps, False
    with contextlib.suppress(DataLoss):  # it was told
      is_there = self.restore(best=True)
    if not is_there:
      self._communicator.on_first('', lambda: files.remove(self._best.directory))
      raise UserError(f'{self._best.directory} is gone; the same command goes on without it')
    kept.ancestors = self.progress.ancestors
    self.progress, self.ledger = kept, ledger
    self._step.set_steps(steps)
    self._step.set_rates(kept.rate, kept.first_step)

  def start_from(self, run_dir: str) -> str:
    """Takes over the features and layers of another run, but not its place in the data.

    It takes the best state of that run, or the last state if there is no best one. Returns the path
    of the checkpoint. A UserError says that there is none, or that its model is too different.
    """
    directories = [os.path.join(run_dir, name) for name in ('best', 'checkpoints')]

    def check() -> None:
      old = next(filter(None, map(self._config_in, directories)), None)
      if old and (reason := Change(old, self._cfg).too_different()):
        raise UserError(f'--init_from {run_dir}: {reason}')

    self._communicator.on_first(f'--init_from {run_dir}', check)
    others = (Checkpoints(directory, self._communicator) for directory in directories)
    if not any(self._restore(other, check_config=False) for other in others):
      raise UserError(f'--init_from {run_dir}: no finished checkpoint there; wanted a run_dir')
    path = self._checkpoints.latest
    self._step.dense.metrics.reset()
    steps = self._step.steps
    self.progress = Progress(step=steps, first_step=steps, trained=self.progress.trained)
    self.ledger, self._checkpoints.latest = Ledger(), ''
    self._step.set_rates(self.progress.rate, self.progress.first_step)
    return path

  def _came_through_checkpoint(self) -> None:
    """Notes that the present state is that of the checkpoint which was written or read last."""
    path = self._checkpoints.latest
    checksum = self._communicator.on_first(f'cannot read {path}', lambda: files.checksum(path))
    self.progress.ancestors = [*self.progress.ancestors, checksum][-MOST_ANCESTORS:]
    self._saved = dataclasses.replace(self.progress)

  def _restore(
    self, source: Checkpoints, check_config: bool = True, between_passes: bool = False
  ) -> bool:
    """Restores the newest intact of some checkpoints; returns whether there was one.

    `check_config` refuses what `Change.check` refuses; `between_passes` leaves out checkpoints
    that were saved within a pass.
    """
    cfg, communicator, before = self._cfg, self._communicator, None

    def adapt(text: str) -> Callable | None:
      nonlocal before
      before = self._config_of(text, source.directory)
      if check_config:
        Change(before, cfg).check(cfg.run_dir)
      warm = WarmStart(before, cfg)
      return warm.rows(communicator.rank, communicator.size) if warm.is_needed() else None

    self._step.store.clear()
    restored = source.restore(self._step.store, self.texts, adapt, between_passes)
    if restored is None:
      return False
    self._checkpoints.latest, dense, progress = restored
    self.ledger = Ledger(progress.pop('ledger'))
    if newer := progress.keys() - vars(self.progress).keys():
      raise OtherModel(
        f'{source.latest}: has {min(newer)!r}, of a newer version; wanted that version'
      )
    self.progress = Progress(**progress)
    self._came_through_checkpoint()
    self.fates = []
    if (warm := WarmStart(before, cfg)).is_needed():
      dense, self.fates = warm.dense(dense, self._step.dense_state())
    else:
      self._step.store.keep_changes()
    # The place within a pass is kept, rounded down to a batch.
    self.progress.batch = self.progress.batch * before.train.batch_size // cfg.train.batch_size
    self._step.load_dense_state(dense)
    # The metrics of the open pass were summed over all processes; rank 0 continues from the sum.
    metrics = {k.removeprefix('metrics/'): v for k, v in dense.items() if k.startswith('metrics/')}
    if communicator.rank or not metrics:
      self._step.dense.metrics.reset()
    else:
      self._step.dense.metrics.load(metrics)
    self._step.set_steps(self.progress.step)
    self._step.set_rates(self.progress.rate, self.progress.first_step)
    return True
