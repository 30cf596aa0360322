"""Makes the kit of tests/gpu small, cuts it into parts, and joins them. Needs Python alone.

parts.py thin LIBRARY…      keeps the GPU code of one architecture in libraries
parts.py split TAR FOLDER   writes FOLDER/part-NN and FOLDER/manifest.json
parts.py join FOLDER        writes the tar file that the parts hold to standard output
"""

import concurrent.futures
import hashlib
import json
import lzma
import mmap
import os
import pathlib
import struct
import sys
from collections.abc import Iterator

ARCHITECTURE = 90  # Hopper
LIMIT, CHUNK = 56 << 20, 16 << 20  # bytes of a part, and of what is compressed at a time
MANIFEST = 'manifest.json'
_FATBIN = struct.pack('<IHH', 0xBA55ED50, 1, 16)  # magic number, version, size of the header
_PTX, _CUBIN = 1, 2  # kinds of entries


def foreign(data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
  """Yields (offset, bytes) of GPU code in a library that ARCHITECTURE does not run.

  A fatbin holds a kernel compiled for several architectures. Machine code runs on the same major
  version only; without any, the driver compiles PTX of the same or an older version.
  """
  at = data.find(_FATBIN)
  while at >= 0:
    here, entries = at + 16, []
    end = here + struct.unpack_from('<Q', data, at + 8)[0]
    while here < end:
      kind, _, header, size = struct.unpack_from('<HHIQ', data, here)
      architecture = struct.unpack_from('<I', data, here + 28)[0]
      entries.append((kind, architecture, here + header, size))
      here += header + size
    kept = [e for e in entries if e[0] == _CUBIN and e[1] // 10 == ARCHITECTURE // 10]
    kept = kept or [e for e in entries if e[0] == _PTX and e[1] <= ARCHITECTURE]
    yield from (e[2:] for e in entries if e not in kept)
    at = data.find(_FATBIN, end)


def thin(path: str) -> None:
  """Overwrites foreign GPU code with zeros, which leaves all offsets as they are."""
  with open(path, 'r+b') as f, mmap.mmap(f.fileno(), 0) as data:
    for start, size in foreign(data):
      data[start : start + size] = bytes(size)


def split(source: str, folder: str) -> None:
  """Compresses a file in chunks, which are decompressed beside one another, into parts."""
  os.makedirs(folder, exist_ok=True)
  for old in pathlib.Path(folder).glob('part-*'):
    old.unlink()
  parts, content = [], []

  def write() -> None:
    data, name = b''.join(content), f'part-{len(parts):02d}'
    pathlib.Path(folder, name).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    parts.append({'name': name, 'sha256': digest, 'chunks': [len(c) for c in content]})
    content.clear()

  with open(source, 'rb') as f, concurrent.futures.ThreadPoolExecutor(2) as pool:
    while chunks := [c for _ in range(4) if (c := f.read(CHUNK))]:
      for compressed in pool.map(lzma.compress, chunks):
        if content and sum(map(len, content)) + len(compressed) > LIMIT:
          write()
        content.append(compressed)
  write()
  pathlib.Path(folder, MANIFEST).write_text(json.dumps({'parts': parts}, indent=1) + '\n')


def join(folder: str) -> Iterator[bytes]:
  """Yields what `split` read.

  Raises:
    SystemExit: if parts are missing or damaged; the message names them.
  """
  try:
    parts = json.loads(pathlib.Path(folder, MANIFEST).read_bytes())['parts']
  except FileNotFoundError as e:
    sys.exit(f'missing: {e.filename}')
  chunks, wrong = [], []
  for part in parts:
    path = pathlib.Path(folder, part['name'])
    data = path.read_bytes() if path.exists() else b''
    if hashlib.sha256(data).hexdigest() != part['sha256']:
      wrong.append(f'{part["name"]} ({"damaged" if path.exists() else "missing"})')
      continue
    for size in part['chunks']:
      chunks.append(data[:size])
      data = data[size:]
  if wrong:
    sys.exit(f'{len(wrong)} of {len(parts)} parts of {folder} are not there: {", ".join(wrong)}')
  with concurrent.futures.ThreadPoolExecutor() as pool:
    yield from pool.map(lzma.decompress, chunks)


def main(verb: str, *paths: str) -> None:
  if verb == 'thin':
    for path in paths:
      thin(path)
  elif verb == 'split':
    split(*paths)
  else:
    for chunk in join(*paths):
      sys.stdout.buffer.write(chunk)


if __name__ == '__main__':
  main(*sys.argv[1:])
