"""Collects the workers' calls of a collective, and computes each worker's reply."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer.plain_data import Plain


def _sums(values: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
  """Sums arrays of the same name, in the order of ranks: the same values give the same bits.

  Raises:
    ValueError: if workers have arrays of different names, dtypes or shapes.
  """
  layouts = [{k: (str(v.dtype), v.shape) for k, v in value.items()} for value in values]
  for layout in layouts:
    if layout != layouts[0]:
      raise ValueError(f'workers sum different arrays: {layouts[0]} and {layout}')
  total = {name: np.array(array) for name, array in values[0].items()}
  for value in values[1:]:
    for name, array in value.items():
      total[name] += array
  return [total] * len(values)


# Kind -> a function that turns the values of all ranks into the replies to all ranks.
_REPLIES: dict[str, Callable[[Sequence[Plain]], list[Plain]]] = {
  'sum': _sums,
  'gather': lambda values: [values] * len(values),
  'exchange': lambda values: [list(received) for received in zip(*values, strict=True)],
  'open_pass': lambda values: [None] * len(values),
  'close_pass': lambda values: [[rank, len(values)] for rank in range(len(values))],
}


class Completed(NamedTuple):
  """A collective that all workers have called, and their replies."""

  kind: str
  values: list[Plain]  # in the order of ranks
  replies: dict[int, Plain]  # worker -> its reply


class Collectives:
  """Holds the calls of a collective until all workers have called it; then each gets its reply."""

  def __init__(self) -> None:
    self._arrived: dict[int, tuple[str, Plain]] = {}

  def arrive(self, worker: int, kind: str, value: Plain) -> None:
    """Records that a worker has called a collective; `kind` is a key of `_REPLIES`."""
    self._arrived[worker] = kind, value

  def leave(self, worker: int) -> None:
    """Forgets the call of a lost worker."""
    self._arrived.pop(worker, None)

  def complete(self, workers: Iterable[int]) -> Completed | None:
    """If all of `workers` have called the collective, forgets their calls and returns it.

    Returns:
      None if a call is still missing.
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
          'workers call different collectives: '
          f'worker {workers[0]} {kinds[0]}, worker {worker} {kind}'
        )
    replies = _REPLIES[kinds[0]](values)
    return Completed(kinds[0], list(values), dict(zip(workers, replies)))
