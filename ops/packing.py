"""Packs rows and gradients into buffers that processes exchange.

A process sends keys to the owners of their rows, which answer with `pack_rows`; the process reads
that with `unpack_rows`. After its backward pass it packs gradients with `pack_gradients`, and the
owner sums those of all processes with `sum_gradients`. ops/cc/kernels/packing.cc has the layout.
"""

from collections.abc import Sequence

import tensorflow as tf

from ops.dedupe import Deduped
from ops.library import TensorLike, load
from ops.row_store import PulledRows

Tensors = tuple[tf.Tensor, ...]


def pack_rows(
  rows: PulledRows, inverse: TensorLike, counts: TensorLike, dtype: tf.DType = tf.float32
) -> Tensors:
  """Packs the rows of the distinct keys that N processes requested from their owner.

  `inverse`, int32 [n], is `Deduped.inverse` of all requested keys, process by process; `counts`,
  int32 [N], how many each process has requested; `dtype`, of the buffer, float32, float16 or
  bfloat16. Returns a buffer [m] with a block for each process, and the blocks' lengths, int32 [N].
  """
  return load().ctr_pack_rows(rows.linear, rows.factors, rows.offsets, inverse, counts, T=dtype)


def unpack_rows(
  buffer: TensorLike,
  counts: TensorLike,
  keys: TensorLike,
  slot_table: Sequence[int],
  widths: Sequence[int],
) -> Tensors:
  """Unpacks the answers of all owners, each a block that its `pack_rows` made, as one set of rows.

  `counts`, int32 [N], is how many of the `keys`, int64 [u], each owner has; they are grouped by
  owner. Returns `linear`, `factors` and `offsets` of `PulledRows`.
  """
  return load().ctr_unpack_rows(buffer, counts, keys, list(slot_table), list(widths))


def pack_gradients(
  linear_grad: TensorLike,
  factors_grad: TensorLike,
  offsets: TensorLike,
  counts: TensorLike,
  dtype: tf.DType = tf.float32,
) -> Tensors:
  """Packs gradients, laid out as `PulledRows` of u keys that are grouped by owner, for the owners.

  `counts`, int32 [N], is how many of the keys each owner has. Returns what `pack_rows` does.
  """
  return load().ctr_pack_gradients(linear_grad, factors_grad, offsets, counts, T=dtype)


def sum_gradients(
  buffer: TensorLike, counts: TensorLike, offsets: TensorLike, deduped: Deduped
) -> Tensors:
  """Unpacks what all processes packed with `pack_gradients`, and sums each key's gradients.

  Gradients are added in the order of the processes: the sums are reproducible to the last bit.
  `counts`, int32 [N], is how many keys each process sent; `deduped` is of all of them, and
  `offsets`, int32 [u + 1], of this owner's `PulledRows`. Returns the gradients of linear weights,
  float32 [u], and of factors, float32 [offsets[u]].
  """
  occurrences = deduped.inverse, deduped.starts, deduped.order
  return load().ctr_sum_gradients(buffer, counts, offsets, *occurrences)
