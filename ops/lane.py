"""Collectives between processes, over sockets of their own: all-to-alls of rows, sums.

Horovod's would be negotiated first, and under Gloo its event loop turns while another thread holds a connection's lock: on ranks of one
core each that took a quarter of all time. Here order replaces negotiation, and who waits sleeps.
"""
import uuid

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from ops import library


class Lane:
  """Collectives that follow one another, in the same order on every rank; those of several lanes may overlap.

  Args:
    fds: of connected stream sockets, a rank each, which the lane takes over; -1 at `rank`.
    rank: this process's.
  """

  def __init__(self, fds, rank):
    with tf.init_scope():
      self._handle = library.load().ctr_lane_handle(fds=fds, rank=rank, shared_name=f'lane_{uuid.uuid4().hex}')
      self._deleter = resource_variable_ops.EagerResourceDeleter(handle=self._handle, handle_device=self._handle.device)

  def all_to_all(self, values, counts):
    """Sends rows to every rank, with none too.

    Args:
      values: list of tensors, int64, int32, uint8, float32, float16 or bfloat16 [n, …], of each rank 0's rows, then rank 1's, ….
      counts: int32 [N], how many are each rank's.
    Returns: what the ranks had for this one, likewise: list of tensors [m, …], counts int32 [N].
    Raises: InvalidArgumentError for counts that are not of `values`; AbortedError naming a rank that is gone.
    """
    return library.load().ctr_all_to_all(self._handle, values, counts)

  def all_reduce(self, values):
    """list of float32 tensors, of the same shapes on every rank -> list of their sums over ranks, added in the order of ranks.

    Raises: AbortedError naming a rank that is gone; DataLossError where ranks differ in their number of values.
    """
    return library.load().ctr_all_reduce(self._handle, values)
