"""Texts of features stay with a run whose logs are gone, where data.keep_texts asks for them."""

import collections
import pathlib
import tempfile

import numpy as np
import pytest
import tensorflow as tf

from ops.policy import Policy
from ops.row_store import FactorPart, RowStore, TableSpec
from ops.sharding import shard_of, shards_of
from tests.support import commands, small
from tests.support.threads import on_threads
from trainer import api
from trainer.data.conversion import prepare_pass
from trainer.data.features import hash_keys
from trainer.data.prepared import PreparedPass
from trainer.errors import ConfigError
from trainer.storage import checkpoint
from trainer.storage.kept_texts import KeptTexts, texts_of_slot

SLOTS = [{'name': 'user'}, {'name': 'tags', 'separator': '|'}, {'name': 'last', 'shares': 'tags'}]


def day(number, samples=400):
  """Records of a day: users u0 …, one or two tags, another set of tags for each two days."""
  rng = np.random.default_rng(number)
  for i in range(samples):
    tags = [f'tag ü{number // 2}.{n}' for n in rng.integers(12, size=rng.integers(1, 3))]
    yield f'{i % 2},u{rng.integers(40)}', tags, f'last{number // 2}.{rng.integers(3)}'


def path_of(run):
  return next(iter(checkpoint.candidates(f'{run.run_dir}/checkpoints')))


class KeptTextsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    data = {'train': [f'{self.folder}/day_*.csv'], 'label': 'click', 'slots': SLOTS}
    self.tree = small.tree(
      run_dir=f'{self.folder}/run',
      data=data | {'keep_texts': ['tags'], 'day_pattern': r'day_(\d+)'},
      lifecycle={'admission_count': 50, 'delete_after_unseen_days': 1},
      model={'interactions': ['linear', 'fm']},
    )

  def write(self, number):
    path = self.folder / f'day_{number}.csv'
    lines = [f'{begin},{"|".join(tags)},{last}\n' for begin, tags, last in day(number)]
    path.write_text('click,user,tags,last\n' + ''.join(lines))
    return path

  def shows(self, *numbers):
    shows = collections.Counter()
    for number in numbers:
      for _, tags, last in day(number):
        shows.update([*tags, last])
    return shows

  def test_texts_outlive_the_log(self):
    not_admitted = 0
    for number in range(5):  # each day is trained on by a job of its own
      path = self.write(number)
      run = api.fit(self.tree)
      path.unlink()
      table = run.features('tags').set_index('key')
      texts = sorted(self.shows(*range(number + 1)))
      keys = hash_keys(texts, run.cfg.slot_ids()['tags']).numpy()
      admitted = {k: t for k, t in zip(keys, texts) if k in table.index and table['admitted'][k]}
      not_admitted += len(table) - len(admitted)
      self.assertEqual(table['text'].dropna().to_dict(), admitted)
      self.assertCountEqual(run.embeddings('tags')['text'], admitted.values())
      (dump,) = checkpoint.read_texts(path_of(run), checkpoint.check(path_of(run)))
      self.assertLen(texts_of_slot(dump, 'tags'), len(admitted), 'evicted features have left')
    self.assertGreater(not_admitted, 0)
    self.assertBetween(len(admitted), 3, len(table) - 1)
    self.assertLess(len(admitted), len([t for t, n in self.shows(*range(5)).items() if n >= 50]))
    self.assertEqual(set(run.features('user')['text']), {None})

  @pytest.mark.long
  def test_an_export_with_texts_as_whole_numbers(self):
    self.write(0)
    run = api.fit(self.tree, ['data.keep_texts=[user, tags]', 'lifecycle.admission_count=1'])
    export = '-m', 'trainer.cli.export', '--run_dir', run.run_dir, '--kind', 'saved_model'
    done = commands.run(*export, '--integer_slots', 'user')
    self.assertEqual(done.returncode, 2)
    wanted = r"^error: --integer_slots: the texts of 'user' are no whole numbers, as 'u\d+'; wanted"
    self.assertRegex(done.stderr, wanted)
    told = []
    for slots, kind in (
      ('last', tf.int64),
      ('', tf.string),
      ('last', tf.int64),
      ('last', tf.int64),
    ):
      done = commands.run(*export, '--integer_slots', slots)
      told.append(done.stdout.splitlines())
      path = told[-1][1 if slots else 0].partition(':')[0]
      signature = tf.saved_model.load(path).signatures['serving_default']
      self.assertEqual(signature.structured_input_signature[1]['last'].dtype, kind)
    self.assertIn('saved_model/3:', told[2][1], 'no model with other inputs stays the newest')
    self.assertIn('saved_model/3:', told[3][1])
    self.assertRegex(told[0][0], '^--integer_slots: not checked for last, whose texts')
    done = commands.run(*export, '--integer_slots', 'nix')
    self.assertEqual(done.returncode, 2)
    self.assertRegex(done.stderr, "^error: integer slot 'nix': is not among data.slots; wanted one")
    done = commands.run(*export[:-1], 'base', '--integer_slots', 'last')
    told = 'error: --integer_slots: found with --kind base; wanted --kind saved_model\n'
    self.assertEqual((done.returncode, done.stderr), (2, told))

  def test_any_number_of_ranks(self):
    cfg = small.checked(self.tree)
    prepare_pass(cfg, str(self.write(0)), f'{self.folder}/prepared')
    prepared = PreparedPass(f'{self.folder}/prepared', cfg)
    shows = self.shows(0)
    texts = [text for text, n in shows.items() if n >= 30]
    ids = {'tags': cfg.slot_ids()['tags']}
    keys = hash_keys(texts, ids['tags']).numpy()

    def store():
      parts = TableSpec('default', (FactorPart('plain', 4),))
      return RowStore(Policy(admission='none'), tables=[parts], slot_table=[-1, 0, 0, 0])

    stores = [store() for _ in range(3)]
    for rank, own in enumerate(stores):
      some = keys[np.isin(shard_of(keys), shards_of(rank, 3))]
      own.observe(some, np.ones(len(some)), np.zeros(len(some)))

    def save(communicator):
      rank = communicator.rank
      kept = KeptTexts(ids, communicator, stores[rank])
      kept.learn(prepared)
      state = {'dense': {}, 'progress': {}, 'config_text': ''}
      checkpoints = checkpoint.Checkpoints(f'{self.folder}/ckpt', communicator)
      return checkpoints.save(1, store=stores[rank], **state, texts=kept)

    path = on_threads(3, save)[0]

    def restored(communicator):
      own = store()
      kept = KeptTexts(ids, communicator, own)
      checkpoint.restore(path, store=own, communicator=communicator, texts=kept)
      return list(map(bytes.decode, texts_of_slot(kept.dump(), 'tags').to_pylist()))

    for size in (1, 2, 3):
      found = on_threads(size, restored)
      self.assertCountEqual(sum(found, []), texts)
      self.assertGreater(min(map(len, found)), 0)

  def test_mistakes_are_told(self):
    def parse(*settings):
      return small.checked(self.tree, settings)

    with self.assertRaisesRegex(ConfigError, "'tag'; wanted a slot.*nearest.*'tags'"):
      parse('data.keep_texts=[tag]')
    with self.assertRaisesRegex(ConfigError, "found 'last'; wanted 'tags', which it shares"):
      parse('data.keep_texts=[last]')
    with self.assertRaisesRegex(ConfigError, "ps_async', whose workers may leave"):
      parse('sync.mode=ps_async')
    path, out = str(self.write(0)), f'{self.folder}/prepared'
    prepare_pass(parse('data.keep_texts=[]'), path, out)
    with self.assertLogs('absl', 'WARNING') as told:
      api.fit(self.tree, [f'data.train=[{out}]', 'data.format=prepared'])
    self.assertIn(f'{out} was prepared without it', ''.join(told.output))


if __name__ == '__main__':
  tf.test.main()
