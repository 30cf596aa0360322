"""A small model with model.retrieval, batches for it, and its loss in NumPy with loops."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer import config
from trainer.data.features import SlotBatch
from trainer.training.step import Step

TREE = {
  'seed': 3,
  'data': {
    'train': ['none'],
    'label': None,
    'group': 'user',
    'slots': [{'name': 'user'}, {'name': 'item'}],
  },
  'sparse': {
    'tables': {
      'default': {
        'width': 4,
        'init_scale': 0.5,
        'factors': {'kind': 'sgd', 'preset': 'keras', 'learning_rate': 0.5},
      }
    }
  },
  'model': {
    'retrieval': {
      'query': {'slots': ['user']},
      'item': {'slots': ['item']},
      'negatives': 7,
      'temperature': 0.5,
      'eval_at': [3],
    }
  },
}


def make_config(changes: Mapping[str, Any] | None = None, **retrieval: Any) -> config.Config:
  """The small model's config with keys of model.retrieval changed, and others as {'a.b': value}."""
  import copy

  tree = copy.deepcopy(TREE)
  tree['model']['retrieval'] |= retrieval
  for key, value in (changes or {}).items():
    node = tree
    *parents, last = key.split('.')
    for part in parents:
      node = node.setdefault(part, {})
    node[last] = value
  return config.Config.model_validate(tree)


def make_batch(
  rng: np.random.Generator, samples: int, users: int = 9, items: int = 12
) -> SlotBatch:
  """A batch of the slots user and item; users repeat, so that they have several positives."""
  user, item = rng.integers(0, users, samples), rng.integers(0, items, samples)
  keys = np.stack([(1 << 52) + user * 7919, (2 << 52) + item * 7919], 1).reshape(-1)
  none = np.zeros([0], np.float32)
  return SlotBatch(
    keys,
    none,
    none.astype(np.int32),
    np.zeros([samples, 0], np.float32),
    np.ones([samples], np.float32),
    rng.uniform(0.5, 2, samples).astype(np.float32),
    user,
  )


def vectors_of(step: Step, keys: np.ndarray) -> dict[int, np.ndarray]:
  """The factors of keys, as the next training step reads them."""
  keys = np.unique(keys)
  rows = step.store.pull(keys, train=True)
  offsets, factors = rows.offsets.numpy(), rows.factors.numpy()
  return {int(k): factors[a:b] for k, a, b in zip(keys, offsets, offsets[1:])}


def loss_of(cfg: config.Config, batch: SlotBatch, vectors: Mapping[int, np.ndarray]) -> np.ndarray:
  """The loss of each sample of one step, float64 [B].

  Args:
    cfg: its config.
    batch: as trainer.training.catalogue.Catalogue.for_step returned it.
    vectors: of every key.
  """
  settings, size = cfg.model.retrieval, len(batch.label)

  def score(user: int, item: int) -> float:
    q, v = (vectors[int(key)].astype(np.float64) for key in (user, item))
    if settings.similarity == 'cosine':
      q, v = q / np.linalg.norm(q), v / np.linalg.norm(v)
    return q @ v / settings.temperature

  users, items = batch.keys.reshape(-1)[: 2 * size : 2], batch.item[:size]
  in_batch = settings.loss == 'in_batch_softmax'
  drawn = range(size) if in_batch else range(size, len(batch.item))
  count = size - 1 if in_batch else len(drawn)
  losses = []
  for i in range(size):
    own = {int(items[j]) for j in range(size) if batch.group[j] == batch.group[i]}
    negatives = []
    for c in drawn:
      if int(batch.item[c]) not in own:
        logit = score(users[i], batch.item[c])
        if settings.logq != 'none':
          logit -= batch.log_share[c] + np.log(count)
        negatives.append(logit)
    positive = score(users[i], items[i])
    if settings.logq_positive:
      positive -= batch.log_share[i] + np.log(count)
    negatives = np.array(negatives)
    if settings.loss == 'bpr':
      losses.append(np.log1p(np.exp(negatives - positive)).sum() / len(drawn))
    elif settings.loss == 'nce':
      losses.append(np.log1p(np.exp(-positive)) + np.log1p(np.exp(negatives)).sum())
    else:
      losses.append(np.log(np.exp(positive) + np.exp(negatives).sum()) - positive)
  return np.array(losses)
