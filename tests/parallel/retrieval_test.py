"""N ranks train towers as one process does, and rank the catalogue alike. Run under horovodrun."""

import json
import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf

from tests.support.ranks import ranks
from tests.support.retrieval import make_config
from tests.support.steps import rows_of
from trainer.comm.communicator import SingleProcess
from trainer.evaluation.task import task_of
from trainer.job.job import Job
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher

HISTORY = {
  'data.slots': [
    {'name': 'item'},
    {'name': 'history', 'separator': '|', 'shares': 'item', 'sequence': {'max_length': 4}},
  ],
}
VARIANTS = (
  (
    {},
    {
      'loss': 'sampled_softmax',
      'sampling': 'frequency',
      'logq': 'shows',
      'own_positives': 'pass',
    },
  ),
  (
    {},
    {
      'query': {'slots': ['user'], 'dropout': 0.3},
      'loss': 'in_batch_softmax',
      'similarity': 'dot',
      'logq': 'shows',
    },
  ),
  (
    HISTORY,
    {
      'query': {
        'slots': ['history'],
        'hidden': [6],
        'encoder': {'sasrec': {'layers': 2, 'heads': 2, 'dropout': 0.3}},
      },
      'item': {'slots': ['item'], 'hidden': [24, 6]},
    },
  ),
  (
    # The table lacks item 22.
    {
      'data.slots': [{'name': 'user'}, {'name': 'item'}, {'name': 'tags', 'separator': '|'}],
      'data.dense': [{'name': 'price', 'transform': 'standardise'}],
      'data.keep_texts': [],
    },
    {
      'loss': 'in_batch_softmax',
      'query': {'slots': ['user'], 'hidden': [5]},
      'item': {'slots': ['item', 'tags'], 'dense': ['price'], 'hidden': [6, 5]},
    },
  ),
)


class RetrievalOnRanksTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.communicator = ranks()

  def write(self, folder):
    rng = np.random.default_rng(0)
    for name, times in (('train', 7), ('valid', 2)):
      lines = ['user,item,history\n']
      for user in range(31):
        for _ in range(times):
          history = '|'.join(map(str, rng.integers(0, 23, rng.integers(0, 6))))
          lines.append(f'{user},{rng.integers(0, 23)},{history}\n')
      pathlib.Path(f'{folder}/{name}.csv').write_text(''.join(lines))
    items = [f'{i},{"|".join(map(str, range(i % 4)))},{i * i}\n' for i in (*range(22), 40)]
    pathlib.Path(f'{folder}/items.csv').write_text('item,tags,price\n' + ''.join(items))

  def test_give_the_same_vectors_and_rankings_as_one_process(self):
    communicator = self.communicator
    folder = communicator.broadcast(tempfile.mkdtemp())
    if communicator.rank == 0:
      self.write(folder)
    communicator.barrier()
    for i, (changes, retrieval) in enumerate(VARIANTS):
      rows, values, dense, stores = {}, {}, {}, {}
      for name, one in (('ranks', communicator), ('alone', SingleProcess())):
        if name == 'alone' and communicator.rank:
          continue
        cfg = make_config(
          {
            'run_dir': f'{folder}/{name}_{i}',
            'data.train': [f'{folder}/train.csv'],
            'data.valid': [f'{folder}/valid.csv'],
            'train.batch_size': 33,
            'train.epochs': 2,
            'train.plateau': None,
            'data.keep_texts': ['item'],
            'export.delta_every_passes': 1,
            'sparse.tables.default.factors.learning_rate': 0.1,
            'train.dense_optimizer': {'kind': 'sgd', 'learning_rate': 0.1},
          }
          | changes
          | ({'data.items': f'{folder}/items.csv'} if 'data.dense' in changes else {}),
          **retrieval,
        )
        step = task_of(cfg).step(one)
        job = Job(cfg, one, step)
        self.assertEqual(job.run(), 0)
        rows[name] = [[key, *row] for key, row in rows_of(step.store.export_state()).items()]
        dense[name] = [v.numpy() for v in step.dense.trainable]
        if communicator.rank == 0:
          lines = pathlib.Path(f'{cfg.run_dir}/metrics.jsonl').read_text().splitlines()
          events = [json.loads(line) for line in lines]
          values[name] = [e for e in events if e['event'] == 'eval'][-1]
          directory = os.path.join(cfg.run_dir, 'exports')
          stores[name] = MemoryStore()
          Publisher(directory, stores[name]).advance()
      parts = communicator.gather(rows['ranks'])
      if communicator.rank:
        continue
      found = {key: row for part in parts for key, *row in part}
      expected = {key: row for key, *row in rows['alone']}
      self.assertEqual(found.keys(), expected.keys())
      for key, (show, *_, factors) in expected.items():
        self.assertEqual(found[key][0], show)
        self.assertAllClose(found[key][-1], factors, rtol=1e-5, atol=1e-5, msg=f'variant {i}')
      self.assertAllClose(dense['ranks'], dense['alone'], rtol=1e-5, atol=1e-5)
      served, alone = (stores[name].view().items.items for name in ('ranks', 'alone'))
      self.assertAllEqual(served.texts, alone.texts)
      self.assertAllClose(served.vectors, alone.vectors, rtol=1e-5, atol=1e-5)
      of_lists = 'recall@3', 'ndcg@3', 'coverage@3', 'base_recall@3', 'base_ndcg@3'
      for name in (*of_lists, 'unknown_queries', 'queries', 'items', 'examples'):
        self.assertAllClose(values['ranks'][name], values['alone'][name], msg=f'variant {i} {name}')


if __name__ == '__main__':
  tf.test.main()
