"""Keeps one version of a model in Redis, for servers on many machines.

    ctr:version             Version as JSON, with the generation of its rows
    ctr:model:GENERATION    hash: config (YAML), dense (.npz)
    ctr:generation          the number of the last generation
    ctr:writer              names the publisher that writes a base; expires after _SECONDS_TO_WRITE
    r:GENERATION:KEY        a row, as versioned_store encodes it; both numbers 8 bytes, big-endian

The rows of a base and of the deltas after it are stored under a number, their *generation*. A base
gets a new one, which nobody reads before `ctr:version` names it; then earlier ones are deleted. One
never completed, because its publisher was killed or Redis had no memory left, is deleted before the
next base is written. One publisher at a time writes a base. Deltas change rows in place, in the
transaction that sets `ctr:version`. A reader fetches rows and `ctr:version` in one command; if that
is not the version it expects, the read fails with VersionGone.
"""

import contextlib
import itertools
import json
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.retry import Retry

from trainer.errors import UserError, fit_to_print, one_line
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
)
from trainer.storage.chain import RowExport

_VERSION, _GENERATION, _MODEL, _ROW = b'ctr:version', b'ctr:generation', b'ctr:model:', b'r:'
_WRITER = b'ctr:writer'
_KEYS_AT_ONCE = 1000  # in one command
_COMMANDS_AT_ONCE = 20  # which are sent before their answers are awaited
_SECONDS_TO_ANSWER = 30
_SECONDS_TO_WRITE = 15  # some commands of a base, before the publisher counts as killed
_Item = TypeVar('_Item')


@contextlib.contextmanager
def _plain(what: str) -> Iterator[None]:
  """Turns errors of Redis into a UserError."""
  try:
    yield
  except redis.AuthenticationError as e:
    found = 'refuses the password' if 'invalid' in str(e) else 'wants a password'
    raise UserError(f'{what}: {found}; wanted --password_file') from e
  except redis.RedisError as e:
    # Of a command among several, the message has the rows.
    text = ' '.join(str(e).rpartition(' of pipeline caused error: ')[2].split())
    wanted = '; wanted Redis with TLS, or redis://' if 'rediss://' in what else ''
    raise UserError(f'{what}: {text}{wanted}') from e
  except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
    raise UserError(f'{what}: answers as no Redis does ({one_line(e)})') from e


