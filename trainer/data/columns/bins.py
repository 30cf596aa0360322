"""Computes bins: the feature '3' for a number in bin 3, 'missing' for a missing number."""

import functools
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pyarrow as pa
import tensorflow as tf

from ops.library import TensorLike
from trainer import config
from trainer.data.columns.arrow_columns import TINY32, ArrowReader
from trainer.data.columns.graph_columns import GraphColumn, GraphReader


@functools.cache
def _log_squared() -> np.ndarray:
  """Returns 0, 1, 2, the next float32, and each x > 1 where ln²x is 1, 2, … as boundaries."""
  most = np.log(float(np.finfo(np.float32).max)) ** 2
  numbers = np.exp(np.sqrt(np.arange(1, int(most) + 1)))
  return _rounded(np.concatenate([[0, 1, 2, np.nextafter(np.float32(2), np.float32(3))], numbers]))


def boundaries(made: config.Bins) -> np.ndarray:
  """Returns the boundaries of the bins, ascending, float64 but rounded to float32."""
  return _log_squared() if made.log_squared else _rounded(np.array(made.boundaries, np.float64))


def _rounded(bounds: np.ndarray) -> np.ndarray:
  return np.unique(bounds.astype(np.float32)).astype(np.float64)


def texts(made: config.Bins) -> list[str]:
  """Returns the text of each bin; the last text is for missing numbers."""
  return [*map(str, range(len(boundaries(made)) + 1)), 'missing']


def _bins(bounds: np.ndarray, numbers: TensorLike, xp: ModuleType) -> TensorLike:
  """Returns the index of each number's bin, which is also that of the bin's text in `texts(made)`.

  Bin i holds bounds[i - 1] <= number < bounds[i]; NaN, for missing, has the index after the last
  bin. `xp` is NumPy or TensorFlow, whichever `numbers` belongs to.
  """
  bins = xp.searchsorted(bounds, numbers, side='right')
  return xp.where(numbers != numbers, len(bounds) + 1, bins)  # NaN: missing


def reader(made: config.Bins) -> Callable[[np.ndarray], list[str]]:
  """Returns a function from float32 numbers [n], NaN where missing, to the texts of their bins."""
  bounds, features = boundaries(made), texts(made)

  def of(numbers: np.ndarray) -> list[str]:
    numbers = np.where(np.abs(numbers) < TINY32, 0, numbers)
    return [features[i] for i in _bins(bounds, numbers, np).tolist()]

  return of


def arrow(made: config.Bins, reader: ArrowReader) -> pa.Array:
  bounds = boundaries(made)
  bins = _bins(bounds, reader.rounded(made.bins), np)
  used = np.bincount(bins, minlength=len(bounds) + 2) > 0  # a request has few of the bins
  names = [str(i) if i <= len(bounds) else 'missing' for i in np.flatnonzero(used).tolist()]
  return pa.DictionaryArray.from_arrays(
    (np.cumsum(used, dtype=np.int32) - 1)[bins], pa.array(names, pa.string())
  )


def graph(made: config.Bins, reader: GraphReader) -> GraphColumn:
  bins = _bins(boundaries(made), reader.rounded(made.bins), tf)
  return GraphColumn.single(tf.gather(tf.constant(texts(made)), bins))
