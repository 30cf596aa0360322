"""Row optimizers: the rules that update the weights of a feature's row.

ops/cc/rows/row_optimizers.cc has their formulas. `RowStore.push` applies them itself; other stores,
such as TFRA's hash tables, use `row_init` and `row_update` on rows as tensors.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from ops.library import TensorLike, load
from ops.row_kinds import HYPER_FIELDS, ROW_OPTIMIZERS


class RowHyperparameters(Protocol):
  """The settings of a row optimizer; each of `row_kinds.HYPERPARAMETERS` is an attribute too."""

  kind: str  # a key of ROW_OPTIMIZERS
  l2_mode: str  # 'touch' or 'catch_up'
  clip: float | None  # None: no bound


def state_floats(kind: str, dim: int) -> int:
  """Returns how many floats of optimizer state a row of `dim` weights has."""
  rule = ROW_OPTIMIZERS[kind]
  return rule.state_per_weight * dim + rule.state_per_row


def hyper(
  tables: Sequence[tuple[RowHyperparameters, RowHyperparameters]], rate: TensorLike = 1.0
) -> tf.Tensor:
  """Returns the hyperparameters of all row optimizers for `RowStore.push`, float32 [T, 2, H].

  `tables` has, for each of T tables, the optimizers of the linear weight and of the factors; `rate`
  multiplies every learning rate. The H numbers are in the order of `HYPER_FIELDS`.
  """

  def fields(o: RowHyperparameters) -> list[float]:
    special = {
      'l2_catch_up': float(o.l2_mode == 'catch_up'),
      'clip': math.inf if o.clip is None else o.clip,
    }
    return [special[name] if name in special else getattr(o, name) for name in HYPER_FIELDS]

  values = np.array([[fields(linear), fields(factors)] for linear, factors in tables], np.float32)
  return tf.concat([values[..., :1] * tf.cast(rate, tf.float32), values[..., 1:]], -1)


def row_init(weights: TensorLike, hyper: TensorLike, kind: str) -> tf.Tensor:
  """Returns rows [n, dim + state]: the weights, float32 [n, dim], then initial optimizer state."""
  return load().ctr_row_init(weights=weights, hyper=hyper, kind=kind)


def row_update(
  rows: TensorLike,
  gradient: TensorLike,
  scale: TensorLike,
  last_step: TensorLike,
  hyper: TensorLike,
  step: TensorLike,
  kind: str,
  add: bool = False,
) -> tf.Tensor:
  """Returns rows, float32 [n, dim + state] (weights, then state), after one optimizer step.

  `gradient` is float32 [n, dim]; `scale`, `step` and `add` are as in `RowStore.push`; `hyper` is
  [H], of one optimizer. `last_step`, int32 [n], is the global step of each row's last update, or 0
  if there was none; its state is then initialised first.
  """
  numbers = {'rows': rows, 'gradient': gradient, 'scale': scale, 'last_step': last_step}
  return load().ctr_row_update(**numbers, hyper=hyper, step=step, kind=kind, add=add)
