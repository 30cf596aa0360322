"""Sums rows over the features in each slot of each sample, and gathers the factors of histories.

The results are differentiable. ops/cc/rows/pool.h has the formulas of the sums.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from ops.dedupe import Deduped
from ops.library import TensorLike, load
from ops.row_store import FactorPart, PulledRows


@dataclasses.dataclass(frozen=True)
class PoolLayout:
  """What `pool` must know about the model; slots are in the order of `Config.ordered_slots`."""

  table_of_slot: tuple[int, ...]  # [F], the table of each slot, ascending
  parts: tuple[tuple[FactorPart, ...], ...]  # the parts of each table's factors
  poolings: tuple[str, ...] = ()  # [F], each 'sum', 'mean' or 'sqrtn'; (): return no norms
  # [F], whether the values of a slot are divided by their number in the sample; (): none are.
  averaged: tuple[bool, ...] = ()
  slots: bool = True  # whether to return slot sums of plain parts; field parts always return them
  # Whether to return totals and squares of plain parts; field parts always return squares.
  totals: bool = False

  def __post_init__(self):
    for part in (p for parts in self.parts for p in parts):
      if part.kind not in ('plain', 'field'):
        raise ValueError(f"FactorPart.kind: found {part.kind!r}; wanted 'plain' or 'field'")
      if part.kind == 'field' and part.width % len(self.table_of_slot):
        raise ValueError(
          f'FactorPart.width: found {part.width} of a field part; wanted a multiple of the '
          f'{len(self.table_of_slot)} slots'
        )

  def attributes(self) -> dict[str, int | list]:
    """Returns the attributes of the op CtrPool, which takes the parts of all tables in one list."""
    parts = [(t, p, p.kind == 'field') for t, of_table in enumerate(self.parts) for p in of_table]
    slots = len(self.table_of_slot)
    return {
      'parts': len(parts),
      'table_of_field': list(self.table_of_slot),
      'poolings': list(self.poolings),
      'averaged': list(self.averaged),
      'part_tables': [t for t, _, _ in parts],
      'part_widths': [p.width // slots if field else p.width for _, p, field in parts],
      'part_field': [field for _, _, field in parts],
      'part_slots': [field or self.slots for _, _, field in parts],
      'part_totals': [self.totals and not field for _, _, field in parts],
    }

  def by_table(self, tensors: Iterable[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Groups tensors, one for each FactorPart of each table in order, by table."""
    tensors = iter(tensors)
    return [[next(tensors) for _ in of_table] for of_table in self.parts]


class Pooled(NamedTuple):
  """Slot sums of B samples. Tensors that the PoolLayout does not request have 0 rows.

  Σ runs over the features of a slot or sample: x is a feature's value, w its linear weight, and v
  its factors. A list of lists has an inner list for each table, with a tensor for each FactorPart.
  """

  linear: tf.Tensor  # float32 [B, F]: Σ x·w
  norm: tf.Tensor  # float32 [B, F]: the divisors of slot sums
  slots: list[list[tf.Tensor]]  # float32 [B, slots of the table, width]: Σ x·v
  totals: list[list[tf.Tensor]]  # float32 [B, width]: Σ x·v over all slots of the table
  # float32 [B]: Σ x²·‖v‖² over all slots. In a field part, v has only the columns for the slot
  # of the feature itself.
  squares: list[list[tf.Tensor]]


def pool(
  rows: PulledRows,
  deduped: Deduped,
  values: TensorLike,
  segments: TensorLike,
  batch_size: TensorLike,
  layout: PoolLayout,
) -> Pooled:
  """Returns the slot sums of a batch; differentiable in `rows.linear` and `rows.factors`.

  Args:
    rows: the rows of `deduped.unique`; only linear, factors and offsets are read.
    values: float32 [n], the values of the n features; empty if all are 1.
    segments: int32 [n], ascending: sample * F + slot; empty if each slot of each sample has one
      feature.
    batch_size: int32 [], B.
  """
  linear, norm, slots, totals, squares = load().ctr_pool(
    linear=rows.linear,
    inverse=deduped.inverse,
    factors=rows.factors,
    offsets=rows.offsets,
    values=values,
    segments=segments,
    batch_size=batch_size,
    starts=deduped.starts,
    **layout.attributes(),
  )
  return Pooled(linear, norm, *map(layout.by_table, (slots, totals, squares)))


@tf.RegisterGradient('CtrPool')
def _pool_gradient(op: tf.Operation, *gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
  _, inverse, factors, offsets, values, segments, batch_size, starts = op.inputs
  linear, _, *of_parts = [tf.zeros([0]) if g is None else g for g in gradients]
  parts = op.get_attr('parts')
  attributes = ('table_of_field', 'poolings', 'averaged', 'part_tables', 'part_widths')
  attributes += ('part_field', 'part_slots', 'part_totals')
  linear_grad, factors_grad = load().ctr_pool_grad(
    factors=factors,
    offsets=offsets,
    values=values,
    segments=segments,
    batch_size=batch_size,
    inverse=inverse,
    starts=starts,
    linear_grad=linear,
    slots_grads=of_parts[:parts],
    totals_grads=of_parts[parts : 2 * parts],
    squares_grads=of_parts[2 * parts :],
    **{name: op.get_attr(name) for name in attributes},
  )
  return [linear_grad, None, factors_grad] + [None] * 5


def histories(
  rows: PulledRows,
  deduped: Deduped,
  segments: TensorLike,
  batch_size: TensorLike,
  *,
  slots: int,
  slot: int,
  width: int,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Gathers the factors of the features in one of F slots of each sample, differentiably.

  The first arguments are as for `pool`; `width` is how many of a row's factors to read, D. Returns
  vectors, float32 [B, L, D], the factors of each history's features in order, L being the length of
  the longest: 0 where a shorter one has ended or a feature has no factors; and a mask, bool [B, L],
  false at these zeros.
  """
  vectors, mask, _ = load().ctr_history(
    factors=rows.factors,
    offsets=rows.offsets,
    inverse=deduped.inverse,
    segments=segments,
    batch_size=batch_size,
    starts=deduped.starts,
    order=deduped.order,
    fields=slots,
    field=slot,
    width=width,
  )
  return vectors, mask


@tf.RegisterGradient('CtrHistory')
def _history_gradient(op: tf.Operation, *gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
  factors, offsets, _, _, _, starts, order = op.inputs
  of_factors = load().ctr_history_grad(
    factors=factors,
    offsets=offsets,
    places=op.outputs[2],
    starts=starts,
    order=order,
    vectors_grad=gradients[0],
  )
  return [of_factors] + [None] * 6
