"""The files of rows of a checkpoint, which `trainer.storage.checkpoint` describes."""

import json
import math
import operator
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from ops import chunks
from ops.chunks import Chunk
from ops.sharding import IN_TABLE_SHARD, SHARDS, owners_with, table_shard_of, within
from trainer import files
from trainer.errors import BadPass, DataLoss
from trainer.plain_data import Json


class Layer(NamedTuple):
  """Rows that one save wrote, or that were merged from several saves."""

  name: str  # the serial number of the save, or SERIAL-merged
  parts: int  # how many processes wrote them
  rows: int

  def files(self) -> list[str]:
    parts = [part_name(self.name, rank, self.parts) for rank in range(self.parts)]
    return [part + suffix for part in parts for suffix in ('.json', '.bin')]


def part_name(layer: str, rank: int, size: int) -> str:
  return f'rows-{layer}-{rank:05d}-of-{size:05d}'


def check_finite(step: int, name: str, array: np.ndarray) -> None:
  if array.dtype == np.uint16 and name.startswith('factors_'):  # bfloat16
    finite = ((array & 0x7F80) != 0x7F80).all()
  else:  # one sum tests all; it overflows only for values that are useless anyway
    with np.errstate(over='ignore', invalid='ignore'):
      finite = array.dtype.kind != 'f' or np.isfinite(array.sum())
  if not finite:
    raise BadPass(
      f'after step {step}, {name} holds values that are not finite, so nothing is saved; wanted '
      'lower learning rates (of train.dense_optimizer or sparse.tables), clip, or dense columns '
      'and weights without huge values'
    )


def _bytes_of(array: np.ndarray) -> memoryview:
  return memoryview(array.reshape(-1).view(np.uint8))


def write_rows(path: str, chunks_of_rows: Iterable[Chunk], shards: range, step: int) -> int:
  """Writes rows, as they are after a step, into the files `path`.bin and `path`.json.

  Returns how many. BadPass if a value is not finite, ValueError if a row is not of `shards`.
  """
  columns: list[Json] = []
  blocks: list[Json] = []
  with open(path + '.bin', 'wb') as f:
    for chunk in chunks_of_rows:
      if not within(chunk['key'], shards).all():
        raise ValueError(f'the store gave rows of other shards than {shards}, which it owns')
      first, last = table_shard_of(chunk['key'][[0, -1]]).tolist()
      columns = [[name, array.dtype.str, list(array.shape[1:])] for name, array in chunk.items()]
      crc = 0
      for name, array in chunk.items():
        check_finite(step, name, array)
        data = _bytes_of(np.ascontiguousarray(array))
        f.write(data)
        crc = zlib.crc32(data, crc)
      lengths = [len(array) for array in chunk.values()]
      blocks.append({'shards': [first, last], 'lengths': lengths, 'crc32': crc})
  files.write(path + '.json', files.to_json({'columns': columns, 'blocks': blocks}))
  return sum(block['lengths'][0] for block in blocks)


def read_rows(path: str, manifest: Mapping[str, Json], shards: range) -> Iterator[Chunk]:
  """Yields the blocks that may hold rows of some logical shards; they may hold others too."""
  layers = [Layer(*layer) for layer in manifest['layers']]
  newer = [np.zeros([0], np.int64)]  # for each layer, from the last: the keys of later ones
  for layer in layers[:0:-1]:
    own = [chunk['key'] for chunk in read_layer(path, manifest, layer, shards, most_columns=1)]
    keys = np.unique(np.concatenate([*own, newer[-1]]))
    newer.append(keys[np.argsort(table_shard_of(keys), kind='stable')])
  for layer, later in zip(layers, reversed(newer)):
    starts = np.searchsorted(table_shard_of(later), np.arange(SHARDS // IN_TABLE_SHARD + 1))
    for chunk in read_layer(path, manifest, layer, shards):
      if len(later):
        chunk = _without(chunk, later, starts, manifest['table_slots'])
      if len(chunk['key']):
        yield chunk


def _without(
  chunk: Chunk, keys: np.ndarray, starts: np.ndarray, table_slots: Mapping[str, Sequence[int]]
) -> Chunk:
  """Returns a chunk without the features `keys`, which are ordered by table shard, then by key.

  `starts` has the place in `keys` of each table shard's first key.
  """
  first, last = table_shard_of(chunk['key'][[0, -1]]).tolist()
  near = np.sort(keys[starts[first] : starts[last + 1]])
  places = np.minimum(np.searchsorted(near, chunk['key']), len(near) - 1)
  kept = near[places] != chunk['key'] if len(near) else np.ones([len(chunk['key'])], bool)
  return chunk if kept.all() else chunks.select(chunk, kept, table_slots)


def read_layer(
  path: str,
  manifest: Mapping[str, Json],
  layer: Layer,
  shards: range,
  most_columns: int | None = None,
) -> Iterator[Chunk]:
  """Yields those blocks of one save that may hold rows of some logical shards.

  With `most_columns`, it reads only so many columns, and does not check them.
  """
  for rank in owners_with(shards, layer.parts):
    part = part_name(layer.name, rank, layer.parts)
    index = json.loads(files.read_checked(path, part + '.json', manifest['files']))
    row_bytes = [
      np.dtype(dtype).itemsize * math.prod(row_shape) for _, dtype, row_shape in index['columns']
    ]
    start = 0
    with open(os.path.join(path, part + '.bin'), 'rb', buffering=0) as f:
      for block in index['blocks']:
        first, last = block['shards']
        if first * IN_TABLE_SHARD < shards.stop and shards.start < (last + 1) * IN_TABLE_SHARD:
          yield _read_block(f, start, index['columns'][:most_columns], block, most_columns is None)
        start += sum(map(operator.mul, block['lengths'], row_bytes))


def _read_block(
  file: BinaryIO, start: int, columns: Sequence[Json], block: Mapping[str, Json], checked: bool
) -> Chunk:
  """Returns {column: array} of the block that begins at byte `start` of a file."""
  chunk, crc = {}, 0
  file.seek(start)
  for (name, dtype, row_shape), length in zip(columns, block['lengths']):
    array = np.empty([length, *row_shape], np.dtype(dtype))
    data = left = _bytes_of(array)
    while left:  # an unbuffered read may return less
      n = file.readinto(left)
      if not n:
        raise DataLoss(f'{file.name}: ends {len(left)} bytes too early')
      left = left[n:]
    chunk[name], crc = array, zlib.crc32(data, crc)
  if checked and crc != block['crc32']:
    raise DataLoss(
      f'{file.name}: the checksum of its block at byte {start} is {crc:08x}; wanted '
      f'{block["crc32"]:08x}'
    )
  return chunk
