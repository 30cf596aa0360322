"""Collectives between ranks over sockets: all-to-alls of rows, and sums.

There is no negotiation: every rank runs the same operations in the same order, and a rank that
waits for another one sleeps.
"""

import uuid
from collections.abc import Sequence

import tensorflow as tf

from ops import library


class Connections:
  """A connection to every other rank, over which one collective follows another.

  Collectives come in the same order on every rank; those of different Connections may overlap.

  Args:
    fds: a connected stream socket for each rank, -1 at `rank`; this object closes them.
    rank: the rank of this process.
  """

  def __init__(self, fds: Sequence[int], rank: int):
    with tf.init_scope():
      self._handle = library.load().ctr_connections_handle(
        fds=fds, rank=rank, shared_name=f'connections_{uuid.uuid4().hex}'
      )
      self._deleter = library.ResourceDeleter(self._handle)

  def all_to_all(
    self, values: Sequence[tf.Tensor], counts: tf.Tensor
  ) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Sends rows to every rank and receives theirs; every rank calls it, with no rows too.

    Args:
      values: tensors [n, …] of int64, int32, uint8, float32, float16 or bfloat16, each holding the
        rows for rank 0, then those for rank 1, and so on.
      counts: int32 [N], how many rows go to each rank; they sum to n.
    Returns:
      What the ranks had for this one, likewise: tensors [m, …] and counts int32 [N].
    Raises:
      InvalidArgumentError: where `counts` do not fit `values`.
      AbortedError: naming a rank whose connection ended.
      DataLossError: naming a rank that is at another operation.
    """
    return library.load().ctr_all_to_all(self._handle, values, counts)

  def all_reduce(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over ranks, in the order of the ranks: the same bits everywhere.

    Args:
      values: tensors of one type, float32, float64 or int64, of the same shapes on every rank.
    Raises:
      AbortedError: naming a rank whose connection ended.
      DataLossError: naming a rank that is at another operation, or has another number of values.
    """
    return library.load().ctr_all_reduce(self._handle, values)

  def counters(self) -> dict[str, int]:
    """Returns what was done so far: connections, bytes_sent, bytes_received, system_calls."""
    names = 'connections', 'bytes_sent', 'bytes_received', 'system_calls'
    values = library.load().ctr_connections_counters(self._handle).numpy()
    return dict(zip(names, values.tolist()))
