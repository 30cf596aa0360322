"""Computes the scores of requests, from the dense variables and the rows of a model's version.

It runs the trainer's own code, so a score equals what `ctr-predict` computes.
"""

import contextlib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import tensorflow as tf

from ops.dedupe import Deduped
from ops.row_store import PulledRows, RowStore
from ops.tensors import to_tensor
from trainer import config
from trainer.config.export import input_name
from trainer.data.arrays import is_nested, offsets_of
from trainer.data.block import Block
from trainer.data.features import HASH_BITS, SlotBatch
from trainer.data.jsonl_format import WrongValue, slot_array, slot_value, value_at
from trainer.data.parse import parse
from trainer.data.values import feature_keys
from trainer.embedding.embedding import Embedding
from trainer.errors import DataLoss, UserError
from trainer.model.builder import build
from trainer.plain_data import Json
from trainer.serving.limits import BadRequest
from trainer.serving.plain_columns import Graph, PlainColumns, Samples, Shared
from trainer.serving.versioned_store import VersionGone, View, without_show_click

_TOGETHER = 8  # float32 elements of an AVX register
# Examples to try for a column of numbers (False) and one of texts (True); all columns accept null.
_EXAMPLES = {False: (1.0, None), True: ('1', '2024-01-31T13:05:00', '2024013113', None)}


class Scores(NamedTuple):
  """The answer to a request of B samples."""

  # float32 [B]: `probability`, or one array for each task; with model.retrieval `vector`, [B, d]
  outputs: Mapping[str, np.ndarray]
  unknown: Mapping[str, int]  # slot -> its number of distinct features without a row


