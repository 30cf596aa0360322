"""What the release before has left is read, served and gone on with, as docs/upgrading.md promises.

tests/support/kept_state.py, run at that release, has written tests/data/state-0.2.0.tar.xz and the
numbers in it.
"""

import json
import pathlib
import re
import shlex
import subprocess
import tempfile
import zlib

import tensorflow as tf

from tests.support import commands, kept_state
from tests.support.scorer import served
from tests.support.topics import Cluster
from trainer import config, files
from trainer.errors import ConfigError, UserError
from trainer.serving.service import Service
from trainer.serving.stores import open_store

TESTS = pathlib.Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / 'docs' / 'upgrading.md'
# A run in single precision, on another processor or TensorFlow, after some hundred steps.
READ, GONE_ON = {'rtol': 1e-4, 'atol': 1e-6}, {'rtol': 2e-3, 'atol': 1e-5}
# Writes a store as another version might, or prints what it has written.
OTHER_STORE = """
import lmdb, sys
with lmdb.open(sys.argv[1], map_size=1 << 30) as env, env.begin(write=True) as transaction:
  if len(sys.argv) > 2:
    print(transaction.get(b'version of format 9').decode())
  else:
    transaction.drop(env.open_db(txn=transaction), delete=False)
    transaction.put(b'version of format 9', b'something')
"""


def of_release(found, wanted):
  """Returns of `found` what the release before had too; a later one may measure and keep more."""
  if not isinstance(wanted, dict):
    return found
  return {name: of_release(found[name], value) for name, value in wanted.items()}


class UpgradeTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    kept_state.unpack(kept_state.ARCHIVE, self.folder)
    self.numbers = json.loads(pathlib.Path(f'{self.folder}/numbers.json').read_text())

  def assert_same(self, found, wanted, **tolerance):
    found = json.loads(json.dumps(found))
    rankings, found = found['retrieval'], of_release(found, wanted)
    for name in wanted:
      with self.subTest(name):
        if name in ('exports', 'progress'):
          self.assertEqual(found[name], wanted[name])
        elif name == 'recommended':
          items, scores = ([[one[key] for one in x[name]] for x in (found, wanted)]
                           for key in ('items', 'scores'))  # fmt: skip
          self.assertEqual(*items)
          self.assertAllClose(*scores, **tolerance)
        elif name == 'retrieval':
          # 0.2.0 found items, those of the lowest keys, for queries of which it knew nothing.
          for key, value in wanted[name].items():
            most = 1 if key.startswith('coverage') else rankings['unknown_queries']
            self.assertGreater(rankings['unknown_queries'], 0)
            self.assertBetween(value - rankings[key], -1e-5, most if '@' in key else 1e-5, key)
        else:
          self.assertAllClose(found[name], wanted[name], **tolerance)

  def test_it_is_read_and_served(self):
    before = contents(self.folder)
    self.assert_same(kept_state.read(self.folder, commands.start), self.numbers['read'], **READ)
    after = contents(self.folder)
    self.assertEqual({name: after.get(name) for name in before}, before)

  def test_it_is_gone_on_with(self):
    cluster = Cluster()
    self.addCleanup(cluster.close)
    kept_state.send(self.folder, cluster, 0, kept_state.SENT)
    passes = pathlib.Path(self.folder, 'epochs/prepared')
    before = {str(path): path.stat().st_ino for path in passes.glob('*/*')}
    found = kept_state.go_on(self.folder, commands.start, cluster)
    self.assert_same(found, self.numbers['gone on'], **GONE_ON)
    # No pass was converted again.
    self.assertLen(before, 3)
    self.assertEqual({str(path): path.stat().st_ino for path in passes.glob('*/*')}, before)

  def test_another_format_is_told_before_all_else(self):
    """Even where the config has a key that this version does not know."""
    for path in map(str, pathlib.Path(self.folder).glob('days/checkpoints/ckpt-*')):
      write_manifest(path, kept_state.manifest_of(path) | {'format': 7})
    path = pathlib.Path(self.folder, 'days/config.yaml')
    path.write_text(stamped(path.read_text().partition('\n')[2] + 'new_section: 1\n'))
    before = contents(self.folder)
    told = r'days/checkpoints/ckpt-\d+(-2)?: is of format 7; wanted 8: let its version train'
    for command, *flags in (
      ('doctor', '--run_dir', 'days'),
      ('resolve', '--run_dir', 'days'),
      ('run', '--config', 'days.yaml', '--dry_run'),
      ('run', '--config', 'days.yaml'),
      ('run', '--config', 'days.yaml', '--run_dir', 'other', '--init_from', 'days'),
      ('predict', '--run_dir', 'days', '--data', 'log/test.csv'),
      ('inspect', '--run_dir', 'days'),
    ):
      with self.subTest(command=command, flags=flags):
        said = kept_state.run(self.folder, commands.start, command, *flags, status=2)
        self.assertRegex(said, told)
        self.assertNotIn('new_section', said)
    after = contents(self.folder)
    self.assertEqual({name: after.get(name) for name in before}, before)

  def test_what_only_a_newer_version_has(self):
    for path in map(str, pathlib.Path(self.folder).glob('days/checkpoints/ckpt-*')):
      progress = pathlib.Path(path, 'progress.json')
      progress.write_bytes(files.to_json(json.loads(progress.read_text()) | {'later': 1}))
      manifest = kept_state.manifest_of(path)
      manifest['files'] |= {'progress.json': files.entries(path)['progress.json']}
      write_manifest(path, manifest)
    flags = '--run_dir', 'days', '--data', 'log/test.csv'
    said = kept_state.run(self.folder, commands.start, 'predict', *flags, status=2)
    self.assertRegex(said, "days/checkpoints/ckpt-[-0-9]+: has 'later', of a newer version; wanted")

  def test_keys_that_went(self):
    """A run's own config may have them, a user's may not; 0b206e5 is older than 0.2.0."""
    text = (TESTS / 'data' / 'config-0b206e5.yaml').read_text()
    with self.assertLogs(level='WARNING') as logs:
      cfg = config.parse(text, 'a run')
      self.assertEqual(config.parse(text, 'a run'), cfg)
    (told,) = logs.output
    self.assertRegex(told, 'a run: drops sync.dense_allreduce; here that is no key, because Horov')
    self.assertEqual(cfg.sync, config.Sync())
    given = text.partition('\n')[2]
    wanted = "a file: unknown key 'sync.dense_allreduce'; here that is no key, because Horovod"
    with self.assertRaisesRegex(ConfigError, wanted):
      config.parse(given, 'a file')
    with self.assertRaisesRegex(ConfigError, "unknown key 'sync.dense_allreduces'"):
      config.parse(stamped(given.replace('dense_allreduce', 'dense_allreduces')), 'a run')

  def test_a_store_of_another_format(self):
    """A server keeps what it serves, and a publisher leaves the store as it is."""
    path, wanted = f'{self.folder}/days_store', self.numbers['read']['served of the store']
    service = Service(open_store(path, '--store'))
    service.refresh()
    other = commands.run('-c', OTHER_STORE, path)
    self.assertEqual(other.returncode, 0, other.stderr)
    with self.assertRaisesRegex(UserError, 'the store holds no version that this server reads'):
      service.refresh()
    words = '-m', 'trainer.cli.serve', '--store', 'days_store', '--port', '0'
    kept_state.until(
      'days_store: is of another format; wanted', commands.start, self.folder, *words
    )
    with served(service) as client:
      self.assertEqual(client.ask('GET', '/healthz')[0], 200)
      samples = kept_state.records(f'{self.folder}/log/test.csv')
      self.assertAllClose(kept_state.ask(client.port, samples), wanted, **READ)
    flags = '--run_dir', 'days', '--to', 'days_store', '--once'
    told = kept_state.run(self.folder, commands.start, 'publish', *flags, status=2)
    self.assertRegex(told, 'the store days_store: is of another format, which other servers may')
    self.assertEqual(commands.run('-c', OTHER_STORE, path, 'again').stdout, 'something\n')

  def test_the_commands_of_the_page(self):
    """Each is run in the page's order, on a run of the release before."""
    for source, name in {
      'days.yaml': 'ads.yaml',
      'days': 'runs/ads',
      'days_store': 'stores/ads',
    }.items():
      pathlib.Path(self.folder, name).parent.mkdir(exist_ok=True)
      pathlib.Path(self.folder, source).rename(f'{self.folder}/{name}')
    blocks = re.findall('```bash\n(.*?)```', DOCUMENT.read_text(), re.DOTALL)
    lines = [line.strip() for block in blocks for line in re.sub('(?m)^ +', '', block).splitlines()]
    self.assertLen(lines, 10)
    # What a command that does not end says when it has done what the page wants of it.
    until = {'serve': 'is served', 'train': 'waiting for a pass'}
    for line in lines:
      with self.subTest(line):
        name, *flags = shlex.split(re.sub(r'850\d', '0', line))  # any port
        name = name.removeprefix('ctr-')
        if name in ('cp', 'mv'):
          subprocess.run([name, *flags], cwd=self.folder, check=True)
        elif name == 'doctor':
          said = kept_state.run(self.folder, commands.start, name, *flags)
          self.assertRegex(said, '(?m)^ok +run  ')
        elif name == 'publish':
          said = kept_state.run(self.folder, commands.start, name, *flags, '--once')
          self.assertRegex(said, r'stays at version 4\n|version \d+: ')
        else:
          words = '-m', commands.module('run' if name == 'train' else name), *flags
          kept_state.until(until[name], commands.start, self.folder, *words)


def write_manifest(path, manifest) -> None:
  data = files.to_json(manifest)
  pathlib.Path(path, files.MANIFEST).write_bytes(data)
  pathlib.Path(path, files.DONE).write_bytes(files.to_json({'manifest_crc32': zlib.crc32(data)}))


def stamped(text: str) -> str:
  """Returns the text of a config as a run writes it."""
  return f'# crc32 of what follows: {zlib.crc32(text.encode()):08x}\n{text}'


def contents(folder: str) -> dict[str, bytes]:
  """Returns the bytes of all files, by path, but not those that readers may write."""
  paths = [path for path in pathlib.Path(folder).rglob('*') if path.is_file()]
  return {str(path): path.read_bytes() for path in paths if path.name != 'lock.mdb'}


if __name__ == '__main__':
  tf.test.main()
