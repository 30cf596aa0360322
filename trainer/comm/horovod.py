"""The communicators of a Horovod job.

Horovod carries plain data and sums dense gradients and metrics by ring allreduce. Our own
connections carry rows, or Horovod does (`sync.row_exchange`).
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer.comm.communicator import Communicator, RankCommunicator, RowExchange, SingleProcess
from trainer.comm.connections import Connector
from trainer.config import Sync
from trainer.runtime import Runtime


class HorovodCommunicator(RankCommunicator):
  """The communicator of ranks that Horovod started; `hvd.init` must have been called.

  `open_row_exchange(name)` opens a RowExchange; without it, Horovod's all-to-all carries rows.
  """

  def __init__(self, open_row_exchange: Callable[[str], RowExchange] | None = None):
    import horovod.tensorflow as hvd

    self._hvd = hvd
    self._open_row_exchange = open_row_exchange or HorovodRowExchange
    super().__init__(hvd.rank(), hvd.size(), HorovodRowExchange('messages'))

  def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    # Horovod negotiates, fuses and reduces a group at once. It identifies the group by the name of
    # its op, which TensorFlow makes unique within a graph.
    return self._hvd.grouped_allreduce(list(tensors), op=self._hvd.Sum, name='sum')

  def row_exchange(self, name: str) -> RowExchange:
    return self._open_row_exchange(name)


class HorovodRowExchange:
  """A RowExchange that uses Horovod's all-to-all.

  Horovod negotiates every tensor separately and never fuses all-to-alls, so all values travel as
  one tensor of bytes. `name` distinguishes those that overlap in a graph; eager ops have no names,
  so outside of graphs only one may run at a time.
  """

  def __init__(self, name: str):
    import horovod.tensorflow as hvd

    self._hvd, self._name = hvd, name

  def all_to_all(
    self, values: Sequence[tf.Tensor], counts: tf.Tensor
  ) -> tuple[list[tf.Tensor], tf.Tensor]:
    values = [tf.convert_to_tensor(value) for value in values]
    widths = [v.dtype.size * v.shape[1:].num_elements() for v in values]
    with tf.device('/CPU:0'):  # where rows are
      rows = [
        tf.reshape(v if v.dtype == tf.uint8 else tf.bitcast(v, tf.uint8), [-1, width])
        for v, width in zip(values, widths)
      ]
      joined = rows[0] if len(rows) == 1 else tf.concat(rows, 1)
      received, counts = self._hvd.alltoall(joined, splits=counts, name=self._name)
      parts = [received] if len(rows) == 1 else tf.split(received, widths, 1)
      return [_of_bytes(part, like=value) for part, value in zip(parts, values)], counts


def _of_bytes(rows: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
  """Converts bytes, uint8 [n, width], to a tensor with the dtype and the row shape of `like`."""
  shape = [-1, *like.shape[1:]]
  if like.dtype == tf.uint8:
    return tf.reshape(rows, shape)
  size = [like.dtype.size] if like.dtype.size > 1 else []
  return tf.bitcast(tf.reshape(rows, shape + size), like.dtype)


def communicator(runtime: Runtime, sync: Sync) -> Communicator:
  """Makes the communicator of the config; all ranks call it, after trainer.runtime.start.

  UserError, on all ranks, if one has no free port; ConnectionError names a rank out of reach.
  """
  if runtime.size == 1:
    return SingleProcess()
  by_horovod = HorovodCommunicator()
  if sync.row_exchange == 'horovod':
    return by_horovod
  return HorovodCommunicator(Connector(by_horovod, runtime.host, sync).connect)


def nccl_version() -> int | None:
  """Returns Horovod's version of NCCL, such as 21903; 0 without NCCL, None without Horovod."""
  try:
    import horovod.tensorflow as hvd
  except ModuleNotFoundError:
    return None
  return hvd.nccl_built()
