"""Writes that count as a whole or not at all: temporary name, fsync, rename, then one DONE marker.

A directory without DONE does not count, whatever lies in it. Everything is flushed to the disk
before DONE appears, so a crash or
a power cut at any moment leaves the old directories as they were.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping

from trainer.errors import DataLoss

DONE = 'DONE'
MANIFEST = 'MANIFEST.json'
UNFINISHED = '.unfinished'  # ends the temporary name


def sync_directory(path):
  """Makes the names in a directory durable."""
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def write_synced(path, data):
  """Writes bytes to a file and waits until they are on the disk."""
  with open(path, 'wb') as f:
    f.write(data)
    f.flush()
    os.fsync(f.fileno())


def to_json(value):
  """Compact JSON bytes, the same for the same value."""
  return json.dumps(value, sort_keys=True, separators=(',', ':')).encode()


def crc32_of(path):
  """CRC-32 of a file's bytes, 4 MiB at a time."""
  crc = 0
  with open(path, 'rb') as f:
    while data := f.read(4 << 20):
      crc = zlib.crc32(data, crc)
  return crc


def publish(unfinished, final, manifest):
  """Gives a directory its final name and marks it DONE; process 0 calls it once everything in it is
  written and synced.

  Args:
    unfinished: the directory under its temporary name.
    final: its final name; whatever unfinished thing lies there is removed.
    manifest: dict; MANIFEST.json. DONE holds its checksum.
  """
  data = to_json(manifest)
  write_synced(os.path.join(unfinished, MANIFEST), data)
  for folder, _, _ in os.walk(unfinished):
    sync_directory(folder)
  shutil.rmtree(final, ignore_errors=True)
  os.rename(unfinished, final)
  sync_directory(os.path.dirname(final))
  marker = os.path.join(final, DONE)
  write_synced(marker + UNFINISHED, to_json({'manifest_crc32': zlib.crc32(data)}))
  os.rename(marker + UNFINISHED, marker)
  sync_directory(final)


def is_done(path):
  return os.path.isfile(os.path.join(path, DONE))


def read_manifest(path):
  """The MANIFEST.json of a directory that is DONE. Raises: DataLoss naming the file."""

  def load(name, crc=None):
    file = os.path.join(path, name)
    try:
      with open(file, 'rb') as f:
        data = f.read()
      if crc is not None and zlib.crc32(data) != crc:
        raise DataLoss(f'{file}: its checksum is {zlib.crc32(data):08x}; wanted {crc:08x}')
      value = json.loads(data)
      return value if crc is not None else int(value['manifest_crc32'])
    except FileNotFoundError:
      raise DataLoss(f'{file}: is missing; the directory does not count') from None
    except (ValueError, KeyError, TypeError):
      raise DataLoss(f'{file}: is damaged; found {data[:40]!r}') from None

  return load(MANIFEST, load(DONE))


def check_listed(path, files):
  """Checks that a directory holds exactly its manifest's files, each of its size.

  Args:
    files: dict of relative path -> {'bytes': n, …}.
  Raises: DataLoss naming the first file that is missing, cut short or foreign.
  """
  found = {
    os.path.relpath(os.path.join(folder, name), path)
    for folder, _, names in os.walk(path)
    for name in names
  }
  for name in sorted(files.keys() - found):
    raise DataLoss(f'{os.path.join(path, name)}: is missing')
  for name in sorted(found - files.keys() - {DONE, MANIFEST}):
    raise DataLoss(
      f'{os.path.join(path, name)}: is not of this directory; its {MANIFEST} does not list it'
    )
  for name, entry in sorted(files.items()):
    size = os.path.getsize(os.path.join(path, name))
    if size != entry['bytes']:
      raise DataLoss(f'{os.path.join(path, name)}: has {size} bytes; wanted {entry["bytes"]}')


def check_crc32(path: str, name: str, files: Mapping[str, Mapping[str, int]]) -> None:
  """Checks one of the manifest's files, which may be larger than memory.

  Raises:
    DataLoss: where its bytes are not those that were written.
  """
  file = os.path.join(path, name)
  found, wanted = crc32_of(file), files[name]['crc32']
  if found != wanted:
    raise DataLoss(f'{file}: its checksum is {found:08x}; wanted {wanted:08x}')


def read_checked(path, name, files):
  """The bytes of one of the manifest's files.

  Raises: DataLoss where they are not those that were written.
  """
  with open(os.path.join(path, name), 'rb') as f:
    data = f.read()
  if zlib.crc32(data) != files[name]['crc32']:
    raise DataLoss(
      f'{os.path.join(path, name)}: its checksum is {zlib.crc32(data):08x}; wanted '
      f'{files[name]["crc32"]:08x}'
    )
  return data


def remove(path):
  """Removes a directory so that no moment of it counts: DONE goes first."""
  with contextlib.suppress(FileNotFoundError):
    os.remove(os.path.join(path, DONE))
  shutil.rmtree(path, ignore_errors=True)
