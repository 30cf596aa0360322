"""Computes crosses: columns with a feature for each combination of the features of other columns.

A combination is hashed to an integer h, from 0: each column, in order, replaces it by (h·M + hash
of the column's feature) mod 2^63, with a constant M. The slot hashes the last h like any integer.
The combinations of a sample follow the order of its features; the last column's changes fastest.
"""

import functools
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from ops.keys import NO_FEATURE
from ops.library import TensorLike
from trainer import config
from trainer.data.arrays import offsets_of
from trainer.data.columns.arrow_columns import ArrowReader
from trainer.data.columns.graph_columns import GraphColumn, GraphReader
from trainer.data.features import hash_keys

BETWEEN = ' × '  # the parts of a combination, as people read it
_M = 0x369DEA0F31A53F85  # odd, as in a linear congruential generator
_POSITIVE = 2**63 - 1


def feature_of(text: str, made: config.SlotCross) -> str:
  """Converts a combination, written as 'a × b', to the text that the slot hashes.

  A text is returned unchanged if it does not have one part for each column of the cross.
  """
  parts = text.split(BETWEEN)
  if len(parts) != len(made.cross):
    return text
  return str(_mixture([hash_keys([part], 0).numpy() for part in parts])[0])


def shown(made: config.SlotCross, reader: ArrowReader) -> tuple[pa.Array, pa.Array]:
  """Returns two texts for each combination in all records: the hashed one, and 'a × b' to show."""
  parts, _ = _parts([reader.features(name).by_record() for name in made.cross], made.most, np)
  texts = []
  for name, hashes in zip(made.cross, parts):
    known, of_known = reader.feature_texts(name)
    texts.append(of_known.take(np.searchsorted(known, hashes)))
  return pa.array(_mixture(parts)).cast(pa.string()), pc.binary_join_element_wise(*texts, BETWEEN)


def _mixture(parts: Sequence[TensorLike]) -> TensorLike:
  """Hashes c combinations, to int64 [c]; `parts` has each column's hash in each, int64 [c]."""
  return functools.reduce(lambda h, hashes: (h * _M + hashes) & _POSITIVE, parts, parts[0] * 0)


def _parts(
  columns: list[tuple[TensorLike, TensorLike]], most: int, xp: ModuleType
) -> tuple[list[TensorLike], TensorLike]:
  """Combines the features that a record has in several columns, and keeps its first `most`.

  A column has the hashes of all records' features, int64 [m], and how many a record has, int64 [n].
  Returns each column's hashes in the c combinations, int64 [c], and how many a record has, [n].
  """
  take, total = np.take if xp is np else tf.gather, columns[0][1] * 0 + 1
  for _, counts in columns:
    # Counts are capped at `most`, more than which is not kept, so the product cannot overflow.
    total = xp.minimum(total, most) * xp.minimum(counts, most)
  total = xp.minimum(total, most)
  ends = xp.cumsum(total)
  place = xp.cumsum(xp.repeat(total * 0 + 1, total)) - 1 - xp.repeat(ends - total, total)
  parts = []
  for hashes, counts in reversed(columns):
    of_place = xp.repeat(counts, total)
    parts.append(take(hashes, xp.repeat(xp.cumsum(counts) - counts, total) + place % of_place))
    place = place // of_place
  return parts[::-1], total


def arrow(made: config.SlotCross, reader: ArrowReader) -> pa.Array:
  columns = [reader.features(name) for name in made.cross]
  if all(c.counts is None for c in columns):
    missing = np.zeros([reader.num_records], bool)
    for column in columns:
      missing |= column.hashes == NO_FEATURE
    return pa.array(_mixture([c.hashes for c in columns]), mask=missing)
  parts, counts = _parts([c.by_record() for c in columns], made.most, np)
  return pa.ListArray.from_arrays(offsets_of(counts), _mixture(parts))


def graph(made: config.SlotCross, reader: GraphReader) -> GraphColumn:
  columns = [reader.features(name) for name in made.cross]
  by_sample = [
    (c.hashes, tf.math.unsorted_segment_sum(tf.ones_like(c.samples), c.samples, reader.size))
    for c in columns
  ]
  parts, counts = _parts(by_sample, made.most, tf)
  samples = tf.repeat(tf.range(reader.size), counts)
  # tf.repeat loses the static rank.
  texts = tf.reshape(tf.strings.as_string(_mixture(parts)), [-1])
  return GraphColumn(texts, tf.reshape(samples, [-1]), reader.size)
