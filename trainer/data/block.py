"""Blocks of raw records, which the readers of all formats yield."""

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
  """n records, column by column."""

  columns: dict[str, pa.Array]  # of length n; a list or map holds several features
  lines: np.ndarray  # int64 [n], from 1: the line of a text file, the record of another
  text: Callable[[int], str]  # the raw record of row i
  malformed: list[BadRecord]  # records that have no columns to read
  repeated_headers: Sequence[int] = ()  # lines that repeat a text file's line of names