@contextlib.contextmanager
def _ours(what: str) -> Iterator[None]:
  """Turns errors of values that ctr-publish did not write into a UserError."""
  try:
    yield
  except (AttributeError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as e:
    wanted = 'wanted what ctr-publish writes, in a database that nothing else uses'
    raise UserError(f'{what}: found keys of something else ({one_line(e)}); {wanted}') from e


def _prefix(generation: int) -> bytes:
  return _ROW + generation.to_bytes(8, 'big') + b':'


def _generation(name: bytes) -> int:
  """Returns the generation of a row by its name; 0, which no row has, if it is no row's name."""
  prefix, is_row = name[: len(_prefix(0))], len(name) == len(_prefix(0)) + 8
  generation = int.from_bytes(prefix[len(_ROW) : -1], 'big')
  return generation if is_row and prefix == _prefix(generation) else 0


def _names(generation: int, keys: np.ndarray) -> list[bytes]:
  prefix = _prefix(generation)
  return [prefix + key for key in keys.astype('>i8').view('V8').tolist()]


def _parse(what: str, data: bytes | None) -> tuple[Version | None, int]:
  """Returns the version in a value of `ctr:version` and its rows' generation, or None and 0."""
  if data is None:
    return None, 0
  with _ours(what):
    fields = json.loads(data)
    generation = int(fields.pop('generation'))
    return Version(**fields), generation


class RedisStore(VersionedStore):
  """Keeps one version of a model in a database of Redis that nothing else uses.

  `url` is redis://HOST:PORT[/DATABASE]. UserError, from any method, if Redis is silent or refuses.
  """

  def __init__(self, url: str, password: str | None = None):
    self._what = f'the store {fit_to_print(url)}'
    with plain(self._what, ValueError):
      self._redis = redis.Redis.from_url(
        url,
        password=password,
        socket_timeout=_SECONDS_TO_ANSWER,
        socket_connect_timeout=5,
        # A connection may have ended since its last use; who waits for an answer has waited enough.
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
      )

  def version(self) -> Version | None:
    with _plain(self._what):
      return _parse(self._what, self._redis.get(_VERSION))[0]

  def _apply(self, exports: Sequence[RowExport], expected: Version | None, new: Version) -> None:
    config, dense = exports[-1].config(), to_npz(exports[-1].dense())
    begins = exports[0].begins_chain
    with (
      _plain(self._what),
      self._writing() if begins else contextlib.nullcontext() as writer,
      self._redis.pipeline() as transaction,
    ):
      if begins:
        generation = int(self._redis.incr(_GENERATION))
        with self._redis.pipeline(transaction=False) as pipeline:
          for export in exports:
            _write(pipeline, generation, export, at_once=_COMMANDS_AT_ONCE)
      transaction.watch(_VERSION, _WRITER)
      held, held_generation = _parse(self._what, transaction.get(_VERSION))
      if held != expected or (begins and transaction.get(_WRITER) != writer):
        raise Overtaken
      transaction.multi()
      if not begins:
        generation = held_generation
        for export in exports:
          _write(transaction, generation, export)
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
        self._sweep(generation, generation)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[bytes]:
    """Deletes what killed publishers left; holds and yields `ctr:writer`, UserError if taken."""
    newest = int(self._redis.get(_GENERATION) or 0)
    # A base that begins from here on gets a newer generation, which the sweep spares.
    is_free, name = not self._redis.exists(_WRITER), uuid.uuid4().bytes
    _, served = _parse(self._what, self._redis.get(_VERSION))
    if is_free and newest > served:  # first, because a full Redis would refuse the next command
      self._sweep(served, newest)
    if not is_free or not self._redis.set(_WRITER, name, nx=True, ex=_SECONDS_TO_WRITE):
      raise UserError(
        f'{self._what}: another publisher writes it, or was killed less than {_SECONDS_TO_WRITE} s '
        'ago; wanted one publisher at a time'
      )
    try:
      yield name
    finally:
      if self._redis.get(_WRITER) == name:
        self._redis.delete(_WRITER)

  def _sweep(self, kept: int, newest: int) -> None:
    """Deletes the rows of the generations up to `newest`, except those of the one to keep."""
    with self._redis.pipeline(transaction=False) as pipeline:
      for names in _batches(self._redis.scan_iter(_ROW + b'*', count=_KEYS_AT_ONCE)):
        old = [name for name in names if (g := _generation(name)) and kept != g <= newest]
        if old:
          pipeline.unlink(*old)
        if len(pipeline) >= _COMMANDS_AT_ONCE:
          pipeline.execute()
      for name in self._redis.scan_iter(_MODEL + b'*', count=_KEYS_AT_ONCE):
        number = name[len(_MODEL) :]
        if number.isdigit() and kept != int(number) <= newest:
          pipeline.unlink(name)
      pipeline.execute()

  def view(self) -> View | None:
    with _plain(self._what), self._redis.pipeline() as transaction:
      while True:
        data = self._redis.get(_VERSION)
        if data is None:
          return None
        _, generation = _parse(self._what, data)
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
  """Puts an export's changes into a pipeline, executed whenever it has `at_once` commands."""

  def sent() -> None:
    if at_once and len(pipeline) >= at_once:
      pipeline.expire(_WRITER, _SECONDS_TO_WRITE)
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
    version, self._generation = _parse(what, data)
    with _ours(what):
      super().__init__(version, model[b'config'].decode(), from_npz(model[b'dense']))

  def look_up(self, keys: np.ndarray) -> LookedUpRows:
    with _plain(self._what):
      data, *values = self._redis.mget([_VERSION, *_names(self._generation, keys)])
    if data != self._data:
      raise VersionGone
    with _ours(self._what):
      return decode(values)
