"""A small model, single steps of it, and the rows that they leave, for tests of what steps do."""

import importlib.util
import os
import types
import unittest
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import yaml

from ops.row_store import to_float32
from tests.support import small
from trainer import config
from trainer.data.features import SlotBatch
from trainer.serving.scorer import Scorer
from trainer.serving.versioned_store import LookedUpRows
from trainer.training.step import Step, StepCounts, StepFlags

# Goes with the batches of tests.support.batches.
CONFIG = """
seed: 3
data:
  train: [none]
  slots: [{name: a, separator: "|", value_separator: ":"}, {name: b, separator: "|", pooling: sum},
    {name: c, separator: "|", pooling: sqrtn}]
  dense: [{name: x}, {name: y, transform: log1p, missing: 0.5}]
sparse:
  tables: {default: {width: 4, init_scale: 0.1}}
model: {interactions: [linear, fm, {dnn: {hidden: [8, 4]}}]}
train: {dense_optimizer: {kind: sgd, learning_rate: 0.1}}
"""
# Changes of it that make two tasks, the second of which wants the first; model.shared is to be set.
TASKS = {
  'data.labels': [
    {'name': 'click', 'click': 0.25},
    {'name': 'conversion', 'weight': 0.7, 'click': 0.75},
  ],
  'model.interactions': ['linear', 'fm'],
  'model.tasks': {
    'click': {'interactions': [{'tower': {'hidden': [4]}}]},
    'conversion': {'interactions': [{'tower': {'hidden': []}}], 'given': 'click'},
  },
}
# Changes of it that make the last slot a history of the first's features; batches want `ids`.
HISTORY = {
  'data.slots': [
    {'name': 'a', 'separator': '|'},
    {'name': 'b', 'separator': '|', 'pooling': 'sum'},
    {'name': 'c', 'separator': '|', 'shares': 'a', 'sequence': {'max_length': 9}},
  ],
  'model.interactions': ['linear', {'din': {'attention': 5, 'hidden': [8, 4], 'dropout': 0.3}}],
  'sparse.shared_lists': 'mean',
}
HISTORY_IDS = (1, 2, 1)
# Changes of it that let the layers read the counts of the first two slots.
COUNTS = {
  'data.slots': [
    {'name': 'a', 'separator': '|', 'value_separator': ':', 'counts': True},
    {'name': 'b', 'separator': '|', 'pooling': 'sum', 'counts': True},
    {'name': 'c', 'separator': '|', 'pooling': 'sqrtn'},
  ]
}
TFRA = importlib.util.find_spec('tensorflow_recommenders_addons') is not None  # installed


class Row(NamedTuple):
  """What is kept of one feature."""

  show: float
  click: float
  admitted: bool
  linear: np.ndarray  # weight and optimizer state
  factors: np.ndarray | None  # likewise, float32; None before admission


def make_config(changes: Mapping[str, Any]) -> config.Config:
  """The small model's config with some keys changed, as {'train.batch_size': 8}.

  Raises:
    unittest.SkipTest: where it wants TFRA, which requirements-next.txt has not.
  """
  if changes.get('sparse.store') == 'tfra' and not TFRA:
    raise unittest.SkipTest('tensorflow-recommenders-addons is not installed')
  path = os.path.join(tf.compat.v1.test.get_temp_dir(), 'config.yaml')
  return config.load(small.write(path, yaml.safe_load(CONFIG), changes))


def train(step: Step, batch: SlotBatch, has_next: bool = False) -> StepCounts:
  """Takes one step on a batch whose keys are routed within it."""
  staged = step.stage(batch)
  counts, _ = step.train(staged, step.route(staged), None, StepFlags(has_next, False, False))
  return counts


def scores(step: Step, cfg: config.Config, columns: Mapping[str, list], size: int) -> Any:
  """What the scorer of trainer.cli.serve gives for raw columns, with the rows of a step's store."""
  kinds = [layer.kind for layer in cfg.model.all_interactions().values()]
  scorer = Scorer(config.dump(cfg), kinds)
  dense = {f'{i:03d}/{v.name}': v.numpy() for i, v in enumerate(step.dense.model.variables)}
  scorer.load(dense | {'dense_stats': step.dense.embedding.stats.numpy()})

  def look_up(keys: np.ndarray) -> LookedUpRows:
    rows = step.store.pull(keys, train=False)
    present = step.store.lookup(keys)['exists'].numpy()
    return LookedUpRows(rows.linear.numpy(), np.diff(rows.offsets), rows.factors.numpy(), present)

  view = types.SimpleNamespace(settled=lambda _: None, look_up=look_up)
  return scorer.score(scorer.columns.read(columns, size), view).outputs


def rows_of(chunks: Iterable[Mapping[str, np.ndarray]]) -> dict[int, Row]:
  """Rows by key, of what `export_state` of one or several stores gave.

  Raises:
    AssertionError: where two stores hold one key.
  """
  found = {}
  for chunk in chunks:
    admitted = 0
    for i, key in enumerate(chunk['key'].tolist()):
      factors = None
      if chunk['admitted'][i] and 'factors_default' in chunk:
        factors = to_float32(chunk['factors_default'][admitted])
        admitted += 1
      assert key not in found, f'key {key} has two owners'
      found[key] = Row(
        chunk['show'][i],
        chunk['click'][i],
        bool(chunk['admitted'][i]),
        chunk['linear'][i],
        factors,
      )
  return found
