"""What the readers hand on: a run of raw records."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa


class Malformed(NamedTuple):
  """A record that has no columns to read."""

  line: int
  found: str
  wanted: str
  text: str


class Block(NamedTuple):
  """n records, column by column."""

  columns: dict[str, pa.Array]  # of n each; lists and maps hold several features
  lines: np.ndarray  # int64 [n], from 1: the line of a text file, the record of another
  text: Callable[[int], str]  # the raw record of row i
  malformed: list[Malformed]
  repeated_headers: Sequence[int] = ()  # lines that repeat a text file's line of names
