"""Computes look-ups: the value that a small table, which the config holds, has for a text."""

import base64
import functools
import json
import zlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import tensorflow as tf

from trainer import config
from trainer.data.columns.arrow_columns import ArrowReader
from trainer.data.columns.graph_columns import GraphColumn, GraphReader
from trainer.data.features import hash_keys
from trainer.errors import UserError

_NO_KEY = 2**63 - 1  # above all hashes; the search for an unknown key ends here


def encoded(table: Mapping[str, str]) -> str:
  """Returns a look-up table as the `content` of a config: JSON, compressed, in base64."""
  text = json.dumps(dict(sorted(table.items())), ensure_ascii=False)
  return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@functools.lru_cache(maxsize=64)
def _table(content: str) -> tuple[np.ndarray, list[str]]:
  """Decodes a look-up table; returns the hashes of the keys, int64, ascending, and their values.

  The last hash is above all others, with the value ''; the search for an unknown key ends there.
  """
  try:
    table = json.loads(zlib.decompress(base64.b64decode(content)))
  except (ValueError, zlib.error):
    raise UserError('the content of a lookup: wanted what a run wrote, or null') from None
  keys, values = list(table), list(table.values())
  with tf.init_scope():  # the first call may be in the graph of a SavedModel
    hashes = hash_keys(keys, 0).numpy() if keys else np.zeros([0], np.int64)
  order = np.argsort(hashes)
  return np.append(hashes[order], _NO_KEY), [*(values[i] for i in order), '']


def arrow(made: config.Lookup, reader: ArrowReader) -> pa.Array:
  hashes, values = _table(made.content)
  column = reader.texts(made.lookup)
  texts = [t or '' for t in column.dictionary.to_pylist()]
  wanted = hash_keys(texts, 0).numpy() if texts else np.zeros([0], np.int64)
  places = np.searchsorted(hashes, wanted)
  places[hashes[places] != wanted] = len(values) - 1
  return pa.DictionaryArray.from_arrays(column.indices, pa.array(values).take(places))


def graph(made: config.Lookup, reader: GraphReader) -> GraphColumn:
  hashes, values = map(tf.constant, _table(made.content))
  wanted = hash_keys(reader.texts(made.lookup), 0)
  places = tf.searchsorted(hashes, wanted)
  is_known = tf.equal(tf.gather(hashes, places), wanted)
  return GraphColumn.single(tf.where(is_known, tf.gather(values, places), ''))
