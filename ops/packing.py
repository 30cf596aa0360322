"""Rows and gradients as flat buffers, for the exchange between the processes that read rows and
those that own them.

The reader of a key sends it to the key's owner. The owner answers with `pack_rows`, the reader
reads that with `unpack_rows`; later the reader sends `pack_gradients`, and the owner adds up what
all readers sent with `sum_gradients`. The buffers' layout is described in
ops/cc/kernels/packing.cc.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from ops.dedupe import Deduped
from ops.library import TensorLike, load
from ops.row_store import PulledRows


class Packed(NamedTuple):
  """A buffer that holds a block for each of N processes."""

  buffer: tf.Tensor  # [m]
  splits: tf.Tensor  # int32 [N], the number of values in each block


class UnpackedRows(NamedTuple):
  """Rows of u keys, as `ops.row_store.PulledRows` without the ids."""

  linear: tf.Tensor  # float32 [u]
  factors: tf.Tensor  # float32 [offsets[u]]
  offsets: tf.Tensor  # int32 [u + 1]


def pack_rows(
  rows: PulledRows, inverse: TensorLike, counts: TensorLike, dtype: tf.DType = tf.float32
) -> Packed:
  """Packs an owner's answer to the processes that asked for rows.

  A feature without factors costs one value and one bit.

  Args:
    rows: of the distinct keys that were asked for.
    inverse: int32 [n], `Deduped.inverse` of all keys that were asked for, process by process.
    counts: int32 [N], how many keys each process asked for.
    dtype: float32, float16 or bfloat16, in which values travel.
  """
  return Packed(
    *load().ctr_pack_rows(
      linear=rows.linear,
      factors=rows.factors,
      offsets=rows.offsets,
      inverse=inverse,
      counts=counts,
      T=dtype,
    )
  )


def unpack_rows(
  buffer: TensorLike,
  counts: TensorLike,
  keys: TensorLike,
  slot_table: Sequence[int],
  widths: Sequence[int],
) -> UnpackedRows:
  """Unpacks what the owners packed with `pack_rows`.

  Args:
    buffer: the blocks of all owners, one after the other.
    counts: int32 [N], how many keys each owner was asked for.
    keys: int64 [u], by owner.
    slot_table: of the `RowStore`.
    widths: of the `RowStore`.
  """
  return UnpackedRows(
    *load().ctr_unpack_rows(
      buffer=buffer, counts=counts, keys=keys, slot_table=list(slot_table), widths=list(widths)
    )
  )


def pack_gradients(
  linear_grad: TensorLike,
  factors_grad: TensorLike,
  offsets: TensorLike,
  counts: TensorLike,
  dtype: tf.DType = tf.float32,
) -> Packed:
  """Packs gradients for the owners of their keys.

  Args:
    linear_grad: float32 [u], of keys grouped by owner.
    factors_grad: float32 [offsets[u]].
    offsets: int32 [u + 1], of the keys' rows.
    counts: int32 [N], how many keys each owner has.
    dtype: float32, float16 or bfloat16, in which values travel.
  """
  return Packed(
    *load().ctr_pack_gradients(
      linear_grad=linear_grad, factors_grad=factors_grad, offsets=offsets, counts=counts, T=dtype
    )
  )


def sum_gradients(
  buffer: TensorLike, counts: TensorLike, offsets: TensorLike, deduped: Deduped
) -> tuple[tf.Tensor, tf.Tensor]:
  """Sums what the readers packed with `pack_gradients`, in the order of the processes.

  Args:
    buffer: the blocks of all processes, one after the other.
    counts: int32 [N], how many keys each process asked for.
    offsets: int32 [u + 1], of the owner's pull.
    deduped: of all keys that were asked for, process by process.

  Returns:
    The gradients of linear weights, float32 [u], and of factors, float32 [offsets[u]].
  """
  return load().ctr_sum_gradients(
    buffer=buffer,
    counts=counts,
    offsets=offsets,
    inverse=deduped.inverse,
    starts=deduped.starts,
    order=deduped.order,
  )
