"""Warns of a model that predicts worse than a constant would, and says what may be wrong."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from absl import logging

from ops.row_kinds import ROW_OPTIMIZERS
from trainer import config
from trainer.plain_data import Json
from trainer.reporting.listener import Listener
from trainer.reporting.metric_text import clicks_of, is_miscalibrated, overfits
from trainer.tools.columns import cold
from trainer.tools.sentences import Finding, found
from trainer.training.advice import LEAST_CLICKS

if TYPE_CHECKING:  # importing TensorFlow takes seconds
  from trainer.training.run_state import RunState

FEW_STEPS = 50  # after fewer, a model has hardly left its initial values


class Advice(Listener):
  """Judges the evaluations of data.valid and data.test while a run trains."""

  what = 'advice'

  def __init__(self, cfg: config.Config, state: 'RunState'):
    self._cfg, self._state = cfg, state
    self._auc = self._auc_of_best = {}  # {task: AUC} of the last training pass

  def begin(self) -> None:
    self._steps = self._state.progress.step  # of the last state

  def wrote(self, record: Mapping[str, Json]) -> None:
    match record:
      case {'event': 'train', 'step': steps}:
        self._steps = steps
        self._auc = {task: of_task.get('auc') for task, of_task in _by_task(record)}
      case {'event': 'best'}:
        self._auc_of_best = self._auc
      case {'event': 'eval', 'split': 'valid' | 'test' as split}:
        self._judge(split, record)

  def _judge(self, split: str, values: Mapping[str, Json]) -> None:
    steps = values['step']
    if split == 'valid' and steps < FEW_STEPS and values['epoch'] + 1 < self._cfg.train.epochs:
      return  # it only begins
    is_best = split == 'test' and steps < self._steps  # data.valid judges the last state
    auc = self._auc_of_best if is_best else self._auc
    of_all = {name: values[name] for name in ('split', 'slots') if name in values}
    for task, of_task in _by_task(values):
      why = why_no_help(self._cfg, of_all | of_task, auc.get(task), steps, is_best)
      for finding in no_help(split, of_task, 'no_help_yet', task, why=why):
        logging.warning('%s', finding.sentence)


def _by_task(values: Mapping[str, Json]) -> Iterable[tuple[str, Mapping[str, Json]]]:
  return values.get('tasks', {'': values}).items()


def no_help(
  split: str, values: Mapping[str, Json], code: str, task: str = '', **figures: object
) -> Iterator[Finding]:
  """Yields a finding if all labels are alike, or predicting their mean for all would be better.

  In the second case the finding has the code `code` and, beside its own figures, `figures`.
  """
  if (label := values.get('ctr')) in (0, 1):
    yield found('one_class', split, label=label, task=task)
    return
  for metric in ('logloss', 'rmse'):
    value, base = values.get(metric), values.get(f'base_{metric}')
    if value is not None and base is not None and value > base:
      yield found(code, split, metric=metric, value=value, constant=base, task=task, **figures)
      return


def why_no_help(
  cfg: config.Config,
  values: Mapping[str, Json],
  trained_auc: float | None,
  steps: int,
  later_was_worse: bool = False,
) -> Finding:
  """Returns why the model, after so many steps, most likely predicts worse than a constant.

  Args:
    values: the metrics of the evaluation in which it did.
    trained_auc: the AUC of the last training pass.
    later_was_worse: whether the run went on training after this state and got worse.
  """
  for key, rule, _ in cfg.sparse.optimizers():
    usual = config.row_defaults(rule.kind, features=cfg.features_per_sample)['learning_rate']
    if ROW_OPTIMIZERS[rule.kind].has_decaying_state and rule.learning_rate > usual:
      return found('large_steps', key, kind=rule.kind, rate=rule.learning_rate, usual=usual)
  if steps < FEW_STEPS and not later_was_worse:
    return found('few_steps', steps=steps)
  if reason := cfg.uncalibrated():
    return found('uncalibrated_loss', reason=reason)
  if overfits(trained_auc, values):
    by_split = {values['split']: values['slots']} if 'slots' in values else {}
    for finding in cold(cfg, by_split, ''):
      return finding
    return found('overfits_here', trained=trained_auc, new=values['auc'])
  clicks = clicks_of(values)
  if clicks is not None and clicks < LEAST_CLICKS:
    return found('few_clicks', clicks=clicks)
  if is_miscalibrated(values, 0.25):
    return found('other_sampling', calibration=values['calibration'])
  return found('diverges', fewer='' if later_was_worse else ', train fewer epochs')
