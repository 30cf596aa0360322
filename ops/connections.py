"""All-to-alls of rows between ranks over sockets. Ranks do not negotiate."""

import uuid
from collections.abc import Sequence

import tensorflow as tf

from ops import library


class Connections:
  """A set of connections, one to every other rank, that carries one all-to-all at a time.

  Every rank runs the all-to-alls of a set in the same order; those of different sets may overlap.
  An all-to-all raises AbortedError if a connection ended, and DataLossError if a rank runs another
  operation; the message names the rank.

  `fds` has, for each rank, a connected stream socket, -1 at `rank`. This object closes them.
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

    Each of `values`, [n, …] of int64, int32, uint8, float32, float16 or bfloat16, has the rows for
    rank 0, then those for rank 1, and so on; `counts`, int32 [N], says how many for each. Returns
    for each of `values` the rows [m, …] from all ranks in order, and how many each sent, int32 [N].
    """
    return library.load().ctr_all_to_all(self._handle, values, counts)

  def counters(self) -> dict[str, int]:
    """Returns {name: count} of connections, bytes_sent, bytes_received and system_calls so far."""
    names = 'connections', 'bytes_sent', 'bytes_received', 'system_calls'
    return dict(zip(names, library.load().ctr_connections_counters(self._handle).numpy().tolist()))
