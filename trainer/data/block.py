"""What the readers hand on: a run of raw records."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Malformed(NamedTuple):
  """A record that has no columns to read."""

  line: int
  found: str
  wanted: str
  text: str


class Block(NamedTuple):
  """n records, column by column."""

  columns: dict  # name -> pyarrow.Array of n
  lines: np.ndarray  # int64 [n], from 1: the line of a text file, the row of a Parquet file
  text: Callable[[int], str]  # the raw record of row i
  malformed: list  # of Malformed
