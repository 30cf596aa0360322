"""Evaluates data.valid and data.test, and each pass before training on it; reports the metrics."""

import time
import zlib
from collections.abc import Sequence

from absl import logging

from trainer.config import Config
from trainer.data.prepared import PreparedPass, same_samples
from trainer.embedding.row_table import table_counts
from trainer.evaluation import plateau
from trainer.evaluation.evaluators import Evaluator
from trainer.files import to_json
from trainer.plain_data import JsonObject
from trainer.training.advice import few_clicks
from trainer.training.inputs import Inputs
from trainer.training.run_log import RunLog, quality_text
from trainer.training.run_state import RunState

SAME_SAMPLES = '%s holds the samples of %s: metrics of data.%s say nothing of new samples'


class Validation:
  """Evaluates passes while a run trains. Every process calls each method."""

  # The metrics of data.valid for the last and the best state, if this process evaluated them.
  _valid_of_last: JsonObject = {}
  _valid_of_best: JsonObject = {}

  def __init__(self, cfg: Config, judge: Evaluator, inputs: Inputs, state: RunState, log: RunLog):
    self._cfg, self._communicator, self._step = cfg, inputs.communicator, inputs.step
    self._state, self._inputs, self._evaluation, self._log = state, inputs, judge, log
    self._passes: dict[str, list[PreparedPass]] = {}

  def open(self) -> None:
    """Converts and opens the passes of data.valid and data.test."""
    for split in ('valid', 'test'):
      self._passes[split] = self._inputs.of_split(split)
    if (told := few_clicks(self._cfg, self._passes['valid'])) and self._communicator.rank == 0:
      logging.warning('%s', told)

  def judge(self, prepared: PreparedPass, name: str) -> None:
    """Evaluates the next pass before the model trains on it.

    If a listener objects, exports are withheld after this pass.
    """
    values = self._evaluate([prepared], 'next', name)
    if self._step.steps:
      reasons = [listener.predicted(prepared, values) for listener in self._log.listeners]
      self._state.progress.withheld = reason = next(filter(None, reasons), None)
      if reason:
        self._log.write('withheld', reason=reason, **{'pass': name})
        self._log.show(f'no export after {name}: {reason}', keep=True)

  def evaluate_day(self, day: int) -> None:
    """Evaluates data.valid and data.test at the end of a day of a stream."""
    for split, prepared in self._passes.items():
      if prepared:
        self._evaluate(prepared, split, day=day)

  def evaluate_epoch(self) -> JsonObject:
    """Evaluates data.valid, if any pass was trained on since the last time; applies train.plateau.

    Returns the metrics of data.valid; {} if it was not evaluated.
    """
    progress, values = self._state.progress, {}
    if self._passes['valid'] and progress.unvalidated:
      values = self._valid_of_last = self._evaluate(self._passes['valid'], 'valid')
      self._state.note_model()
      judged_by = self._judged_by()
      # An entry that an earlier version did not keep counts as the same.
      if progress.best is not None and not judged_by.items() >= progress.judged_by.items():
        self._forget_best('data.valid or the metric has changed')
      progress.judged_by = judged_by
      rate = progress.rate
      train, metric = self._cfg.train, self._cfg.deciding_metric
      for line in plateau.follow(train, metric, progress, values, self._step.steps):
        self._log.show(line, keep=True)
      if progress.rate != rate:
        self._step.set_rates(progress.rate, progress.first_step)
        self._undo()
      if progress.best_step == self._step.steps:
        self._log.write('best', epoch=progress.epoch)
        self._valid_of_best = values
    progress.unvalidated = False
    return values

  def _undo(self) -> None:
    """Goes back to the best state, unless the training ends now."""
    progress = self._state.progress
    if not progress.finished and progress.epoch + 1 < self._cfg.train.epochs:
      self._state.back_to_best()
      self._log.show(f'goes on from the best state, of step {progress.best_step:,}', keep=True)

  def pass_begins(self, prepared: PreparedPass) -> None:
    """Warns if data.valid or data.test has the samples of the pass that begins.

    If the pass was added to the run after the best state was found, it also forgets the best state,
    which was not trained on this pass. Learning rates that train.plateau has lowered then return to
    their first values.
    """
    progress, name = self._state.progress, prepared.name
    if progress.epoch == 0 or progress.done >= progress.best_passes:
      for split, judging in self._passes.items():
        # A pass with the same path was reported before training.
        for trained, judges in same_samples((prepared, other) for other in judging):
          if self._communicator.rank == 0:
            logging.warning(SAME_SAMPLES, trained, judges, split)
    if progress.best is None or (self._passes['valid'] and progress.done < progress.best_passes):
      return
    self._forget_best(f'{name} is new to it')
    progress.rate = 1.0
    self._step.set_rates(progress.rate, progress.first_step)

  def _forget_best(self, reason: str) -> None:
    progress = self._state.progress
    told = f'the state of step {progress.best_step:,}, the best so far, is no longer kept'
    self._log.show(f'{reason}: {told}; the best is chosen anew', keep=True)
    self._log.write('best_forgotten', reason=reason)
    progress.forget_best()

  def _judged_by(self) -> JsonObject:
    """Returns the metric, its task, the passes of data.valid and a checksum of their samples.

    Two results can be compared only if all are the same.
    """
    plateau, passes = self._cfg.train.plateau, self._passes['valid']
    valid = [[p.name, p.num_samples] for p in passes]
    samples = zlib.crc32(to_json([p.meta['arrays'] for p in passes]))
    judged = {'metric': self._cfg.deciding_metric, 'task': plateau and plateau.task}
    return judged | {'valid': valid, 'samples': samples}

  def finish(self, took_best: bool) -> JsonObject:
    """Evaluates data.test with the state that the run keeps, and tells the listeners.

    `took_best` says that this state is an earlier one than the last. Returns the metrics of
    data.test or, without it, those of data.valid for this state; {} if only an earlier start of the
    run evaluated it.
    """
    valid, test = self._passes['valid'], self._passes['test']
    values = self._valid_of_best if took_best else self._valid_of_last
    if test:
      values = self._evaluate(test, 'test')
    for listener in self._log.listeners if test or valid else ():
      listener.finished(valid or test, 'valid' if valid else 'test')
    return values

  def _evaluate(
    self,
    prepared: Sequence[PreparedPass],
    split: str,
    name: str | None = None,
    day: int | None = None,
  ) -> JsonObject:
    """Evaluates passes, reports the metrics and returns them.

    Args:
      split: 'valid', 'test', or 'next' for the pass that is trained on next.
      name: the name of the pass in the event; None: the names of all passes.
      day: the day in the event; None: the day that is open.
    """
    progress, steps = self._state.progress, self._step.steps
    shown = name or (prepared[0].name if len(prepared) == 1 else f'{len(prepared)} passes')
    started = time.monotonic()
    with self._log.clock.of('evaluate'):
      values = dict(self._evaluation.figures(prepared, in_log=split == 'next'))
    rate = values.get('samples', values['examples']) / max(time.monotonic() - started, 1e-9)
    if self._evaluation.predictions is not None:
      histograms = {'predictions': self._evaluation.predictions}
      self._log.events.histograms(split, steps, histograms)
    fields = {
      'pass': name or ' '.join(p.name for p in prepared),
      'split': split,
      'epoch': progress.epoch,
      'day': progress.day if day is None else day,
      'examples_per_second': round(rate, 1),
    }
    counts = table_counts(self._step.store, self._communicator)
    self._log.write('eval', **values, **counts, **fields)
    place = f'{split:5} · ' + (f'{shown} · ' if shown != split else '')
    self._log.show(f'{place}{quality_text(values)}', keep=True)
    return values
