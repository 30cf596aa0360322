"""Checks that an LMDB store is whole.

LMDB has no checksums, and ends its process on some kinds of damage. So each value carries one, of
its key too, and the store is read through once in a process of its own before others open it: its
keys must ascend, be as many as LMDB counts, and be found by a search.
"""

import subprocess
import sys
import zlib

import lmdb

# A store of another format reads as an empty one, and is not written.
VERSION = b'version of format 3'
_CHECKSUM_BYTES = 4


class Damaged(Exception):
  """A value is not the one that was written."""


def sealed(name: bytes, value: bytes) -> bytes:
  """Returns a value with the checksum of its key and itself."""
  return value + zlib.crc32(value, zlib.crc32(name)).to_bytes(_CHECKSUM_BYTES, 'little')


def unsealed(name: bytes, data: bytes | None) -> bytes | None:
  """Returns the value that `sealed` was given; Damaged if it has changed since."""
  if data is None:
    return None
  value = data[:-_CHECKSUM_BYTES]
  if sealed(name, value) != data:
    raise Damaged(f'the value of key {name.hex()} is not the one that was written')
  return value


def check(path: str) -> None:
  """Checks a store in a process of its own; Damaged if it is not whole."""
  program = f'import sys; sys.path[:] = {sys.path}; from {__name__} import main; main()'
  words = [sys.executable, '-c', program, path]
  done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
  if done.returncode < 0:
    raise Damaged(f'signal {-done.returncode} ended a process that read it')
  if done.returncode:
    raise Damaged(done.stderr.strip().rpartition('\n')[2])


def _read_through(path: str) -> None:
  with (
    lmdb.open(path, readonly=True, create=False, max_readers=1024) as env,
    env.begin() as transaction,
    transaction.cursor() as cursor,
  ):
    if transaction.get(VERSION) is None:
      return
    count, before = 0, b''
    for name, data in cursor:
      if name <= before:
        raise Damaged(f'key {name.hex()} follows {before.hex()}')
      unsealed(name, data)
      if transaction.get(name) != data:  # the inner pages of the tree have no checksums
        raise Damaged(f'a search for key {name.hex()} does not find it')
      count, before = count + 1, name
    if count != (entries := transaction.stat()['entries']):
      raise Damaged(f'found {count} keys; wanted {entries}')


def main() -> None:
  """Checks the store that the command line names; ends with a line if it is not whole."""
  try:
    _read_through(sys.argv[1])
  except (Damaged, lmdb.Error, OverflowError, MemoryError) as e:
    sys.exit(f'{type(e).__name__}: {e}')
