"""Speed of rankings and of the index of items: `python -m benchmarks.retrieval_bench`.

First it ranks the exact best 20 of 38,048 items for 31,668 queries, random vectors of width 64, in
turns with faiss' flat index. Then it builds the index of 1,000,000 items and measures its recall of
the exact best 20, for random vectors and for vectors in 5,000 clusters, and the latency of
`:recommend` at a server of the clustered ones, with one request at a time. It writes
build/bench/retrieval_bench.json, and needs faiss (the extra `index`).
"""

import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import numpy as np
import tensorflow as tf
import yaml
from absl import app, flags

from benchmarks.load import measure
from benchmarks.serving_bench import Rows, process
from trainer import config
from trainer.data.features import hash_keys
from trainer.model.builder import build
from trainer.retrieval import items as item_files
from trainer.retrieval import ranking
from trainer.retrieval.items import Items
from trainer.storage import export_writer

USERS = flags.DEFINE_integer('users', 31_668, 'Queries that are ranked exactly.')
ITEMS = flags.DEFINE_integer('items', 38_048, 'Items of that ranking.')
INDEXED = flags.DEFINE_integer('indexed', 1_000_000, 'Items of the index.')
WIDTH, K, CLUSTERS, ASKED, ROUNDS, SECONDS = 64, 20, 5000, 200, 3, 10
OUT = os.path.join('build', 'bench', 'retrieval_bench.json')
CONFIG = {
  'data': {
    'train': ['none'],
    'label': None,
    'group': 'user',
    'slots': [{'name': 'user'}, {'name': 'item'}],
  },
  'sparse': {'tables': {'default': {'width': WIDTH}}},
  'model': {'retrieval': {'query': {'slots': ['user']}, 'item': {'slots': ['item']}}},
}


def vectors(count: int, clusters: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
  """Returns vectors of length 1, float32 [count, WIDTH], around random ones of `clusters`."""
  made = rng.standard_normal([count, WIDTH], np.float32)
  if clusters is not None:
    made = clusters[rng.integers(0, len(clusters), count)] + 0.7 * made
  return made / np.linalg.norm(made, axis=1, keepdims=True)


def measure_exact(figures: dict[str, float]) -> None:
  """Ranks exactly with our code and with faiss, in turns."""
  rng, faiss, none = np.random.default_rng(0), item_files.import_faiss(), np.zeros([0], np.int64)
  queries, items = vectors(USERS.value, None, rng), vectors(ITEMS.value, None, rng)

  def flat() -> np.ndarray:
    index = faiss.IndexFlatIP(WIDTH)
    index.add(items)
    return index.search(queries, K)[1]

  times, found = {'ours': [], 'faiss': []}, {}
  for _ in range(ROUNDS):
    for name, rank in (
      ('ours', lambda: ranking.top_k(queries, items, K, lambda start, end: (none, none))[1]),
      ('faiss', flat),
    ):
      began = time.perf_counter()
      found[name] = rank()
      times[name].append(time.perf_counter() - began)
  for name, seconds in times.items():
    figures[f'exact_{name}_seconds'] = statistics.median(seconds)
  ratios = [a / b for a, b in zip(times['faiss'], times['ours'])]
  figures['exact_vs_faiss'] = statistics.median(ratios)
  same = np.mean([len(set(a) & set(b)) / K for a, b in zip(*found.values())])
  print(
    f'exact: {figures["exact_ours_seconds"]:.1f} s, faiss {figures["exact_faiss_seconds"]:.1f} s; '
    f'{same:.2%} of the items are the same',
    flush=True,
  )


@contextlib.contextmanager
def server(items: np.ndarray, users: np.ndarray, figures: dict[str, float]) -> Iterator[int]:
  """Exports items and users, and serves them; yields the port."""
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'config.yaml')
    with open(path, 'w', encoding='utf-8') as f:
      yaml.safe_dump(CONFIG | {'run_dir': os.path.join(folder, 'run')}, f)
    cfg = config.load(path)
    texts = [str(i) for i in range(len(items))]
    keys = hash_keys([str(i) for i in range(len(users))], 1).numpy()
    of_user = dict(zip(keys.tolist(), users))
    all_items = Items(hash_keys(texts, 2).numpy(), np.array(texts, object), items)
    began = time.perf_counter()
    export_writer.write(
      cfg,
      'items',
      {'number': 1},
      store=Rows(cfg, keys, lambda some: np.stack([of_user[key] for key in some.tolist()])),
      model=build(cfg),
      dense_stats=np.zeros([3, 0], np.float32),
      items=all_items,
    )
    figures['export_seconds'] = time.perf_counter() - began
    with process('trainer.cli.serve', '--run_dir', cfg.run_dir, '--port', '0') as port:
      yield port


def measure_index(figures: dict[str, float]) -> None:
  """Builds the index of random and of clustered items, and sends requests for the latter."""
  faiss, rng = item_files.import_faiss(), np.random.default_rng(1)
  for name, clusters in (
    ('random', None),
    ('clustered', rng.standard_normal([CLUSTERS, WIDTH], np.float32)),
  ):
    items, queries = vectors(INDEXED.value, clusters, rng), vectors(ASKED, clusters, rng)
    began = time.perf_counter()
    index = faiss.deserialize_index(np.frombuffer(item_files.index_of(items), np.uint8))
    figures[f'index_{name}_seconds'] = time.perf_counter() - began
    exact = tf.math.top_k(tf.matmul(queries, items, transpose_b=True), K).indices.numpy()
    found = index.search(queries, K)[1]
    recall = np.mean([len(set(a) & set(b)) / K for a, b in zip(exact, found)])
    figures[f'index_{name}_recall'] = float(recall)
    print(
      f'index of {INDEXED.value:,} {name} items: built in '
      f'{figures[f"index_{name}_seconds"]:.1f} s, recall@{K} {recall:.4f}',
      flush=True,
    )
  with server(items, queries, figures) as port:
    bodies = [json.dumps({'inputs': {'user': [str(i)]}, 'k': K}) for i in range(ASKED)]
    measure(port, bodies, 1, 2, verb='recommend')
    told = measure(port, bodies, 1, SECONDS, verb='recommend')
  figures |= {f'recommend_{key}': told[key] for key in ('rate', 'p50_ms', 'p99_ms', 'failed')}
  print(
    f'export {figures["export_seconds"]:.1f} s; :recommend p50 {told["p50_ms"]:.1f} ms, p99 '
    f'{told["p99_ms"]:.1f} ms, {told["rate"]:.0f} a second, {told["failed"]} failed'
  )


def main(_: list[str]) -> None:
  figures: dict[str, float] = {}
  measure_exact(figures)
  measure_index(figures)
  os.makedirs(os.path.dirname(OUT), exist_ok=True)
  with open(OUT, 'w', encoding='utf-8') as f:
    json.dump(figures, f, indent=1)


if __name__ == '__main__':
  app.run(main)
