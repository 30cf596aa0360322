"""A request for scores, in the one form to which the requests of every protocol are converted.

The cost is counted in samples, and limited to `max_instances`, before anything is computed. A value
that all samples share counts as if it stood in each of them, because layers and some columns work
on it once for each sample: every SAMPLE_BYTES bytes of such copies count as one sample.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer.data.request_columns import Shared
from trainer.plain_data import Json
from trainer.serving.limits import TooLarge

SAMPLE_BYTES = 1024
_MOST_COLUMNS = 10_000


class Request(NamedTuple):
  """A request for scores."""

  columns: Mapping[str, Sequence[Json]]  # `size` values each, or Shared
  size: int  # number of samples
  by_row: bool  # whether the body has "instances"
  cost: int = 0  # in samples; at least `size`, if the request was parsed
  # int32 [size]: for each sample, which value it has of Shared columns; None: these have one value.
  shared: np.ndarray | None = None

  def kind(self) -> frozenset[tuple[str, bool]]:
    """Returns the columns, and whether each has objects, in which columns may be looked up.

    Requests of one kind may be scored together.
    """
    return frozenset((name, dict in map(type, values)) for name, values in self.columns.items())


class Signature(NamedTuple):
  """The columns of a request, the outputs of its answer, and the version that answers."""

  columns: Mapping[str, str]  # name -> the dtype of its tensor, such as DT_STRING
  example: Mapping[str, Json]  # a sample that a request may have
  outputs: Sequence[str]
  version: int


def together(requests: Sequence[Request]) -> Request:
  """Returns one request with the samples of all `requests`, which must be of one kind."""
  if len(requests) == 1:
    return requests[0]

  def joined(name: str) -> list[Json]:
    columns, kind = [r.columns[name] for r in requests], Shared
    if not all(isinstance(column, Shared) for column in columns):
      columns = [c * r.size if isinstance(c, Shared) else c for c, r in zip(columns, requests)]
      kind = list
    return kind(itertools.chain.from_iterable(columns))

  columns = {name: joined(name) for name in requests[0].columns}
  sizes = [r.size for r in requests]
  shared = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
  return Request(columns, len(shared), requests[0].by_row, shared=shared)


def check_columns(names: Collection[str]) -> None:
  """Raises TooLarge if a request has too many columns."""
  if len(names) > _MOST_COLUMNS:
    raise TooLarge(f'found {len(names)} columns; wanted at most {_MOST_COLUMNS}')


def check_cost(size: int, shared: int, max_instances: int) -> None:
  """Raises TooLarge if `size` samples, each of which needs the `shared` bytes, cost too much."""
  if size > max_instances:
    raise TooLarge(f'found {size} samples; wanted at most {max_instances}')
  if size > 1 and size * shared > max_instances * SAMPLE_BYTES:
    raise TooLarge(
      f'found {size} samples that share {shared:,} bytes; wanted at most '
      f'{max_instances * SAMPLE_BYTES // size:,} bytes for so many samples'
    )


def weight(value: Json) -> int:
  """Returns about how many bytes a value takes."""
  return 8 + len(value if isinstance(value, str) else str(value))
