"""The exports that a job writes while it trains."""

import time

import numpy as np

from trainer.config import Config
from trainer.data.file_system import modified
from trainer.evaluation.task import Task
from trainer.storage import chain, export_writer
from trainer.storage.kept_texts import texts_by_key
from trainer.training.inputs import Inputs
from trainer.training.run_log import RunLog
from trainer.training.run_state import RunState


class Exporter:
  """Exports the model for serving. Every process calls each method."""

  def __init__(self, cfg: Config, task: Task, inputs: Inputs, state: RunState, log: RunLog):
    self._cfg, self._communicator, self._step = cfg, inputs.communicator, inputs.step
    self._state, self._log = state, log
    self._replay = chain.Replay()
    self._inputs, self._task = inputs, task
    self._base = self._task.exports[0]

  def export_day(self) -> None:
    """Writes the base and the SavedModel at the end of a day, each if the config asks for it."""
    if self._cfg.export.base:
      self._write(self._base)
    if self._cfg.export.saved_model:
      self._write('saved_model')

  def export_kept(self, last_step: int) -> None:
    """Exports the best state of a finished run, to take the place of the last state's export.

    `last_step`, the step of the last state, is added to the export's position in the data. So the
    best state counts as a new export, even if it was exported before the last state.
    """
    if self._cfg.export.base or self._cfg.export.delta_every_passes:
      self._write(self._base, kept_at=last_step)
    if self._cfg.export.saved_model:
      self._write('saved_model', kept_at=last_step)

  def export_pass(self, marker: str | None) -> None:
    """Writes a delta if one is due after a pass, which the file `marker` announced."""
    every, progress = self._cfg.export.delta_every_passes, self._state.progress
    progress.delta_due = bool(every) and progress.done % every == 0
    self.export_due(marker)

  def export_due(self, marker: str | None = None) -> None:
    """Writes the delta that is due, also if an earlier start of the run could not write it."""
    if self._state.progress.delta_due and self._cfg.export.delta_every_passes:
      self._write('delta', marker)
      self._state.progress.delta_due = False

  def _write(self, kind: str, marker: str | None = None, kept_at: int | None = None) -> None:
    progress = self._state.progress
    if progress.withheld or self._state.untrained:  # a later export has these changes too
      return
    self._step.consolidate()
    position = {'epoch': progress.epoch, 'passes': progress.done}
    position |= {'last': progress.last, 'day': progress.day}
    if kept_at is not None:
      position['kept_at'] = kept_at
    with self._log.clock.of('export'):
      has_rows = kind in chain.ROW_KINDS
      written = export_writer.write(
        self._cfg,
        kind,
        position,
        store=self._step.store,
        model=self._step.dense.model,
        dense_stats=self._step.dense.embedding.stats,
        communicator=self._communicator,
        items=self._task.items(self._inputs, self._texts) if has_rows else None,
        ancestors=progress.ancestors,
        replay=self._replay,
      )
    if kind in chain.ROW_KINDS:
      progress.ancestors = [written.checksum]
    if written.told:
      self._log.show(written.told, keep=True)
    announced = None if marker is None else modified(marker)
    fields = {
      'pass': progress.last,
      'kind': kind,
      'path': written.path,
      'rows': written.rows,
      'slots': {slot: {'rows': n} for slot, n in written.slots.items()} or None,
      'tombstones': written.tombstones,
      'seconds': round(written.seconds, 3),
      'day': progress.day,
      'seconds_since_announced': announced and round(time.time() - announced, 3),
    }
    self._log.write('export', **fields)

  def _texts(self, slot: str, keys: np.ndarray) -> dict[int, str]:
    """Returns {key: text} of a slot's texts that are kept, on process 0; {} on the others."""
    dumps = self._communicator.gather(np.frombuffer(self._state.texts.dump(), np.uint8))
    some = dumps if self._communicator.rank == 0 else ()
    return texts_by_key((dump.tobytes() for dump in some), slot, self._cfg.slot_ids()[slot])
