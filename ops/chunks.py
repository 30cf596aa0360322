"""Chunks, the parts in which a feature table is exported.

A chunk is a dict {column: array} of some of a table's features, ordered by the table's shards. It
has the `COLUMNS`; that of a `RowStore` has more. (A chunk of a prepared pass is something else.)
"""

from collections.abc import Collection, Mapping

import numpy as np

COLUMNS = {
  'key': np.int64,
  'show': np.float64,
  'click': np.float64,
  'delta_score': np.float64,
  'unseen_days': np.uint16,
  'age_days': np.uint16,
  'slot': np.uint16,
  'admitted': np.bool_,
}

Chunk = Mapping[str, np.ndarray]


def select(
  chunk: Chunk, kept: np.ndarray, table_slots: Mapping[str, Collection[int]]
) -> dict[str, np.ndarray]:
  """Returns a row store's chunk with only the features to keep.

  Args:
    chunk: its column `factors_NAME` has rows only for admitted features of table NAME.
    kept: bool [n].
    table_slots: {name of a table: the ids of its slots}.
  """
  selected = {}
  for name, column in chunk.items():
    if name.startswith('factors_'):
      of_table = np.isin(chunk['slot'], list(table_slots[name.removeprefix('factors_')]))
      selected[name] = column[kept[chunk['admitted'] & of_table]]
    else:
      selected[name] = column[kept]
  return selected
