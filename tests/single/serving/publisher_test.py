"""A store holds exactly the full export of its version, whatever restart or crash led to it."""

import contextlib
import errno
import gc
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import unittest
import weakref
from unittest import mock

import lmdb
import numpy as np
import tensorflow as tf

from campaigns.units import text_of as files_text
from tests.support import commands
from tests.support.damage import cut_scratch_files
from tests.support.exports import RedisServer, Run, contents, events
from tests.support.scorer import Client, served
from trainer import files
from trainer.errors import DataLoss, UserError
from trainer.serving import embedded_files, embedded_store, redis_store
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.redis_store import RedisStore
from trainer.serving.service import Service
from trainer.serving.stores import open_store
from trainer.serving.versioned_store import (
  Overtaken,
  Version,
  VersionGone,
  decode,
  encode,
)
from trainer.storage import chain
from trainer.storage.chain import RowExport, Rows

LIMIT = 800_000  # bytes of memory; a table of the tests takes 900,000 to 1,900,000


class Contract:
  """Tests of any store; `open()` opens the one of the test."""

  def setUp(self):
    super().setUp()
    self.folder = self.enter_context(tempfile.TemporaryDirectory())
    self.run_ = Run(os.path.join(self.folder, 'run'))

  def publisher(self, store):
    return Publisher(self.run_.directory, store)

  def check(self, store, sequence):
    number, bias, rows = contents(store, self.run_.keys.values())
    self.assertEqual(number, sequence)
    self.assertEqual(bias, sequence)
    self.assertEqual(rows, self.run_.versions[sequence])

  def export(self, kind):
    self.run_.train()
    return self.run_.export(kind)

  def test_every_version_equals_the_full_export(self):
    rng, store = np.random.default_rng(1), self.open()
    self.assertIsNone(self.publisher(store).advance())
    self.assertIsNone(store.view())
    for kind in events(rng, 25):
      sequence = self.export(kind)
      if rng.random() < 0.6:  # else several at once
        publisher = self.publisher(store)
        self.assertEqual(publisher.advance().version.sequence, sequence)
        self.check(store, sequence)
        self.assertIsNone(publisher.advance())
    self.assertTrue(any(len(row) == 1 for row in self.run_.rows.values()))

  def test_look_up_keeps_the_order_and_names_the_absent(self):
    store = self.open()
    self.export('base')
    self.publisher(store).advance()
    view = store.view()
    self.addCleanup(view.close)
    keys = np.array([*self.run_.rows, 17, 5 << 52], np.int64)
    np.random.default_rng(2).shuffle(keys)
    found = view.look_up(keys)
    ends = np.cumsum(found.counts)
    for i, key in enumerate(keys.tolist()):
      row = self.run_.rows.get(key, (0.0,))
      values = (found.linear[i], *found.factors[ends[i] - found.counts[i] : ends[i]])
      self.assertEqual(values, row)
      self.assertEqual(found.present[i], key in self.run_.rows)
    self.assertLen(view.look_up(keys[:0]).linear, 0)
    self.assertIn('interactions', view.config)

  def test_a_view_shows_its_version_or_nothing(self):
    store = self.open()
    first = self.export('base')
    self.publisher(store).advance()
    keys = np.array(sorted(self.run_.rows), np.int64)
    for kind in ('delta', 'base'):
      view = store.view()
      before = view.look_up(keys)
      self.assertEqual(view.version.sequence, first)
      first = self.export(kind)
      self.publisher(store).advance()
      try:
        for old, new in zip(before, view.look_up(keys)):
          self.assertAllEqual(old, new)
      except VersionGone:
        pass
      view.close()
      self.check(store, first)

  def test_cut_short_anywhere_it_is_as_before_and_goes_on(self):
    store = self.open()
    held = self.export('base')
    self.publisher(store).advance()
    self.export('delta')
    for kind in ('delta', 'base'):
      newest = self.export(kind)
      for at in range(3):
        calls = iter(range(at))

        def failing(file, calls=calls, read_rows=chain.read_rows):
          if next(calls, None) is None:
            raise KeyboardInterrupt
          return read_rows(file)

        with mock.patch.object(chain, 'read_rows', failing):
          try:
            self.publisher(store).advance()
            break
          except KeyboardInterrupt:
            self.check(store, held)
      self.publisher(store).advance()
      self.check(store, newest)
      held = newest

  def test_a_removed_or_damaged_export_changes_nothing(self):
    store = self.open()
    first = self.export('base')
    publisher = self.publisher(store)
    publisher.advance()
    middle = os.path.join(self.run_.directory, f'{self.export("delta"):06d}-delta')
    self.export('delta')
    files.remove(middle)
    self.assertIsNone(publisher.advance())
    self.check(store, first)
    last = os.path.join(self.run_.directory, f'{self.export("base"):06d}-base')
    name = next(n for n in os.listdir(last) if n.startswith('rows'))
    with open(os.path.join(last, name), 'r+b') as f:
      f.seek(200)
      f.write(b'?')
    self.assertIsNone(publisher.advance())
    self.check(store, first)
    newest = self.export('base')
    publisher.advance()
    self.check(store, newest)

  def test_another_run_in_the_same_place_begins_anew(self):
    store = self.open()
    for kind in ('base', 'delta'):
      self.export(kind)
    self.publisher(store).advance()
    shutil.rmtree(self.run_.directory)
    self.run_ = Run(os.path.join(self.folder, 'run'), seed=9)
    for kind in ('base', 'delta'):
      sequence = self.export(kind)
    applied = self.publisher(store).advance()
    self.check(store, sequence)
    self.assertEqual(applied.replaced.export, '000002-delta')
    self.export('base')
    self.assertIsNone(self.publisher(store).advance().replaced, 'of the same run')

  def test_rolled_back_it_waits_for_the_next_base(self):
    store = self.open()
    for kind in ('base', 'delta', 'delta', 'base', 'delta'):
      self.export(kind)
    publisher = self.publisher(store)
    publisher.advance()
    with self.assertRaisesRegex(UserError, r'^--rollback 9: no such version.*found 1, 2, 3, 4, 5$'):
      publisher.roll_back(9)
    for sequence in (4, 2):
      publisher.roll_back(sequence)
      self.check(store, sequence)
      self.export('delta')
      self.assertIsNone(publisher.advance())
      self.check(store, sequence)
    newest = self.export('base')
    publisher.advance()
    self.check(store, newest)
    publisher.roll_back(newest)  # withdraws nothing
    newest = self.export('delta')
    publisher.advance()
    self.check(store, newest)

  def test_of_two_publishers_one_is_told_that_it_came_late(self):
    store = self.open()
    path = os.path.join(self.run_.directory, f'{self.export("base"):06d}-base')
    self.publisher(store).advance()
    with self.assertRaises(Overtaken):
      store.apply([RowExport(path)], None)
    self.check(store, 1)

  def test_readers_see_whole_versions_while_one_is_written(self):
    store = self.open()
    self.export('base')
    self.publisher(store).advance()
    ended, wrong = threading.Event(), []

    def read():
      while not ended.is_set():
        try:
          number, bias, rows = contents(store, self.run_.keys.values())
        except VersionGone:
          continue
        if bias != number or rows != self.run_.versions[number]:
          wrong.append(number)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
      thread.start()
    for kind in events(np.random.default_rng(3), 12):
      self.export(kind)
      self.publisher(store).advance()
    ended.set()
    for thread in threads:
      thread.join()
    self.assertEmpty(wrong)


