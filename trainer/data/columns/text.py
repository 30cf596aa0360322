"""Features of a text: a regular expression's group, runs of characters, prefixes.

Regular expressions are RE2's in Arrow and in TensorFlow. Lower case is that of A to Z, where both
agree. A text that is not UTF-8 has no characters: its record is wrong, and the served graph takes
it as missing.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from trainer import config
from trainer.data.columns.arrow_columns import ArrowReader
from trainer.data.columns.graph_columns import GraphColumn, GraphReader
from trainer.data.values import ranges, text_buffers, trim


def _pattern(made: config.Text) -> str:
  """Extends the regular expression `made.match` so that it matches the whole text.

  Group 1 still is what the group of `made.match` holds where it first matches.
  """
  return f'(?s)\\A.*?(?-s:{made.match}).*\\z'


def _pieces(
  texts: pa.Array, lengths: np.ndarray, firsts: np.ndarray, chars: np.ndarray
) -> pa.Array:
  """Cuts texts into pieces.

  Args:
    texts: [u], without nulls.
    lengths: int64 [u], the number of pieces of each text.
    firsts: int64 [Σ lengths], where each piece begins, in characters of all texts joined.
    chars: int64 [Σ lengths], the number of characters of each piece.
  Returns:
    Lists of texts [u].
  """
  data, _ = text_buffers(texts)
  # The bytes that begin characters.
  begins = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))
  starts, ends = begins[firsts], begins[firsts + chars]
  chosen = data[ranges(starts, ends - starts)]
  offsets = np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int32)
  buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(chosen))]
  pieces = pa.Array.from_buffers(pa.string(), len(firsts), buffers)
  return pa.ListArray.from_arrays(
    np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), pieces
  )


def _ngrams(texts: pa.Array, n: int) -> pa.Array:
  """Returns the runs of n characters of each text, or the text where it is shorter."""
  length = pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
  count = np.where(length > 0, np.maximum(length - n + 1, 1), 0)
  firsts = ranges(np.cumsum(length) - length, count)
  return _pieces(texts, count, firsts, np.repeat(np.minimum(length, n), count))


def _prefixes(texts: pa.Array, lengths: list[int]) -> pa.Array:
  """Returns the prefixes of these lengths of each text; a shorter text gives itself, once."""
  length = pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
  wanted = np.array(lengths)
  # A length counts if it is the first, or if the one before it does not take the whole text.
  counts = np.append([True], wanted[:-1])[None] < length[:, None]
  counts[:, 0] = length > 0
  chars = np.minimum(wanted[None], length[:, None])[counts]
  firsts = np.repeat(np.cumsum(length) - length, counts.sum(1))
  return _pieces(texts, counts.sum(1), firsts, chars)


def arrow(made: config.Text, reader: ArrowReader) -> pa.Array:
  column = reader.texts(made.text)
  texts = column.dictionary
  if made.lower:
    texts = pc.ascii_lower(texts)
  if made.match is not None:
    pattern = _pattern(made)
    found = pc.replace_substring_regex(texts, pattern=pattern, replacement='\\1')
    matches = pc.match_substring_regex(texts, pattern=pattern)
    texts = trim(pc.if_else(matches, found, pa.scalar(None, pa.string())))
  if not made.is_several:
    return pa.DictionaryArray.from_arrays(column.indices, texts)
  filled = texts.fill_null('')
  lists = _ngrams(filled, made.ngrams) if made.ngrams else _prefixes(filled, made.prefixes)
  return lists.take(column.indices)


def graph(made: config.Text, reader: GraphReader) -> GraphColumn:
  texts = reader.texts(made.text)
  if made.lower:
    texts = tf.strings.lower(texts)
  if made.match is not None:
    pattern = _pattern(made)
    found = tf.strings.strip(tf.strings.regex_replace(texts, pattern, '\\1'))
    texts = tf.where(tf.strings.regex_full_match(texts, pattern), found, '')
  if not made.is_several:
    return GraphColumn.single(texts)
  if made.ngrams:
    characters = tf.strings.unicode_split(texts, 'UTF-8')
    found = tf.strings.ngrams(characters, made.ngrams, '', preserve_short_sequences=True)
    return GraphColumn(found.values, found.value_rowids(), tf.size(texts, tf.int64))
  length = tf.strings.length(texts, 'UTF8_CHAR')
  cut = [tf.strings.substr(texts, 0, n, 'UTF8_CHAR') for n in made.prefixes]
  counts = [length > n for n in (0, *made.prefixes[:-1])]
  found = tf.RaggedTensor.from_tensor(tf.stack(cut, 1))
  found = tf.ragged.boolean_mask(found, tf.stack(counts, 1))
  return GraphColumn(found.values, found.value_rowids(), tf.size(texts, tf.int64))
