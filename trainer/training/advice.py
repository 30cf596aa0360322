"""Tells users what most likely went wrong in training, and what to do next."""

import numpy as np

from ops.row_kinds import ROW_OPTIMIZERS
from trainer import config
from trainer.data.features import SlotBatch
from trainer.plain_data import JsonObject
from trainer.reporting.findings import OVERFITTING

HUGE_VALUE = 1e5  # a dense value beyond it makes most models diverge
HUGE_WEIGHT = 1e15  # sums of gradients, and their squares, near the largest float32
FEW_STEPS = 50  # after fewer, a model has hardly left its initial values


def why_not_finite(cfg: config.Config, batch: SlotBatch) -> str:
  """Returns the likely cause of a loss or gradient that is not finite; `batch` holds tensors."""
  for column, values in zip(cfg.data.dense, batch.dense.numpy().T):
    largest = np.max(np.abs(values), initial=0, where=~np.isnan(values))
    if largest > HUGE_VALUE and column.transform == 'none':
      return (
        f"dense column '{column.name}' holds values up to {largest:.3g}; wanted transform: "
        'log1p_standardise, or such records left out'
      )
  largest = np.max(batch.weight.numpy(), initial=0)
  if largest > HUGE_WEIGHT:
    return (
      f'data.weight: the column holds weights up to {largest:.3g}; wanted some about 1, or such '
      'records left out'
    )
  rates = {'train.dense_optimizer': (cfg.train.dense_optimizer.learning_rate, 1e-3)}
  for name, table in cfg.sparse.tables.items():
    for part, rule, width in (('factors', table.factors, table.width), ('linear', table.linear, 1)):
      usual = config.row_defaults(rule.kind, 'tuned', cfg.train.batch_size, width)['learning_rate']
      rates[f'sparse.tables.{name}.{part}'] = rule.learning_rate, usual
  key, (rate, usual) = max(rates.items(), key=lambda item: item[1][0] / item[1][1])
  if rate > 5 * usual:
    return f'{key}.learning_rate is {rate:g}; wanted about {usual:g}'
  return (
    'lower train.dense_optimizer.learning_rate or the learning rates of sparse.tables, or set clip'
  )


def why_worse_than_constant(
  cfg: config.Config, values: JsonObject, trained_auc: float | None, steps: int
) -> str:
  """Returns why a model likely predicts worse than the constant share of clicks.

  Args:
    trained_auc: the AUC of the last training pass, if known.
  """
  for name, table in cfg.sparse.tables.items():
    for part, rule in (('factors', table.factors), ('linear', table.linear)):
      usual = config.row_defaults(rule.kind)['learning_rate']
      if ROW_OPTIMIZERS[rule.kind].has_decaying_state and rule.learning_rate > usual:
        return (
          f'sparse.tables.{name}.{part} takes steps of {rule.kind} at learning_rate '
          f'{rule.learning_rate:g}; wanted about {usual:g}'
        )
  if steps < FEW_STEPS:
    return f'it was trained for {steps} steps only; more epochs or a smaller train.batch_size help'
  if reason := cfg.uncalibrated():
    return reason
  auc, calibration = values.get('auc'), values['calibration']
  if auc is not None and trained_auc is not None and trained_auc - auc > OVERFITTING:
    return (
      f'the model overfits: AUC was {trained_auc:.2f} in training and is {auc:.2f} here; fewer '
      'epochs, l2, dropout or a smaller width help'
    )
  if calibration is not None and not 0.8 < calibration < 1.25:
    return (
      f'the predictions add up to {calibration:.2f} times the clicks; are both logs sampled '
      'alike (model.negative_sampling_rate), and labelled alike?'
    )
  return 'the model overfits or diverges; lower the learning rates, train fewer epochs, or set l2'


def nothing_left(cfg: config.Config, epochs: int, has_ended_early: bool) -> str:
  """Says that a finished run has nothing left to train, and how to train more.

  Args:
    has_ended_early: whether train.plateau ended it.
  """
  run_dir = cfg.run_dir
  why = ', where train.plateau ended it' if has_ended_early else ''
  more = '' if has_ended_early else 'raise train.epochs or add passes to data.train; to '
  return (
    f'nothing left to train; {run_dir} has trained {epochs} of {cfg.train.epochs} epochs{why}, and '
    f'{run_dir}/report.html shows them; settings that are new have trained nothing. To train more, '
    f'{more}train with other settings, give another --run_dir; --init_from {run_dir} begins with '
    'what this one has learned'
  )