class EmbeddedStoreTest(Contract, tf.test.TestCase):
  def open(self):
    store = open_store(os.path.join(self.folder, 'store'), '--to', writable=True)
    self.addCleanup(store.close)
    return store

  def test_rows_that_a_reader_keeps_follow_the_versions(self):
    store, keys = self.open(), self.run_.keys.values()
    self.export('base')
    self.publisher(store).advance()
    contents(store, keys)
    for number in range(2, 6):
      self.check(store, self.publish_one(store))
      # A version without the list of changed keys, as after too many changes.
      with mock.patch.object(embedded_store, '_MOST_KEPT', -1):
        self.publish_one(store)
      if number % 2:
        contents(store, keys)
      self.check(store, self.publish_one(store))

  def test_a_reader_that_skips_versions_keeps_its_rows(self):
    store, keys = self.open(), self.run_.keys.values()
    self.export('base')
    self.publisher(store).advance()
    contents(store, keys)
    for skipped in (0, 1, 2, 8, 9):
      with self.subTest(skipped=skipped):
        for _ in range(skipped + 1):
          newest = self.publish_one(store)
        kept = int(store.view().row_store.size())
        self.assertEqual(kept > 0, skipped < 9)
        self.check(store, newest)

  def test_the_store_lists_the_changes_of_few_versions_whatever_their_numbers(self):
    store, keys = self.open(), self.run_.keys.values()
    self.export('base')
    self.publisher(store).advance()
    for skipped in (0, 8, 9):
      with self.subTest(skipped=skipped):
        contents(store, keys)
        for i in range(skipped + 1):
          for _ in range(i % 3):
            self.export('delta')  # which becomes a part of the next version
          newest = self.publish_one(store)
        kept = int(store.view().row_store.size())
        self.assertEqual(kept > 0, skipped < 9)
        self.check(store, newest)
    with store._files.begin() as transaction, transaction.cursor() as cursor:
      names = [name for name in cursor.iternext(values=False) if name.startswith(b'changed to')]
    self.assertLen(names, 9)

  def test_a_reader_keeps_its_rows_while_0_2_0_publishes(self):
    """It listed the changes of the newest version alone, under another name."""
    store, keys = self.open(), self.run_.keys.values()
    self.export('base')
    self.publisher(store).advance()
    contents(store, keys)
    newest = self.publish_one(store)
    name = b'changed to version %d' % newest
    with store._files.begin(write=True) as transaction:
      listed = embedded_store.unsealed(name, transaction.get(name))
      transaction.delete(name)
      transaction.put(b'changed', embedded_store.sealed(b'changed', listed))
    self.assertGreater(int(store.view().row_store.size()), 0)
    self.check(store, newest)
    self.check(store, self.publish_one(store))

  def publish_one(self, store):
    sequence = self.export('delta')
    self.publisher(store).advance()
    return sequence

  def test_few_rows_are_kept(self):
    with mock.patch.object(embedded_store, '_MOST_KEPT', 4):
      self.test_every_version_equals_the_full_export()

  def test_the_rows_kept_for_longest_go_first(self):
    store = self.open()
    self.export('base')
    self.publisher(store).advance()
    keys, view = np.array([*self.run_.rows], np.int64), store.view()
    self.addCleanup(view.close)
    with mock.patch.object(embedded_store, '_MOST_KEPT', 4):
      for i in (*range(len(keys)), 0):
        view.look_up(keys[i : i + 1])
    kept = view.row_store.pull(keys, train=False)[0].numpy() >= 0
    self.assertAllEqual(np.flatnonzero(kept), [0, *range(len(keys) - 3, len(keys))])

  def damaged(self, data, at):
    """Flips a bit of the store's file, in place."""
    with open(data, 'r+b') as f:
      f.seek(at)
      (byte,) = f.read(1)
      f.seek(at)
      f.write(bytes([byte ^ 1 << at % 8]))

  def test_no_bit_that_flipped_is_read(self):
    folder, rng = os.path.join(self.folder, 'store'), np.random.default_rng(5)
    store, refused = self.open(), 0
    for kind in ('base', 'delta'):
      newest = self.export(kind)
      self.publisher(store).advance()
    store.close()
    for trial in range(12):
      data = shutil.copytree(folder, f'{folder}{trial}') + '/data.mdb'
      if trial:  # in a row, its key or its place in the page
        row = np.array(list(self.run_.rows.values())[7 * trial], '<f4').tobytes()
        place = int(rng.integers(-18, len(row)))
        with open(data, 'rb') as f:
          found = re.finditer(re.escape(row), f.read())  # pages that are free may have it too
        for at in found:
          self.damaged(data, at.start() + place)
      else:
        os.truncate(data, os.path.getsize(data) * 2 // 3)
      reader = open_store(f'{folder}{trial}', '--store')
      try:
        self.check(reader, newest)
        continue
      except DataLoss as e:
        self.assertRegex(str(e), f'the store {folder}{trial}: is damaged: .*; ctr-publish writes')
        refused += 1
      with self.assertRaises(DataLoss):  # it is not read through again
        reader.version()
      with self.assertLogs(level='WARNING') as logged:
        store = open_store(f'{folder}{trial}', '--to', writable=True)
      self.addCleanup(store.close)
      self.assertRegex(logged.output[0], r'is damaged \(.*\); it is written anew from the exports')
      self.publisher(store).advance()
      self.check(store, newest)
      store.close()
      self.check(reader, newest)
    self.assertBetween(refused, 6, 12)

  def test_keys_without_a_version_are_damage(self):
    """As of a file that was cut within the page that had it."""
    for name in (b'version of format 9', b'key'):
      folder = os.path.join(self.folder, name.decode())
      with lmdb.open(folder, map_size=1 << 24) as env, env.begin(write=True) as transaction:
        transaction.put(name, embedded_files.sealed(name, b'value'))
      wanted = self.assertRaisesRegex(embedded_files.Damaged, 'it has keys and no version')
      with wanted if name == b'key' else contextlib.nullcontext():
        embedded_files.check(folder)

  def test_an_inner_page_that_changed_is_found(self):
    """Else a search is led to the wrong page, and a row that is there counts as absent."""
    rng, folder = np.random.default_rng(6), f'{self.folder}/inner'
    keys = sorted(rng.bytes(8) for _ in range(500))
    values = [embedded_files.sealed(key, rng.bytes(40)) for key in keys]
    with lmdb.open(folder, map_size=1 << 24) as env, env.begin(write=True) as transaction:
      transaction.cursor().putmulti(list(zip(keys, values)), append=True)
      version = embedded_files.VERSION
      transaction.put(version, embedded_files.sealed(version, b'{}'))
    embedded_files.check(folder)
    with open(f'{folder}/data.mdb', 'rb') as f:
      data = f.read()
    inner = [
      at.start()
      for key, value in zip(keys, values)
      for at in re.finditer(re.escape(key), data)
      if key[0] < 128 and not data.startswith(value, at.end())
    ]
    told = []
    for place in inner:
      with open(f'{folder}/data.mdb', 'r+b') as f:
        f.write(data[:place] + bytes([data[place] | 128]) + data[place + 1 :])
      try:
        embedded_files.check(folder)  # bytes that no page uses may change
      except embedded_files.Damaged as e:
        told.append(str(e))
    self.assertRegex(''.join(told), 'a search for key [0-9a-f]{16} does not find it')

  def test_a_row_that_is_damaged_while_it_is_served_is_refused_and_fetched_again(self):
    self.export('base')
    folder = os.path.join(self.folder, 'store')
    words = '-m', 'trainer.cli.publish', '--run_dir', f'{self.folder}/run', '--to', folder, '--once'

    def publish():
      self.assertEqual(commands.run(*words).returncode, 0)

    publish()
    reader = open_store(folder, '--store')
    views = [reader.view()]
    keys = np.array(list(self.run_.rows), np.int64)
    row = np.array(self.run_.rows[keys[3]], '<f4').tobytes()
    for damage in ('a flipped bit', 'cut'):
      with open(f'{folder}/data.mdb', 'rb') as f:
        at = f.read().index(row)
      if damage == 'cut':
        os.truncate(f'{folder}/data.mdb', at)
      else:
        self.damaged(f'{folder}/data.mdb', at + 5)
      with self.assertRaisesRegex(DataLoss, f'{folder}: is damaged: '):
        views[-1].look_up(keys)
      if damage == 'cut':
        with self.assertRaisesRegex(DataLoss, 'is damaged: data.mdb is cut short'):
          reader.version()
      else:
        views[-1].look_up(keys[:3])  # the others are served
      publish()
      self.assertFalse(os.path.exists(f'{folder}/damaged'))
      with self.assertRaises(DataLoss):
        views[-1].look_up(keys)
      self.assertFalse(os.path.exists(f'{folder}/damaged'))  # the new files have no damage
      views.append(reader.view())
      self.check(reader, 1)

  def test_a_key_that_is_damaged_while_it_is_served_does_not_count_as_absent(self):
    self.export('base')
    store = self.open()
    self.publisher(store).advance()
    store.close()
    folder = os.path.join(self.folder, 'store')
    keys = np.array(list(self.run_.rows), np.int64)
    with open(f'{folder}/data.mdb', 'rb') as f:
      data = f.read()
    for key in keys[::20]:
      row = np.array(self.run_.rows[key], '<f4').tobytes()
      reader = open_store(folder, '--store')
      view = reader.view()
      for at in re.finditer(re.escape(row), data):
        self.damaged(f'{folder}/data.mdb', at.start() - 4)
      with self.assertRaisesRegex(DataLoss, 'is damaged: '):
        view.look_up(keys)
      with open(f'{folder}/data.mdb', 'r+b') as f:
        f.write(data)
      self.assertTrue(view.look_up(keys).present.all())
      view.close()
      reader.close()

  def test_files_that_are_removed_while_they_are_open(self):
    folder, store = os.path.join(self.folder, 'store'), self.open()
    self.export('base')
    self.publisher(store).advance()
    for name in ('data.mdb', 'lock.mdb'):
      os.remove(f'{folder}/{name}')
      newest = self.export('delta')
      with self.assertLogs(level='WARNING') as logged:
        self.publisher(store).advance()
      self.assertIn(f'is damaged (its {name} was removed); it is written anew', logged.output[0])
      self.check(store, newest)
    store.close()
    self.check(open_store(folder, '--store'), newest)

  def test_a_lock_that_is_never_free(self):
    """Such as one of which a bit says that somebody holds it."""
    folder, store = os.path.join(self.folder, 'store'), self.open()
    self.export('base')
    program = (
      'import lmdb, sys\n'
      'taken = lmdb.open(sys.argv[1], map_size=1 << 24).begin(write=True)\n'
      'print("taken", flush=True)\n'
      'sys.stdin.read()\n'
    )
    read, held = os.pipe()
    self.addCleanup(os.close, held)
    with os.fdopen(read) as stdin:
      other = commands.start('-c', program, folder, stdin=stdin, stdout=subprocess.PIPE)
    self.addCleanup(other.kill)
    self.assertEqual(other.stdout.readline(), 'taken\n')
    publisher = self.publisher(store)
    with mock.patch.object(embedded_files, '_SECONDS_TO_WRITE', 0.2):
      self.assertIsNone(publisher.advance())
    self.assertIn('is damaged: its lock is never free', publisher.refused)
    publisher.advance()
    self.check(store, 1)

  def test_a_full_disk_is_no_damage(self):
    folder, store = os.path.join(self.folder, 'store'), self.open()
    self.export('base')
    self.publisher(store).advance()
    newest = self.export('delta')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    self.addCleanup(signal.signal, signal.SIGXFSZ, handler)
    for error in (lmdb.DiskError('mdb_txn_commit: ' + os.strerror(errno.ENOSPC)), None):
      patched = mock.patch.object(embedded_store, '_write', side_effect=error)
      with self.assertRaisesRegex(UserError, 'No space left|too large'):
        with patched if error else contextlib.nullcontext():
          try:
            if not error:
              resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            self.publisher(store).advance()
          finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
      self.assertFalse(os.path.exists(f'{folder}/damaged'))
      self.check(store, 1)
    self.publisher(store).advance()
    self.check(store, newest)

  def test_commands_outlive_files_that_are_harmed_while_they_are_open(self):
    run_dir, folder = f'{self.folder}/run', f'{self.folder}/store'
    publisher = commands.start(
      *('-m', 'trainer.cli.publish', '--run_dir', run_dir, '--to', folder), stdout=subprocess.PIPE
    )
    self.addCleanup(publisher.kill)
    newest = self.export('base')

    def published():
      while f' version {newest}: ' not in (line := publisher.stdout.readline()):
        self.assertNotEqual(line, '')

    published()
    log = self.enter_context(open(f'{self.folder}/log', 'w+', encoding='utf-8'))
    server = commands.start(
      *('-m', 'trainer.cli.serve', '--store', folder, '--port', '0'), stdout=log, stderr=log
    )
    self.addCleanup(server.kill)
    sample = {slot: [text] for slot, text in dict(self.run_.keys)}

    def served():
      while server.poll() is None:
        try:
          port = re.findall(r'serving http://127.0.0.1:(\d+)/', files_text(log.name))[-1]
          status, answer = Client(int(port)).predict({'inputs': sample})
        except (OSError, IndexError):
          continue
        if status == 503:
          continue
        self.assertEqual(status, 200)
        version = int(answer['model_version'])
        self.assertNear(answer['outputs'][0], self.run_.score(version, sample), 1e-6)
        if version == newest:
          return
      self.fail(files_text(log.name))

    served()
    for name, at in (('lock.mdb', 64), ('data.mdb', 0), ('data.mdb', None)):
      if at is None:
        os.truncate(f'{folder}/{name}', 8192)
      else:
        with open(f'{folder}/{name}', 'r+b') as f:
          f.seek(at)
          f.write(b'\xa5' * 64 if at else b'\xff' * 8192)
      newest = self.export('delta')
      published()
      served()
    for one in (publisher, server):
      one.terminate()
      self.assertEqual(one.wait(60), 0)
    self.assertNotIn('Traceback', files_text(log.name))

  def test_what_is_no_store(self):
    self.assertIsNone(open_store('/nowhere', '--store').version())  # it may come yet
    file = os.path.join(self.folder, 'file')
    with open(file, 'wb'):
      pass
    run_dir = os.path.join(self.folder, 'run')
    os.makedirs(run_dir)
    with open(os.path.join(run_dir, 'config.yaml'), 'wb'):
      pass
    for flag, writable in (('--to', True), ('--store', False)):
      with self.assertRaisesRegex(UserError, f'^{flag} {file}: is a file; wanted a directory'):
        open_store(file, flag, writable)
      with self.assertRaisesRegex(UserError, f'^{flag} {run_dir}: is the run_dir of a run; wanted'):
        open_store(run_dir, flag, writable)
    with self.assertRaisesRegex(UserError, '^--to s3://a: wanted a directory, redis://'):
      open_store('s3://a', '--to')

  def test_the_command_tells_what_it_did(self):
    run_dir, path = os.path.join(self.folder, 'run'), os.path.join(self.folder, 'store')
    os.makedirs(run_dir)

    def publish(status, told):
      flags = '--run_dir', run_dir, '--to', path, '--once'
      done = commands.run('-m', 'trainer.cli.publish', *flags)
      self.assertEqual(done.returncode, status, done.stderr)
      lines = (done.stderr if status else done.stdout).splitlines()
      self.assertRegex(lines[-1], told)
      self.assertLen(done.stdout.splitlines(), 0 if status else 1)

    publish(2, f'--run_dir {run_dir}: has no export yet; wanted one of export.base: true, or of')
    self.assertFalse(os.path.exists(path))
    newest = [self.export(kind) for kind in ('base', 'delta')][-1]
    time = r'^[-\d]{10} [:\d]{8} '
    publish(0, time + r'version 2: 000002-delta, \d+ rows and \d+ tombstones in')
    publish(0, f'{time}{run_dir}: nothing new; the store stays at version 2$')
    os.truncate(f'{run_dir}/exports/{self.export("delta"):06d}-delta/dense.npz', 9)
    publish(2, 'an export was not applied: .*000003-delta/dense.npz: has 9 bytes')
    self.check(self.open(), newest)
    self.run_ = Run(os.path.join(self.folder, 'other'), seed=9)
    self.export('base')
    flags = '--run_dir', f'{self.folder}/other', '--to', path, '--once'
    told = commands.run('-m', 'trainer.cli.publish', *flags).stdout
    held = f'held version 2 (000002-delta), which is no export that {self.folder}/other has now'
    wanted = f'{time}{path}: {re.escape(held)}; replaced. Runs that are all to be served need'
    self.assertRegex(told, wanted)

  def test_the_command_waits_for_a_run_dir(self):
    run_dir, path = os.path.join(self.folder, 'run'), os.path.join(self.folder, 'store')
    words = '-m', 'trainer.cli.publish', '--run_dir', run_dir, '--to', path
    done = commands.run(*words, '--once')
    self.assertEqual(done.returncode, 2)
    self.assertEqual(
      done.stderr, f'error: --run_dir {run_dir}: no such directory; wanted the run_dir of a run\n'
    )
    publisher = commands.start(*words, stdout=subprocess.PIPE)
    self.addCleanup(publisher.kill)
    told = publisher.stdout.readline()
    self.assertEndsWith(told, f' waiting: --run_dir {run_dir}: no such directory yet\n')
    self.export('base')
    self.assertIn(' version 1: 000001-base, ', publisher.stdout.readline())
    publisher.terminate()
    self.assertEqual(publisher.wait(60), 0)
    self.check(self.open(), 1)


class CanaryTest(tf.test.TestCase):
  def test_two_runs_are_served_side_by_side(self):
    """As docs/operations.md says: each has a store, a publisher and a scorer of its own."""
    folder = self.enter_context(tempfile.TemporaryDirectory())
    runs, publishers, services, clients = {}, {}, {}, {}
    for seed, name in enumerate(('stable', 'canary')):
      run = runs[name] = Run(f'{folder}/{name}', seed)
      run.train()
      run.export('base')
      store = open_store(f'{folder}/store_{name}', '--to', True)
      publishers[name] = Publisher(run.directory, store)
      publishers[name].advance()
      services[name] = Service(store, None)
      services[name].refresh()
      clients[name] = self.enter_context(served(services[name]))
    known = runs['stable'].rows
    sample = {slot: [text] for (slot, text), key in runs['stable'].keys.items() if key in known}

    def check(**versions):
      for name, client in clients.items():
        services[name].refresh()
        _, answer = client.predict({'inputs': sample})
        self.assertNear(answer['outputs'][0], runs[name].score(versions[name], sample), 1e-6)
        figures = client.ask('GET', '/metrics')[1].decode()
        self.assertIn(f'ctr_version {versions[name]}.0', figures)

    check(stable=1, canary=1)
    scores = [run.score(1, sample) for run in runs.values()]
    self.assertNotAllClose(*scores)
    runs['canary'].train()
    runs['canary'].export('delta')
    publishers['canary'].advance()
    check(stable=1, canary=2)
    publishers['canary'].roll_back(1)
    check(stable=1, canary=1)


class MemoryStoreTest(Contract, tf.test.TestCase):
  def open(self):
    return MemoryStore()

  def test_views_of_several_versions_at_a_time(self):
    store, views = self.open(), []
    for kind in ('base', 'delta', 'delta', 'delta', 'base', 'delta'):
      self.export(kind)
      self.publisher(store).advance()
      views.append(store.view())
    keys = self.run_.keys.values()
    for view in views:
      rows = self.run_.versions[view.version.sequence]
      found = view.look_up(np.array(list(keys), np.int64))
      self.assertAllEqual(found.present, [key in rows for key in keys])
      self.assertAllEqual(found.linear, [rows.get(key, (0.0,))[0] for key in keys])
      self.assertAllEqual(found.counts, [len(rows.get(key, (0.0,))) - 1 for key in keys])
      factors = np.concatenate([rows.get(key, (0.0,))[1:] for key in keys])
      self.assertAllEqual(found.factors, np.float32(factors))

  def test_rows_of_before_a_base_end_with_their_last_view(self):
    store = self.open()
    self.export('base')
    self.publisher(store).advance()
    view = store.view()
    rows = weakref.ref(view.rows)
    self.export('base')
    self.publisher(store).advance()
    gc.collect()
    self.assertIsNotNone(rows())
    del view
    gc.collect()
    self.assertIsNone(rows())

  def test_a_delta_that_failed_halfway_is_read_again_with_its_base(self):
    store = self.open()
    held = self.export('base')
    self.publisher(store).advance()
    view = store.view()
    newest = self.export('delta')
    with mock.patch.object(type(view.rows), 'put', side_effect=MemoryError):
      with self.assertRaises(MemoryError):
        self.publisher(store).advance()
    found = view.look_up(np.array(sorted(self.run_.versions[held]), np.int64))
    self.assertTrue(np.all(found.present))
    self.assertIsNone(store.view())
    self.publisher(store).advance()
    self.check(store, newest)

  def test_rows_of_another_layout_are_damage(self):
    store = self.open()
    self.export('base')
    publisher = self.publisher(store)
    publisher.advance()
    self.export('delta')

    def wider(file, read_rows=chain.read_rows):
      for rows in read_rows(file):
        yield rows._replace(counts=2 * rows.counts, factors=np.repeat(rows.factors, 2))

    with mock.patch.object(chain, 'read_rows', wider):
      self.assertIsNone(publisher.advance())
      with self.assertRaisesRegex(DataLoss, r'000002-delta: key \d+: found 6 factors in slot id 1'):
        store.apply([RowExport(os.path.join(self.run_.directory, '000002-delta'))], store.version())
    self.check(store, 1)


class LimitedMemoryStoreTest(MemoryStoreTest):
  """Of rows that lie on disk, most of them: all that is true of those in memory."""

  def open(self):
    return MemoryStore(memory_limit=LIMIT, cold_dir=self.folder)

  def test_each_base_keeps_the_limit(self):
    limited, in_memory = self.open(), MemoryStore()
    for kind in ('base', 'delta', 'base'):
      self.export(kind)
      for store in limited, in_memory:
        self.publisher(store).advance()
      found, all_in_memory = (int(s.view().row_store.bytes()) for s in (limited, in_memory))
      self.assertLess(found, 1.05 * LIMIT)
      self.assertGreater(all_in_memory, 1.15 * LIMIT)

  def test_after_damage_the_version_comes_anew(self):
    store = self.open()
    self.export('base')
    newest = self.export('delta')
    self.publisher(store).advance()
    view, keys = store.view(), np.array(sorted(self.run_.rows), np.int64)
    self.assertGreater(max(cut_scratch_files()), 0)
    with self.assertRaisesRegex(UserError, f'^--cold_dir: {self.folder}: cannot read the row of'):
      view.look_up(keys)
    self.assertIsNone(store.version())
    self.publisher(store).advance()
    self.check(store, newest)

  def test_a_limit_that_cannot_be_kept_is_one_line(self):
    with self.assertRaisesRegex(UserError, '^--cold_dir: found /proc, where no file can be made'):
      MemoryStore(memory_limit=LIMIT, cold_dir='/proc')
    store = MemoryStore(memory_limit=1e5, cold_dir=self.folder)
    self.export('base')
    with self.assertRaisesRegex(UserError, '^--memory_limit: found 100000 bytes, while the index'):
      self.publisher(store).advance()


@unittest.skipUnless(RedisServer.installed(), 'redis-server is not installed')
class RedisStoreTest(Contract, tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.server = RedisServer()

  @classmethod
  def tearDownClass(cls):
    cls.server.stop()
    super().tearDownClass()

  def setUp(self):
    super().setUp()
    self.client().flushall()

  def client(self):
    import redis

    client = redis.Redis.from_url(self.server.url)
    self.addCleanup(client.close)
    return client

  def open(self):
    store = open_store(self.server.url, '--to', writable=True)
    self.addCleanup(store.close)
    return store

  def test_nothing_of_earlier_bases_is_left(self):
    store, publisher = self.open(), None
    for kind in ('base', 'delta', 'base', 'base', 'delta'):
      self.export(kind)
      publisher = self.publisher(store)
      publisher.advance()
    rows = [name for name in self.client().keys() if name.startswith(b'r:')]
    self.assertLen(rows, len(self.run_.rows))
    self.assertLen(self.client().keys('ctr:*'), 3)

  def test_a_killed_server_comes_back_with_a_whole_version(self):
    store = self.open()
    for kind in ('base', 'delta'):
      held = self.export(kind)
      self.publisher(store).advance()
    self.server.kill()
    with self.assertRaisesRegex(UserError, '^the store unix:'):
      self.publisher(store).advance()
    self.server.start()
    self.check(store, held)
    newest = self.export('delta')
    self.publisher(store).advance()
    self.check(store, newest)

  def test_what_a_killed_publisher_left_makes_room_first(self):
    store, client = self.open(), self.client()
    held = self.export('base')
    self.publisher(store).advance()
    for number in range(5000):  # a base that was never completed
      client.set(b'r:' + (2).to_bytes(8, 'big') + b':' + number.to_bytes(8, 'big'), b'x' * 400)
    client.set('ctr:generation', 2)
    client.set('r:no row', 1)
    newest = self.export('base')
    # Another publisher may be at work on it.
    client.set('ctr:writer', 'other')
    with self.assertRaisesRegex(UserError, 'another publisher writes it, or was killed less than'):
      self.publisher(store).advance()
    self.check(store, held)
    client.delete('ctr:writer')
    client.config_set('maxmemory', client.info('memory')['used_memory'] - 1000)
    self.addCleanup(self.client().config_set, 'maxmemory', 0)
    with self.assertRaises(redis_store.redis.OutOfMemoryError):
      client.set('more', 1)
    self.publisher(store).advance()
    self.check(store, newest)
    self.assertEqual(client.get('ctr:generation'), b'3')
    self.assertEqual(client.get('r:no row'), b'1')
    self.assertLen(client.keys('r:*'), len(self.run_.rows) + 1)
    self.assertEqual(client.exists('ctr:writer'), 0)

  def test_a_full_redis_is_told_without_rows(self):
    store, client = self.open(), self.client()
    self.export('base')
    client.config_set('maxmemory', 1)
    self.addCleanup(self.client().config_set, 'maxmemory', 0)
    for _ in range(2):
      told = r"^the store unix:[^ ]*: command not allowed when used memory > 'maxmemory'\.?$"
      with self.assertRaisesRegex(UserError, told):
        self.publisher(store).advance()
    client.config_set('maxmemory', 0)

    def full(pipeline, *arguments, **settings):
      raise redis_store.redis.ResponseError('Command # 1 (MSET rows) of pipeline caused error: OOM')

    with mock.patch.object(redis_store, '_write', full):
      with self.assertRaisesRegex(UserError, '^the store unix:[^ ]*: OOM$'):
        self.publisher(store).advance()
    self.publisher(store).advance()
    self.check(store, 1)

  def test_a_base_that_another_publisher_took_over_is_given_up(self):
    store, client = self.open(), self.client()
    self.export('base')

    def taken_over(*arguments, write=redis_store._write, **settings):
      write(*arguments, **settings)
      client.set('ctr:writer', 'other')

    with mock.patch.object(redis_store, '_write', taken_over):
      self.assertIsNone(self.publisher(store).advance())
    self.assertIsNone(store.version())
    self.assertEqual(client.get('ctr:writer'), b'other')

  def test_keys_of_something_else_are_told(self):
    store, client = self.open(), self.client()
    self.export('base')
    foreign = 'found keys of something else .*wanted what ctr-publish writes, in a database that'
    for value in ('1', 'x', '{}', '[]', b'\xff', '{"generation": 1, "a": 2}'):
      client.set('ctr:version', value)
      for refused in (store.version, store.view, self.publisher(store).advance):
        with self.assertRaisesRegex(UserError, foreign):
          refused()
    client.delete('ctr:version')
    client.set('ctr:model:mine', 1)
    self.publisher(store).advance()
    self.check(store, 1)
    view = store.view()
    (row, *_) = client.keys('r:*')
    client.set(row, b'12345')
    with self.assertRaisesRegex(UserError, foreign):
      view.look_up(np.array(list(self.run_.rows), np.int64))
    client.delete('ctr:model:1')
    with self.assertRaisesRegex(UserError, foreign):
      store.view()

  def test_a_password_is_asked_for_and_taken_from_a_file(self):
    client, path = self.client(), os.path.join(self.folder, 'password')
    self.export('base')
    client.config_set('requirepass', 'open sesame')
    self.addCleanup(client.config_set, 'requirepass', '')
    for password, told in ((None, 'wants a password'), ('sesame', 'refuses the password')):
      store = open_store(self.server.url, '--to', True, password)
      self.addCleanup(store.close)
      with self.assertRaisesRegex(UserError, f': {told}; wanted --password_file$'):
        store.version()
    with open(path, 'w', encoding='utf-8') as f:
      f.write('open sesame\n')
    store = open_store(self.server.url, '--to', True, files.secret(path, '--password_file'))
    self.addCleanup(store.close)
    self.publisher(store).advance()
    self.check(store, 1)
    os.mkfifo(path + '2')
    for name, told in (('2', 'is a device, a pipe'), ('3', 'No such file')):
      with self.assertRaisesRegex(UserError, told):
        files.secret(path + name, '--password_file')


class OddRedisTest(tf.test.TestCase):
  def test_answers_that_are_not_those_of_redis_are_one_line(self):
    listener = self.enter_context(socket.create_server(('127.0.0.1', 0)))

    def answer(data):
      with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        with connection:
          while connection.recv(1 << 16):
            connection.sendall(5 * data)

    odd = b'+OK', b'$5\r\nhello', b':abc', b'*-7', b'$99999999999999999999', b'$x', b'*x', b'#x'
    for data in (*odd, b',abc', b'\xff\xfe', b'*1\r\n' * 3000 + b':1'):
      for ask in (RedisStore.version, RedisStore.view):
        threading.Thread(target=answer, args=(data + b'\r\n',), daemon=True).start()
        threading.Thread(target=answer, args=(data + b'\r\n',), daemon=True).start()
        store = RedisStore('redis://127.0.0.1:%d' % listener.getsockname()[1])
        with self.assertRaisesRegex(UserError, '^the store redis://127.0.0.1:.*: .'):
          ask(store)
        store.close()


class EncodingTest(tf.test.TestCase):
  def test_rows_are_read_as_they_were_written(self):
    counts = np.array([0, 3, 0, 2, 3])
    rows = Rows(
      np.arange(5), np.array([0, -1, 2, 0, 4], np.float32), counts, np.zeros(8, np.float32)
    )
    found = decode([None, *encode(rows), None])
    self.assertAllEqual(found.linear, [0, 0, -1, 2, 0, 4, 0])
    self.assertAllEqual(found.counts, [0, *counts, 0])
    self.assertAllEqual(found.present, [False] + [True] * 5 + [False])
    version = Version(3, 'a', 4, 5.5)
    self.assertEqual(Version.from_json(version.to_json()), version)


if __name__ == '__main__':
  tf.test.main()
