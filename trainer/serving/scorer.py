"""Computes the scores of requests, from the dense variables and the rows of a model's version.

It runs the trainer's own code, so a score equals what `ctr-predict` computes.
"""

import contextlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ops.dedupe import Deduped
from ops.row_store import PulledRows, RowStore
from ops.tensors import to_tensor
from trainer import config
from trainer.data.arrays import offsets_of
from trainer.data.features import HASH_BITS, SlotBatch
from trainer.data.request_columns import RequestColumns, Samples, Shared
from trainer.embedding.embedding import Embedding
from trainer.errors import DataLoss, UserError
from trainer.model.builder import build
from trainer.plain_data import Json
from trainer.serving.versioned_store import VersionGone, View, without_show_click

_TOGETHER = 8  # float32 elements of an AVX register


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
    self.columns = RequestColumns(cfg)
    floats, integers = tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int32)
    dense = tf.TensorSpec([None, len(cfg.data.dense)], tf.float32)
    self._graph = tf.function(self._outputs, autograph=False).get_concrete_function(
      *(integers, floats, dense, integers, integers, floats, floats),
      *([tf.TensorSpec([None, 2])] if self._embedding.counted else []),
    )
    self._captured = self._graph.captured_inputs
    self._dtypes = [output.dtype for output in self._graph.outputs]
    self._names = list(self._graph.structured_outputs)

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

  def _run(self, *inputs: np.ndarray | tf.Tensor) -> dict[str, np.ndarray]:
    """Runs the graph of `_outputs`; to call it as a function would take three times as long."""
    args = [i if isinstance(i, tf.Tensor) else to_tensor(i) for i in inputs] + self._captured
    outputs = tf.raw_ops.StatefulPartitionedCall(args=args, Tout=self._dtypes, f=self._graph)
    found = dict(zip(sorted(self._names), outputs))
    return {name: found[name].numpy() for name in self._names}

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
      for name, is_text in self.columns.names.items()
    }
    return dtypes, self.columns.example, self._names

  def score(self, samples: Samples, view: View) -> Scores:
    """Computes the scores of samples with the version of the model that a view reads."""
    size, samples = len(samples.dense), self._padded(samples)
    batch = samples.segments, samples.values, samples.dense

    def scores(unknown: np.ndarray, *rows: tf.Tensor | np.ndarray) -> Scores:
      outputs = self._run(*batch, *rows)
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
    for sample in (dict.fromkeys(self.columns.names), self.columns.example):
      for size in (1, 2):
        with contextlib.suppress(VersionGone):
          samples = self.columns.read({n: Shared([v]) for n, v in sample.items()}, size)
          self.score(samples, view)
