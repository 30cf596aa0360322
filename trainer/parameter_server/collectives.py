"""The collective that workers are calling: who has arrived, and each worker's reply."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer.plain_data import Plain


def _sums(values: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
  """Sums arrays by name, in the order of ranks, so that the same values give the same bits."""
  layouts = [{k: (str(v.dtype), v.shape) for k, v in value.items()} for value in values]
  for layout in layouts:
    if layout != layouts[0]:
      raise ValueError(f'workers sum different arrays: {layouts[0]} and {layout}')
  total = {name: np.array(array) for name, array in values[0].items()}
  for value in values[1:]:
    for name, array in value.items():
      total[name] += array
  return [total] * len(values)


# By kind: (the workers' values, by rank) -> their replies, by rank.
_REPLIES: dict[str, Callable[[Sequence[Plain]], list[Plain]]] = {
  'sum': _sums,
  'gather': lambda values: [values] * len(values),
  'exchange': lambda values: [list(received) for received in zip(*values, strict=True)],
  'open_pass': lambda values: [None] * len(values),
  'close_pass': lambda values: [[rank, len(values)] for rank in range(len(values))],
}


class Completed(NamedTuple):
  """A collective that all workers have called."""

  kind: str
  values: list[Plain]  # by rank
  replies: dict[int, Plain]  # by worker


class Collectives:
  """Workers arrive one after the other; once all have arrived, each gets its reply."""

  def __init__(self) -> None:
    self._arrived: dict[int, tuple[str, Plain]] = {}

  def arrive(self, worker: int, kind: str, value: Plain) -> None:
    """Notes that a worker has called a collective of a kind in `_REPLIES`."""
    self._arrived[worker] = kind, value

  def leave(self, worker: int) -> None:
    """Forgets the call of a lost worker."""
    self._arrived.pop(worker, None)

  def complete(self, workers: Iterable[int]) -> Completed | None:
    """Completes the collective if all of `workers` have arrived; else returns None.

    Raises:
      ValueError: if they call different collectives.
    """
    workers = sorted(workers)
    if not workers or not self._arrived.keys() >= set(workers):
      return None
    kinds, values = zip(*(self._arrived.pop(worker) for worker in workers))
    for worker, kind in zip(workers, kinds):
      if kind != kinds[0]:
        raise ValueError(
          f'workers do not call the same: worker {workers[0]} {kinds[0]}, worker {worker} {kind}'
        )
    replies = _REPLIES[kinds[0]](values)
    return Completed(kinds[0], list(values), dict(zip(workers, replies)))
