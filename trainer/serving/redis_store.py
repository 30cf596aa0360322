"""Keeps one version of a model in Redis, for servers on many machines.

    ctr:version             Version as JSON, with the generation of its rows
    ctr:model:GENERATION    hash: config (YAML), dense (.npz)
    ctr:generation          the number of the last generation
    r:GENERATION:KEY        a row, as versioned_store encodes it; both numbers 8 bytes, big-endian

A *base* is an export of all rows, a *delta* one of the rows that have changed since. A *generation*
is the number under which the rows of a base, and of the deltas after it, are stored. A base gets a
new one, which nobody reads before `ctr:version` names it; then the earlier generations are deleted.
Deltas change rows in place, in the same transaction that sets `ctr:version`. A reader fetches rows
and `ctr:version` in one command. If another version is there than the reader expects, the read
fails with VersionGone.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import redis
from redis.client import Pipeline

from trainer.files import from_npz, to_npz
from trainer.serving.versioned_store import (
  LookedUpRows,
  Overtaken,
  Version,
  VersionedStore,
  VersionGone,
  View,
  decode,
  encode,
  plain,
  plain_address,
)
from trainer.storage.chain import RowExport

_VERSION, _GENERATION, _MODEL, _ROW = b'ctr:version', b'ctr:generation', b'ctr:model:', b'r:'
_KEYS_AT_ONCE = 1000  # in one command
_COMMANDS_AT_ONCE = 20  # which are sent before their answers are awaited
_SECONDS_TO_ANSWER = 30
_Item = TypeVar('_Item')


def _prefix(generation: int) -> bytes:
  return _ROW + generation.to_bytes(8, 'big') + b':'


def _names(generation: int, keys: np.ndarray) -> list[bytes]:
  prefix = _prefix(generation)
  return [prefix + key for key in keys.astype('>i8').view('V8').tolist()]


def _parse(data: bytes | None) -> tuple[Version | None, int]:
  """Decodes the value that Redis has for `ctr:version`.

  Returns:
    The version that is served, and the generation of its rows; None and 0 if `data` is None.
  """
  if data is None:
    return None, 0
  fields = json.loads(data)
  generation = fields.pop('generation')
  return Version(**fields), generation


class RedisStore(VersionedStore):
  """Keeps one version of a model in a database of Redis that nothing else uses.

  Args:
    url: redis://HOST:PORT[/DATABASE].
  Raises:
    UserError: from every method, if Redis cannot be reached or refuses.
  """

  def __init__(self, url: str):
    self._what = f'the store {plain_address(url)}'
    with plain(self._what, ValueError):
      self._redis = redis.Redis.from_url(
        url, socket_timeout=_SECONDS_TO_ANSWER, socket_connect_timeout=5
      )

  def version(self) -> Version | None:
    with plain(self._what, redis.RedisError):
      return _parse(self._redis.get(_VERSION))[0]

  def _apply(self, exports: Sequence[RowExport], expected: Version | None, new: Version) -> None:
    config = exports[-1].config()
    with plain(self._what, redis.RedisError), self._redis.pipeline() as transaction:
      transaction.watch(_VERSION)
      held, generation = _parse(transaction.get(_VERSION))
      if held != expected:
        raise Overtaken
      begins = exports[0].begins_chain
      if begins:
        generation = int(self._redis.incr(_GENERATION))
        with self._redis.pipeline(transaction=False) as pipeline:
          for export in exports:
            _write(pipeline, generation, export, at_once=_COMMANDS_AT_ONCE)
      transaction.multi()
      if not begins:
        for export in exports:
          _write(transaction, generation, export)
      dense = to_npz(exports[-1].dense())
      transaction.hset(
        _MODEL + str(generation).encode(), mapping={'config': config, 'dense': dense}
      )
      fields = new._asdict() | {'generation': generation}
      transaction.set(_VERSION, json.dumps(fields, sort_keys=True))
      try:
        transaction.execute()
      except redis.WatchError:
        raise Overtaken from None
      if begins:
        self._sweep(generation)

  def _sweep(self, generation: int) -> None:
    """Deletes the rows of all earlier generations, including bases that were never completed."""
    current = _prefix(generation)
    with self._redis.pipeline(transaction=False) as pipeline:
      for names in _batches(self._redis.scan_iter(_ROW + b'*', count=_KEYS_AT_ONCE)):
        old = [name for name in names if name < current]
        if old:
          pipeline.unlink(*old)
        if len(pipeline) >= _COMMANDS_AT_ONCE:
          pipeline.execute()
      for name in self._redis.scan_iter(_MODEL + b'*', count=_KEYS_AT_ONCE):
        if int(name[len(_MODEL) :]) < generation:
          pipeline.unlink(name)
      pipeline.execute()

  def view(self) -> View | None:
    with plain(self._what, redis.RedisError), self._redis.pipeline() as transaction:
      while True:
        data = self._redis.get(_VERSION)
        if data is None:
          return None
        _, generation = _parse(data)
        transaction.get(_VERSION)
        transaction.hgetall(_MODEL + str(generation).encode())
        still, model = transaction.execute()
        if still == data:  # else the version has changed between the two reads
          return _RedisView(self._redis, self._what, data, model)

  def close(self) -> None:
    self._redis.close()


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
  iterator = iter(items)
  while batch := list(itertools.islice(iterator, _KEYS_AT_ONCE)):
    yield batch


def _write(
  pipeline: Pipeline, generation: int, export: RowExport, at_once: int | None = None
) -> None:
  """Puts an export's changes into a pipeline.

  Args:
    pipeline: a transaction, or a pipeline without one.
    at_once: execute the pipeline each time it has this many commands; None: do not execute it.
  """

  def sent() -> None:
    if at_once and len(pipeline) >= at_once:
      pipeline.execute()

  for names in _batches(_names(generation, export.tombstones())):
    pipeline.unlink(*names)
    sent()
  for rows in export.rows():
    for batch in _batches(zip(_names(generation, rows.key), encode(rows))):
      pipeline.mset(dict(batch))
      sent()
  if at_once:
    pipeline.execute()


class _RedisView(View):
  """Reads one version, as long as Redis holds it."""

  def __init__(self, client: redis.Redis, what: str, data: bytes, model: dict[bytes, bytes]):
    self._redis, self._what, self._data = client, what, data
    version, self._generation = _parse(data)
    super().__init__(version, model[b'config'].decode(), from_npz(model[b'dense']))

  def look_up(self, keys: np.ndarray) -> LookedUpRows:
    with plain(self._what, redis.RedisError):
      data, *values = self._redis.mget([_VERSION, *_names(self._generation, keys)])
    if data != self._data:
      raise VersionGone
    return decode(values)
