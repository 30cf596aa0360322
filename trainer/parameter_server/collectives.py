"""The collective that workers are calling: who has arrived, and what each gets back."""

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


# By kind: a function of what the workers passed, by rank, that returns what each gets back.
_REPLIES: dict[str, Callable[[Sequence[Plain]], list[Plain]]] = {
  'sum': _sums,
  'gather': lambda values: [values] * len(values),
  'exchange': lambda values: [list(for_one) for for_one in zip(*values, strict=True)],
  'open_pass': lambda values: [None] * len(values),
  'close_pass': lambda values: [[rank, len(values)] for rank in range(len(values))],
}


class Completed(NamedTuple):
  """A collective that all workers have called."""

  kind: str
  values: list[Plain]  # what they passed, by rank
  replies: dict[int, Plain]  # what each gets back, by worker


class Collectives:
  """Workers arrive one after the other; once all are there, all get their replies."""

  def __init__(self) -> None:
    self._arrived: dict[int, tuple[str, Plain]] = {}

  def arrive(self, worker: int, kind: str, value: Plain) -> None:
    """Notes that a worker has called a collective.

    Args:
      worker: which one.
      kind: sum, gather, exchange, open_pass or close_pass.
      value: what it passed.
    """
    self._arrived[worker] = kind, value

  def leave(self, worker: int) -> None:
    """Forgets what a worker called that was lost."""
    self._arrived.pop(worker, None)

  def complete(self, workers: Iterable[int]) -> Completed | None:
    """Completes the collective where all of `workers` have arrived; their order is by rank.

    Returns:
      The collective, or None where one is missing, or nobody is expected.
    Raises:
      ValueError: where they do not call the same.
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
