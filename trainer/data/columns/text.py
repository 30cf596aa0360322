"""Computes columns from a text: a regular expression's group, runs of characters, prefixes.

Arrow and TensorFlow both use RE2. Only A to Z are lowercased, because for other letters the two may
differ. A text that is not UTF-8 has no characters: conversion drops its record, and the served
graph takes it as missing.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from trainer import config
from trainer.data.arrays import offsets_of, ranges, text_buffers, texts_from
from trainer.data.columns.arrow_columns import ArrowReader
from trainer.data.columns.graph_columns import GraphColumn, GraphReader
from trainer.data.values import trim


def _pattern(made: config.Text) -> str:
  """Extends the regular expression `made.match` to match a whole text, with the same group 1."""
  return f'(?s)\\A.*?(?-s:{made.match}).*\\z'


def _pieces(texts: pa.Array, made: config.Text) -> pa.Array:
  """Returns the character n-grams or prefixes of texts without nulls, as a list array [u].

  All lengths that exceed that of a text give, together, the whole text once.
  """
  length = pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
  begin = np.cumsum(length) - length  # of each text, in characters of all texts joined
  if made.ngrams:
    counts = np.where(length > 0, np.maximum(length - made.ngrams + 1, 1), 0)
    firsts = ranges(begin, counts)
    chars = np.repeat(np.minimum(length, made.ngrams), counts)
  else:
    # A prefix is left out if the one before it takes the whole text.
    is_there = np.array([0, *made.prefixes[:-1]]) < length[:, None]
    counts = is_there.sum(1)
    firsts = np.repeat(begin, counts)
    chars = np.minimum(made.prefixes, length[:, None])[is_there]
  data, _ = text_buffers(texts)
  # The bytes that begin characters.
  begins = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))
  starts, ends = begins[firsts], begins[firsts + chars]
  pieces = texts_from(data[ranges(starts, ends - starts)], offsets_of(ends - starts))
  return pa.ListArray.from_arrays(offsets_of(counts), pieces)


def arrow(made: config.Text, reader: ArrowReader) -> pa.Array:
  column = reader.texts(made.text)
  texts = column.dictionary
  if made.lower:
    texts = pc.ascii_lower(texts)
  if made.match is not None:
    pattern = _pattern(made)
    groups = pc.replace_substring_regex(texts, pattern=pattern, replacement='\\1')
    matches = pc.match_substring_regex(texts, pattern=pattern)
    texts = trim(pc.if_else(matches, groups, pa.scalar(None, pa.string())))
  if not made.is_several:
    return pa.DictionaryArray.from_arrays(column.indices, texts)
  return _pieces(texts.fill_null(''), made).take(column.indices)


def graph(made: config.Text, reader: GraphReader) -> GraphColumn:
  texts = reader.texts(made.text)
  if made.lower:
    texts = tf.strings.lower(texts)
  if made.match is not None:
    pattern = _pattern(made)
    groups = tf.strings.strip(tf.strings.regex_replace(texts, pattern, '\\1'))
    texts = tf.where(tf.strings.regex_full_match(texts, pattern), groups, '')
  if not made.is_several:
    return GraphColumn.single(texts)
  if made.ngrams:
    characters = tf.strings.unicode_split(texts, 'UTF-8')
    pieces = tf.strings.ngrams(characters, made.ngrams, '', preserve_short_sequences=True)
  else:
    length = tf.strings.length(texts, 'UTF8_CHAR')
    cut = [tf.strings.substr(texts, 0, n, 'UTF8_CHAR') for n in made.prefixes]
    is_there = tf.stack([length > n for n in (0, *made.prefixes[:-1])], 1)
    pieces = tf.ragged.boolean_mask(tf.stack(cut, 1), is_there)
  return GraphColumn(pieces.values, pieces.value_rowids(), tf.size(texts, tf.int64))
