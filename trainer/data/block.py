"""The form in which the readers of all file formats return records."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa


class BadRecord(NamedTuple):
  """A record that cannot be used, and the reason."""

  line: int
  found: str
  wanted: str
  text: str
  what: str = 'malformed record'
  path: str = ''

  def __str__(self) -> str:
    return f'{self.path}:{self.line}: {self.what}: found {self.found}; wanted {self.wanted}'


class Block(NamedTuple):
  """A block of n records of a file, stored by column."""

  columns: dict[str, pa.Array]  # of length n; a list or map holds several features
  lines: np.ndarray  # int64 [n], from 1: line numbers in a text file, else record numbers
  text: Callable[[int], str]  # i -> record i as it is in the file
  malformed: list[BadRecord]  # records that cannot be split into columns
  remarks: Sequence[tuple[int, str]] = ()  # (line, what is odd there), of which a warning tells
