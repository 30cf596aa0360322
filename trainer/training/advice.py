"""Tells users what most likely went wrong in training, and what to do next."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainer import config
from trainer.config.sparse import Sparse
from trainer.config.train import Train
from trainer.errors import BadPass

if TYPE_CHECKING:  # importing TensorFlow takes seconds
  from trainer.data.features import SlotBatch
  from trainer.data.prepared import PreparedPass

HUGE_VALUE = 1e5  # a dense value beyond it makes most models diverge
HUGE_WEIGHT = 1e15  # beyond it, sums of squared gradients come near the largest float32
LEAST_CLICKS = 200  # with fewer in data.valid, the AUC of an epoch is uncertain by ±0.04 or more


def huge_value(data: config.Data, slots: list[config.Slot], batch: 'SlotBatch') -> str | None:
  """Returns a text that names a column of the batch whose values make a loss infinite, or None."""
  for column, values in zip(data.dense, batch.dense.numpy().T):
    largest = np.max(np.abs(values), initial=0, where=~np.isnan(values))
    if largest > HUGE_VALUE and column.transform == 'none':
      found = f"dense column '{column.name}' holds values up to {largest:.3g}"
      return f'{found}; wanted transform: log1p_standardise, or such records left out'
  # Empty if each slot of each sample has one feature of value 1.
  values = np.abs(batch.values.numpy())
  if (largest := np.max(values, initial=0)) > HUGE_VALUE:
    slot = slots[int(batch.segments.numpy()[values.argmax()]) % len(slots)]
    found = f"slot '{slot.name}' holds values up to {largest:.3g}"
    return f'{found}; wanted `from: bins` of the column, its log, or such records left out'
  largest = np.max(batch.weight.numpy(), initial=0)
  if largest > HUGE_WEIGHT:
    return f'data.weight: the column holds weights up to {largest:.3g}; wanted some about 1'
  return None


def placed(error: BadPass, prepared: 'PreparedPass') -> BadPass:
  """Returns an error of training on a pass, with the record of a huge value if that is to blame."""
  value, place = prepared.meta['bad'].get('largest', (0.0, ''))  # 0.2.0 wrote none
  is_to_blame = value > HUGE_VALUE and ' up to ' in str(error)
  return BadPass(f'{error}; {value:.3g} is in {place}') if is_to_blame else error


def lower_rates(train: Train, sparse: Sparse, features: float) -> str:
  """Returns a text: which learning rate most likely made a loss infinite or NaN."""
  rates = {'train.dense_optimizer': (train.dense_optimizer.learning_rate, 1e-3)}
  for key, rule, width in sparse.optimizers():
    usual = config.row_defaults(rule.kind, 'tuned', train.batch_size, width, features)
    rates[key] = rule.learning_rate, usual['learning_rate']
  key, (rate, usual) = max(rates.items(), key=lambda item: item[1][0] / item[1][1])
  if rate > 5 * usual:
    return f'{key}.learning_rate is {rate:g}; wanted about {usual:g}'
  return 'lower the learning rates of train.dense_optimizer or of sparse.tables, or set clip'


def few_clicks(cfg: config.Config, valid: Sequence['PreparedPass']) -> str | None:
  """Returns a warning if data.valid has too few clicks for choosing the best epoch; else None."""
  label, plateau = cfg.deciding_label, cfg.train.plateau
  has_clicks = cfg.kinds_of_labels[label.name] == 'clicks'
  if not (has_clicks and valid and cfg.train.epochs > 1):
    return None
  labels, weights = zip(*(p.labels(cfg.labels.index(label)) for p in valid))
  weights = np.concatenate(weights)[np.concatenate(labels) > 0.5]
  clicks = weights.sum() ** 2 / max(weights @ weights, 1e-300)  # effective ones (Kish 1965)
  if clicks >= LEAST_CLICKS:
    return None
  ends = 'ends training and ' if plateau else ''
  few = f'data.valid holds {clicks:.0f} clicks, fewer than {LEAST_CLICKS}'
  return f'{few}: chance {ends}chooses the epoch that is kept; hold out more samples for it'


def nothing_left(run_dir: str, epochs: int, of_epochs: int, has_ended_early: bool) -> str:
  """Returns a text: the run has finished so many epochs; and how to train more."""
  why = ', where train.plateau ended it' if has_ended_early else ''
  more = '' if has_ended_early else 'raise train.epochs or add passes to data.train to train more; '
  return (
    f'nothing left to train; {run_dir} has trained {epochs} of {of_epochs} epochs{why}, and '
    f'{run_dir}/report.html shows them. New settings have trained nothing; {more}'
    'to train with other settings, give another --run_dir and, to start from this run, '
    f'--init_from {run_dir}'
  )
