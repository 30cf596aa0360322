"""The interface through which the processes of a job communicate, and a class for one process.

All processes call the same methods in the same order, even one that has no samples left. If a
process is lost, a call raises an error or ends the process; it never waits forever. *Plain data* is
None, bool, int, float, str, NumPy arrays and scalars, and lists and dicts (with str keys) of these;
a tuple arrives as a list.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
import tensorflow as tf

from ops.tensors import to_tensor
from trainer import errors
from trainer.comm import messages
from trainer.plain_data import Plain

Value = TypeVar('Value')


class Communicator(abc.ABC):
  """The collective operations that all processes of a job call together."""

  rank: int  # this process's number, from 0
  size: int  # the number of processes, N

  # Within a training step

  def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over the processes, inside or outside a tf.function.

    The tensors have one dtype (float32, float64 or int64), and the same shapes on every process.
    The sums have the same bits on every process.
    """

    def total_of(*values: np.ndarray) -> list[np.ndarray]:
      return list(self.sum_arrays({str(i): value for i, value in enumerate(values)}).values())

    sums = tf.nest.flatten(tf.numpy_function(total_of, tensors, [t.dtype for t in tensors]))
    return [tf.ensure_shape(total, t.shape) for total, t in zip(sums, tensors)]

  def all_reduce_with_gradient(self, tensor: tf.Tensor) -> tf.Tensor:
    """Sums one tensor over the processes; its gradient is the sum of all processes' gradients."""

    total = lambda t: self.all_reduce([t])[0]
    return tf.custom_gradient(lambda t: (total(t), total))(tensor)

  # Between steps

  @abc.abstractmethod
  def sum_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns {name: sum over the processes}; all pass the same names, shapes and dtypes."""

  @abc.abstractmethod
  def exchange(self, per_process: Sequence[Plain]) -> list[Plain]:
    """Sends `per_process[r]` to each process r; returns what this one got, by rank."""

  def gather(self, value: Plain) -> list[Plain]:
    """Returns the values of all processes, in the order of ranks."""
    return self.exchange([value] * self.size)

  def broadcast(self, value: Plain) -> Plain:
    """Returns the value of process 0; the other processes' values are ignored."""
    return self.gather(value if self.rank == 0 else None)[0]

  def barrier(self) -> None:
    """Waits until every process has called it."""
    self.gather(None)

  def together(self, what: str, action: Callable[[], Value]) -> Value:
    """Runs `action` on every process; if it fails on any process, raises an error on all of them.

    A process on which it failed raises its own error, the others the UserError of the lowest such
    rank. `action` must not call this communicator. `what`, such as 'cannot read F', begins the
    message on an error of the operating system.
    """
    value, own = None, None
    try:
      with errors.plain_errors(what):
        value = action()
    except errors.UserError as e:
      own = errors.Exhausted(str(e)) if errors.is_exhausted(e) else e
    all_errors = self.gather(own and [type(own).__name__, str(own)])
    if own:
      raise own
    for kind, text in filter(None, all_errors):
      raise getattr(errors, kind, errors.UserError)(text)
    return value

  def on_first(self, what: str, action: Callable[[], Value]) -> Value:
    """Runs `action` on process 0; all return its result, plain data, or raise its UserError."""
    return self.broadcast(self.together(what, action if self.rank == 0 else lambda: None))


class SingleProcess(Communicator):
  """The communicator of a job of one process: its collectives return their arguments."""

  rank, size = 0, 1

  def all_reduce(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(tensors)

  def sum_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(arrays)

  def exchange(self, per_process: Sequence[Plain]) -> list[Plain]:
    return list(per_process)


class RowExchange(Protocol):
  """Runs all-to-alls of rows, one at a time. All-to-alls of different RowExchanges may overlap."""

  def all_to_all(
    self, values: Sequence[tf.Tensor], counts: tf.Tensor
  ) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Sends rows to every rank, and receives theirs, as ops.connections.Connections does."""
    ...


# Plain data is sent as rows of this many bytes. The number of rows is an int32, so 128 GiB fit.
_ROW_BYTES = 64


class RankCommunicator(Communicator):
  """A communicator of N ranks, which opens RowExchanges; `plain_data` is the one it uses itself."""

  def __init__(self, rank: int, size: int, plain_data: RowExchange):
    self.rank, self.size, self._plain_data = rank, size, plain_data

  @abc.abstractmethod
  def row_exchange(self, name: str) -> RowExchange:
    """Opens a new RowExchange; every rank calls it, with the same name."""

  def sum_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    sums = dict(arrays)
    for dtype in sorted({a.dtype for a in arrays.values()}, key=str):
      names = [name for name, a in arrays.items() if a.dtype == dtype and a.size]
      if names:
        totals = self.all_reduce([to_tensor(arrays[name]) for name in names])
        sums |= {name: total.numpy() for name, total in zip(names, totals)}
    return sums

  def exchange(self, per_process: Sequence[Plain]) -> list[Plain]:
    sent = [messages.encode(value) for value in per_process]
    sent = [data + bytes(-len(data) % _ROW_BYTES) for data in sent]
    rows = np.frombuffer(b''.join(sent), np.uint8).reshape([-1, _ROW_BYTES])
    (received,), counts = self._plain_data.all_to_all(
      [to_tensor(rows)], to_tensor(np.array([len(data) // _ROW_BYTES for data in sent], np.int32))
    )
    parts = np.split(received.numpy(), np.cumsum(counts)[:-1])
    return [messages.decode(part.data.cast('B')) for part in parts]
