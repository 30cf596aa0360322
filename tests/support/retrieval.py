"""A small model with model.retrieval, logs and batches for it, and its loss in NumPy with loops."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.support import small
from trainer import config
from trainer.data.features import SlotBatch
from trainer.job.job import Job
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


# A model whose item tower reads columns of data.items, and such a table: {item: (kind, tags,
# price)}. Item 30 is not in the lines of `make_lines`, and the columns of 7 are blank.
ITEM_COLUMNS = {
  'data.slots': [
    {'name': 'user'},
    {'name': 'kinds', 'separator': '|', 'shares': 'kind'},
    {'name': 'item'},
    {'name': 'kind'},
    {'name': 'tags', 'separator': '|', 'value_separator': ':', 'pooling': 'sum'},
  ],
  'data.dense': [{'name': 'price', 'transform': 'log1p_standardise'}],
  'model.retrieval.query': {'slots': ['user', 'kinds'], 'hidden': [8, 4]},
  'model.retrieval.item': {
    'slots': ['item', 'kind', 'tags'],
    'dense': ['price'],
    'hidden': [8, 4],
  },
}
ITEM_TABLE = {
  i: (f'k{i * 7 % 5}', '|'.join(f't{t}:{t + 0.5}' for t in range(i % 3)), f'{1 + i * i}')
  for i in range(25)
} | {7: ('', '', ''), 30: ('k1', 't1', '2.5')}


def make_config(changes: Mapping[str, Any] | None = None, **retrieval: Any) -> config.Config:
  """The small model's config with keys of model.retrieval changed, and others as {'a.b': value}."""
  own = {f'model.retrieval.{key}': value for key, value in retrieval.items()}
  return small.config(TREE, own | dict(changes or {}))


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


def loss_of(
  cfg: config.Config,
  batch: SlotBatch,
  vectors: Mapping[int, np.ndarray],
  of_pass: Sequence[SlotBatch],
) -> np.ndarray:
  """The loss of each sample of one step, float64 [B].

  Args:
    cfg: its config.
    batch: as trainer.retrieval.catalogue.Catalogue.for_step returned it.
    vectors: of every key.
    of_pass: the pass, as batches of the slots user and item.
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
    if settings.own_positives == 'pass' and not in_batch:
      positives = [(b, b.keys.reshape(-1, 2)[:, 1]) for b in of_pass]
    else:
      positives = [(batch, items)]
    own = {
      int(right[j])
      for b, right in positives
      for j in range(len(b.label))
      if b.group[j] == batch.group[i] and b.label[j] > 0.5
    }
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
      losses.append(np.log1p(np.exp(negatives - positive)).sum() / max(1, len(negatives)))
    elif settings.loss == 'nce':
      losses.append(np.log1p(np.exp(-positive)) + np.log1p(np.exp(negatives)).sum())
    else:
      losses.append(np.log(np.exp(positive) + np.exp(negatives).sum()) - positive)
  return np.array(losses)


def make_lines() -> dict[str, list[tuple[int, int]]]:
  """Pairs of a user (of 30) and an item (of 25) that was right, in train and valid."""
  rng = np.random.default_rng(0)
  taste, kind = rng.normal(size=(30, 3)), rng.normal(size=(25, 3))
  lines = {'train': [], 'valid': []}
  for user in range(30):
    liked = np.argsort(-(taste[user] @ kind.T) + rng.gumbel(size=25))[:8].tolist()
    rng.shuffle(liked)
    lines['valid'] += [(user, item) for item in liked[:2]]
    lines['train'] += [(user, item) for item in liked[2:]]
  return lines


def write_lines(path: str, pairs: Sequence[tuple[Any, Any]], header: str = 'user,item') -> str:
  """Writes pairs as CSV; returns the path."""
  text = ''.join(f'{user},{item}\n' for user, item in pairs)
  pathlib.Path(path).write_text(f'{header}\n{text}')
  return path


def write_items(
  path: str,
  table: Iterable[tuple[Any, Sequence[str]]],
  header: str = 'item,kind,tags,price',
) -> str:
  """Writes a table of items as CSV; returns the path."""
  lines = [','.join([str(item), *columns]) for item, columns in table]
  pathlib.Path(path).write_text('\n'.join([header, *lines]) + '\n')
  return path


def write_queries(
  path: str, pairs: Iterable[tuple[Any, Any]], table: Mapping[Any, Sequence[str]] | None = None
) -> str:
  """Writes a log for ITEM_COLUMNS, joined with the columns of a table if one is given.

  A user that is None makes a line without a query.
  """
  lines = ['user,kinds,item' + (',kind,tags,price' if table else '')]
  for user, item in pairs:
    query = ['', ''] if user is None else [str(user), f'k{user % 3}|k4']
    lines.append(','.join([*query, str(item), *(table[item] if table else ())]))
  pathlib.Path(path).write_text('\n'.join(lines) + '\n')
  return path


def run_config(folder: str, run_dir: str = 'run', **changes: Any) -> config.Config:
  """The config of a run of `make_lines`, which are train.csv and valid.csv in the folder."""
  tree = {
    'run_dir': f'{folder}/{run_dir}',
    'data.train': [f'{folder}/train.csv'],
    'data.valid': [f'{folder}/valid.csv'],
    'train.batch_size': 32,
    'train.epochs': 3,
    'train.plateau': None,
    'sparse.tables.default.factors': {'learning_rate': 0.1},
  }
  return make_config(tree | changes, negatives=20)


def train_run(cfg: config.Config, **job: Any) -> Job:
  """Trains a run to its end."""
  one = small.job(cfg, **job)
  assert one.run() == 0
  assert not one.close()
  return one
