"""Collectives between ranks over sockets: all-to-alls of rows, and sums.

Ranks do not negotiate: every rank runs the same operations in the same order. A rank that waits for
another one sleeps.
"""

import uuid
from collections.abc import Sequence

import tensorflow as tf

from ops import library


class Connections:
  """A set of connections, one to every other rank, that carries one collective at a time.

  Every rank must run the collectives of a set in the same order. Collectives of different sets may
  overlap.

  Args:
    fds: for each rank, the file descriptor of a stream socket that is connected to it; -1 at
      `rank`. This object closes them.
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
    """Sends rows to every rank, and waits for theirs; every rank calls this, even without rows.

    Args:
      values: tensors [n, …] of int64, int32, uint8, float32, float16 or bfloat16, each holding the
        rows for rank 0, then those for rank 1, and so on.
      counts: int32 [N], how many rows go to each rank; they sum to n.
    Returns:
      The rows that were sent to this rank, in the order of the ranks: a tensor [m, …] for each of
      `values`; and how many rows each rank sent, int32 [N].
    Raises:
      InvalidArgumentError: if `counts` do not fit `values`.
      AbortedError: if a connection ended; the message names the rank.
      DataLossError: if a rank runs another operation; the message names the rank.
    """
    return library.load().ctr_all_to_all(self._handle, values, counts)

  def all_reduce(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sums of tensors over all ranks. All ranks must call this, and get the same bits.

    Args:
      values: tensors of one type, float32, float64 or int64, of the same shapes on every rank.
    Raises:
      AbortedError: if a connection ended; the message names the rank.
      DataLossError: if a rank runs another operation or has another number of values.
    """
    return library.load().ctr_all_reduce(self._handle, values)

  def counters(self) -> dict[str, int]:
    """Returns {name: count} of connections, bytes_sent, bytes_received and system_calls so far."""
    names = 'connections', 'bytes_sent', 'bytes_received', 'system_calls'
    values = library.load().ctr_connections_counters(self._handle).numpy()
    return dict(zip(names, values.tolist()))