class Scorer:
  """A model that computes scores; `load` sets its dense variables.

  `text` is an export's resolved config. `own_layers` are dotted paths of layers that it may import;
  others that are not built in are a UserError. With model.retrieval, the columns are a query's.
  """

  def __init__(self, text: str, own_layers: Collection[str] = ()):
    cfg = config.parse(text, "an export's config.yaml")
    for key, layer in cfg.model.all_interactions().items():
      if layer.kind not in config.BUILT_IN and layer.kind not in own_layers:
        raise UserError(
          f"an export's config.yaml: {key} names the layer {layer.kind}, which is not built in; "
          f'where its code may run here, say --own_layers {layer.kind}'
        )
    self._model = build(cfg)
    self._embedding = Embedding(cfg, self._model.needs)
    self._slot_names = {i: name for name, i in reversed(cfg.slot_ids().items())}
    self._num_slots = len(cfg.data.slots)
    self._cfg = cfg
    self._plain = None if cfg.predicts_for_users else PlainColumns(cfg)
    # name -> whether its values are strings; columns of strings come first
    columns = sorted(cfg.data.log_columns(without=cfg.only_of_items()).items())
    self._columns = dict(sorted(columns, key=lambda item: not item[1]))
    self._aliases = {input_name(name): name for name in self._columns}
    floats, integers = tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int32)
    dense = tf.TensorSpec([None, len(cfg.data.dense)], tf.float32)
    self._graph = Graph(
      self._outputs,
      *(integers, floats, dense, integers, integers, floats, floats),
      *([tf.TensorSpec([None, 2])] if self._embedding.counted else []),
    )

  def _outputs(self, *tensors: tf.Tensor) -> dict[str, tf.Tensor]:
    """Computes the outputs, {name: float32 [B]}, of samples and of rows.

    `tensors` are `segments`, `values`, `dense` and `places` of Samples; then, of the rows of the u
    keys, offsets, linear weights, factors and, if a slot has `counts`, shows and clicks.
    """
    segments, values, dense, inverse, *rows = tensors
    size = tf.zeros([tf.shape(dense)[0]])
    empty, no_keys = tf.zeros([0], tf.int32), tf.zeros([0], tf.int64)
    batch = SlotBatch(no_keys, values, segments, dense, size, size, size)
    deduped = Deduped(no_keys, inverse, size, size, empty, empty)  # the others serve gradients
    inputs = self._embedding.embed(batch, deduped, PulledRows(no_keys, *rows))
    return self._model.predictions(self._model(inputs, training=False))

  def load(self, dense: Mapping[str, np.ndarray]) -> None:
    """Sets the dense variables to those of an export; DataLoss if they are of another model."""
    values = {name.partition('/')[0]: value for name, value in dense.items()}
    if len(stats := values.get('dense_stats', ())) == 2:  # of 0.1, which had no bounds
      values['dense_stats'] = np.concatenate([stats, np.zeros_like(stats[:1])])
    wanted = {f'{i:03d}': variable for i, variable in enumerate(self._model.variables)}
    for name, variable in (wanted | {'dense_stats': self._embedding.stats}).items():
      value = values.get(name)
      if value is None or value.shape != variable.shape:
        raise DataLoss(
          f"an export's dense.npz: found {'nothing' if value is None else value.shape} for "
          f'{variable.name}; wanted shape {tuple(variable.shape)}'
        )
      variable.assign(to_tensor(value))

  def signature(self) -> tuple[dict[str, str], dict[str, Json], list[str]]:
    """Returns {column: its tensor's dtype}, an example of a sample, and the outputs' names."""
    exact = self._cfg.data.exact_columns()
    dtypes = {
      name: 'DT_STRING' if is_text else 'DT_DOUBLE' if name in exact else 'DT_FLOAT'
      for name, is_text in self._columns.items()
    }
    return dtypes, self._example, self._graph.names

  @functools.cached_property
  def _example(self) -> dict[str, Json]:
    """An example of a sample, {column: value}: each value is the first of _EXAMPLES that parses."""
    nothing = dict.fromkeys(self._columns, [None])

    def accepted(column: str, value: Json) -> bool:
      try:
        self.parse(nothing | {column: [value]}, 1)
      except BadRequest:
        return False
      return True

    return {
      column: next(value for value in _EXAMPLES[is_text] if accepted(column, value))
      for column, is_text in self._columns.items()
    }

  # A request's columns

  def _column(self, name: str) -> str | None:
    return name if name in self._columns else self._aliases.get(name)

  def unknown(self, names: Iterable[str]) -> list[str]:
    """Returns the names in `names` that are not columns of the model."""
    heads = {name.partition('.')[0] for name in self._columns}
    return [name for name in names if self._column(name) is None and name not in heads]

  def _flat(self, columns: Mapping[str, Sequence[Json]]) -> dict[str, Sequence[Json]]:
    """Returns the columns that the model reads; ctx.os may be the key `os` of objects in ctx."""
    heads = {n: n.partition('.')[0] for n in self._columns if n not in columns}
    inner = {
      name: type(columns[head])(value_at({head: v}, name) for v in columns[head])
      for name, head in heads.items()
      if head != name and any(isinstance(v, dict) for v in columns.get(head, ()))
    }
    return {n: c for n, c in columns.items() if self._column(n)} | inner

  def parse(
    self, columns: Mapping[str, Sequence[Json]], size: int, shared: np.ndarray | None = None
  ) -> Samples:
    """Reads a request's columns, of B = `size` samples, as a file of the log is read.

    Args:
      columns: JSON values by the column's name or its name in a SavedModel (`input_name`). A column
        has B values, or is Shared. A missing value is null or ''. A dense value is a number, its
        text, or a boolean. Columns that the model does not read are ignored.
      shared: int32 [B], for each sample, which value it has of a Shared column; None for the first.
    """
    if shared is None:
      shared = np.zeros([size], np.int32)
    of_request = {}
    for name, values in self._flat(columns).items():
      column = self._column(name)
      if column is None:
        continue
      if column in of_request:
        raise BadRequest(f"column '{column}' is given twice")
      if not isinstance(values, Shared) and len(values) != size:
        raise BadRequest(f"column '{column}': found {len(values)} values; wanted {size}")
      of_request[column] = values
    for column in self._columns:
      if column not in of_request:
        unknown = self.unknown(columns)
        near = f"; found '{unknown[0][:80]}', which is unknown" if unknown else ''
        raise BadRequest(f"column '{column}' is missing; a missing value is null or ''{near}")
    if self._plain and (samples := self._plain.read(of_request, shared)):
      return samples
    arrays = {}
    for column, is_text in self._columns.items():
      values = of_request[column]
      if isinstance(values, Shared):
        values = [values[i] for i in shared]
      arrays[column] = (
        _texts(column, values) if is_text else _numbers(column, values, self._cfg.data.decimal)
      )
    return self._read(arrays, size)

  def _read(self, columns: dict[str, pa.Array], size: int) -> Samples:
    """Reads columns of the log, each with `size` values."""
    if self._cfg.predicts_for_users:  # items seen are named by the request, not looked up by user
      columns.setdefault(self._cfg.data.group, pa.nulls(size))
    parsed = parse(self._cfg, Block(columns, np.arange(size), lambda i: '', []), labelled=False)
    if parsed.bad:
      bad = parsed.examples[0]
      raise BadRequest(f'{bad.what}, sample {bad.line}: found {bad.found}; wanted {bad.wanted}')
    keys, values, segments = parsed.by_sample()
    places = np.arange(len(keys), dtype=np.int32)
    return Samples(keys, places, values, segments, parsed.dense)

  # Items, of a model with model.retrieval

  @property
  def item_column(self) -> str | None:
    """The column of the log that holds the item's id; None if the model finds no items."""
    slot = self._cfg.item_slot
    return slot and (slot.column or slot.name)

  def item_keys(self, items: Sequence[Json]) -> np.ndarray:
    """Returns the keys of the items that a request leaves out, int64 [n]."""
    array = _texts('seen', items)
    if is_nested(array.type):
      raise BadRequest("'seen': found a list within a sample's list; wanted items")
    return feature_keys(
      array, 'seen', self._cfg.slot_ids()[self._cfg.item_slot.name], self._cfg.data.missing_values
    )

  def histories(self, samples: Samples) -> list[np.ndarray]:
    """Returns, for each sample, the keys of the items in its histories, int64 [h]."""
    item = self._cfg.item_slot.name
    fields = [f for f, s in enumerate(self._cfg.ordered_slots) if s.sequence and s.shares == item]
    mine = np.isin(samples.segments % self._num_slots, fields)
    sample = samples.segments[mine] // self._num_slots
    starts = np.searchsorted(sample, np.arange(1, len(samples.dense)))
    keys = samples.keys[samples.places]
    return np.split(keys[mine] if len(samples.segments) else keys[:0], starts)

  def is_empty(self, samples: Samples) -> np.ndarray:
    """Returns which samples have neither a feature nor a dense value, bool [B]."""
    if not len(samples.segments) and len(samples.keys):
      return np.zeros([len(samples.dense)], bool)  # one feature in each slot
    counts = np.bincount(samples.segments // self._num_slots, minlength=len(samples.dense))
    return (counts == 0) & np.isnan(samples.dense).all(1)

  # Scores

  def score(self, samples: Samples, view: View) -> Scores:
    """Computes the scores of samples with the version of the model that a view reads."""
    size, samples = len(samples.dense), self._padded(samples)
    batch = samples.segments, samples.values, samples.dense

    def scores(unknown: np.ndarray, *rows: tf.Tensor | np.ndarray) -> Scores:
      outputs = self._graph(*batch, *rows)
      return Scores({name: o[:size] for name, o in outputs.items()}, self._unknown(unknown))

    def scored(store: RowStore) -> tuple[Scores, np.ndarray]:
      ids, *rows = store.pull(to_tensor(samples.keys), train=False)[:4]
      absent = samples.keys[ids.numpy() < 0]
      unknown = np.unique(absent) if len(absent) else absent
      return scores(unknown, samples.places, *rows), absent

    if not self._embedding.counted and (found := view.settled(scored)):
      return found
    keys, inverse = np.unique(samples.keys, return_inverse=True)
    rows, show_click = view.look_up(keys), []
    if self._embedding.counted:
      rows, *show_click = without_show_click(rows)
    offsets = offsets_of(rows.counts)
    inverse = inverse.astype(np.int32)[samples.places]
    return scores(keys[~rows.present], inverse, offsets, rows.linear, rows.factors, *show_click)

  def _padded(self, samples: Samples) -> Samples:
    """Adds samples up to a multiple of _TOGETHER, so that no score depends on their number.

    TensorFlow computes the last elements of a tensor, which do not fill a register, by another
    formula, whose last bit may differ.
    """
    keys, places, values, segments, dense = samples
    if not (more := -len(dense) % _TOGETHER):
      return samples
    dense = np.concatenate([dense, np.full([more, dense.shape[1]], np.nan, np.float32)])
    if not len(segments) and len(keys):  # one feature in each slot
      places = np.concatenate([places, np.zeros([more * self._num_slots], np.int32)])
    return Samples(keys, places, values, segments, dense)

  def _unknown(self, keys: np.ndarray) -> dict[str, int]:
    """Counts the keys of features without a row, {slot: number of its keys}."""
    counts = np.bincount(keys >> HASH_BITS)
    return {self._slot_names[s]: int(counts[s]) for s in np.flatnonzero(counts).tolist()}

  def warm_up(self, view: View) -> None:
    """Scores some samples, with values and without, because TensorFlow's first calls are slow."""
    for sample in (dict.fromkeys(self._columns), self._example):
      for size in (1, 2):
        with contextlib.suppress(VersionGone):
          self.score(self.parse({n: Shared([v]) for n, v in sample.items()}, size), view)


def _wrong(column: str, i: int, value: Json, wanted: str) -> BadRequest:
  found = repr(value)
  found = found if len(found) <= 80 else found[:80] + '…'
  return BadRequest(f"column '{column}', sample {i}: found {found}; wanted {wanted}")


def _texts(column: str, values: Sequence[Json]) -> pa.Array:
  """Returns a slot's values as an Arrow array, as from JSON lines."""
  texts = []
  for i, value in enumerate(values):
    try:
      texts.append(value if type(value) is str else slot_value(value))
    except WrongValue as e:
      wanted = 'a string, a whole number, a boolean, null or a list of them'
      raise _wrong(column, i, e.value, wanted) from None
  try:
    return slot_array(texts)
  except (UnicodeEncodeError, pa.ArrowException):
    raise BadRequest(f"column '{column}': found a string that is not Unicode") from None


def _numbers(column: str, values: Sequence[Json], decimal: str) -> pa.Array:
  """Returns a dense column as Arrow numbers; if any is a text, as strings with `decimal`."""
  with contextlib.suppress(pa.ArrowException, OverflowError):  # an integer may be too large
    if set(map(type, values)) <= {float, int, type(None)}:
      return pa.array(values, pa.float64(), from_pandas=True)  # NaN is null
  wanted = 'a finite number, its text, or null'
  numbers: list[float | str | None] = []
  for i, value in enumerate(values):
    try:
      number = value if value is None or isinstance(value, str) else float(value)
    except (OverflowError, TypeError):
      raise _wrong(column, i, value, wanted) from None
    numbers.append(None if number != number else number)  # NaN
  if str not in map(type, numbers):
    return pa.array(numbers, pa.float64())
  try:
    texts = [repr(n).replace('.', decimal) if isinstance(n, float) else n for n in numbers]
    return pa.array(texts, pa.string())
  except UnicodeEncodeError:
    raise BadRequest(f"column '{column}': found a string that is not Unicode") from None
