"""Computes the replies to a collective operation, such as a sum, that all workers have called."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from trainer.plain_data import Plain


def _sums(values: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
  """Returns the sums, for each rank; they are added in the order of ranks, so to the same bits."""
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


def replies(calls: Mapping[int, tuple[str, Plain]]) -> dict[int, Plain]:
  """Returns {number of a worker: its reply}. The worker with the lowest number is rank 0.

  `calls` is {number of a worker: (kind, value that it sent)}; ValueError if the kinds differ.
  """
  workers = sorted(calls)
  kinds, values = zip(*(calls[worker] for worker in workers))
  for worker, kind in zip(workers, kinds):
    if kind != kinds[0]:
      raise ValueError(
        'workers call different collectives: '
        f'worker {workers[0]} {kinds[0]}, worker {worker} {kind}'
      )
  return dict(zip(workers, _REPLIES[kinds[0]](values)))
