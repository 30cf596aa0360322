"""Converts raw passes, once, to what training reads fast."""

import collections
import concurrent.futures
import contextlib
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from absl import logging

from trainer import config
from trainer.data import (
  csv_format,
  jsonl_format,
  libsvm_format,
  orc_format,
  parquet_format,
  tfrecord_format,
)
from trainer.data.block import Block
from trainer.data.log_files import (
  CODECS,
  SUFFIXES,
  WHOLE,
  LogFile,
  Part,
  files_of,
  is_remote,
  partition_columns,
)
from trainer.data.parse import MAX_EXAMPLES, Parsed, parse
from trainer.data.passes import pass_day
from trainer.data.prepared import META, PreparedPass, Writer, read_meta
from trainer.data.schema import reading, schema, wanted_columns
from trainer.errors import BadPass, UserError, plain_errors
from trainer.files import UNFINISHED, sync_directory

# What each format of data.format is read by: blocks(path, data, wanted), see csv_format.blocks.
# Suffixes of files are in trainer.data.log_files.
READERS = {
  'csv': csv_format.blocks,
  'jsonl': jsonl_format.blocks,
  'parquet': parquet_format.blocks,
  'orc': orc_format.blocks,
  'tfrecord': tfrecord_format.blocks,
  'libsvm': libsvm_format.libsvm_blocks,
  'libffm': libsvm_format.libffm_blocks,
}
# That parse; reading and writing go on beside them.
THREADS = min(8, max(2, len(os.sched_getaffinity(0))))


def format_of(data: config.Data, path: str) -> str:
  """The format of a raw file: data.format, or else what its suffix says, or else csv."""
  if data.format is not None:
    return data.format
  stem, suffix = os.path.splitext(path.lower())
  if suffix in CODECS:
    suffix = os.path.splitext(stem)[1]
  return SUFFIXES.get(suffix, 'csv')


def _with_partitions(block: Block, partitions: dict[str, str]) -> Block:
  """A block with columns that hold the same text in all records."""
  n = len(block.lines)
  columns = {
    name: pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), n), [text])
    for name, text in partitions.items()
  }
  return block._replace(columns=block.columns | columns)


def raw_blocks(
  cfg: config.Config, file: LogFile, wanted: dict[str, str], part: Part = WHOLE
) -> Iterator[Callable[[], Block]]:
  """The blocks of a raw file, or of a part of it, with the partition columns that its path has
  among `wanted`.
  """
  partitions = {k: v for k, v in partition_columns(file.path).items() if k in wanted}
  inside = {k: v for k, v in wanted.items() if k not in partitions}
  if file.bytes == 0:
    raise BadPass(f'{file.path}: the file is empty; wanted records')
  of_part = () if part == WHOLE else (part,)  # not all readers can begin in the middle
  for read in READERS[format_of(cfg.data, file.path)](file.path, cfg.data, inside, *of_part):
    if partitions:
      read = functools.partial(lambda read: _with_partitions(read(), partitions), read)
    yield read


def parsed_blocks(
  cfg: config.Config, file: LogFile, labelled: bool = True, part: Part = WHOLE
) -> Iterator[Parsed]:
  """Yields a file's blocks parsed, in order, a few at a time in memory.

  Args:
    cfg: the config.
    file: of a raw pass.
    labelled: as in `prepare_pass`.
    part: of files of these formats that can be read from the middle.
  """
  pool = concurrent.futures.ThreadPoolExecutor(THREADS)
  headers: list[int] = []

  def parsed(read: Callable[[], Block]) -> Parsed:
    block = read()
    headers.extend(block.repeated_headers)
    return parse(cfg, block, labelled)

  try:
    waiting = collections.deque()
    for read in raw_blocks(cfg, file, wanted_columns(cfg, labelled), part):
      waiting.append(pool.submit(parsed, read))
      if len(waiting) > THREADS:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()
  finally:
    pool.shutdown(cancel_futures=True)
  if headers:
    logging.warning(
      '%s:%d: found the line of names again, %d times in the file; left out',
      file.path,
      min(headers),
      len(headers),
    )


def _check(cfg: config.Config) -> None:
  for key in ('label_positive', 'label_negative'):
    pattern = getattr(cfg.data, key)
    if pattern is None:
      continue
    if cfg.model.loss == 'squared_error':
      raise UserError(f'data.{key}: makes labels of 0 and 1; wanted a model.loss for them with it')
    try:
      re.compile(pattern)
    except re.error as e:
      raise UserError(f'data.{key}: found {pattern!r}; wanted a regular expression ({e})') from None


class BadRecords:
  """Counts the records of a pass that are dropped, and says when they are too many.

  Args:
    path: of the pass.
    max_share: `data.max_bad_share`.
  """

  def __init__(self, path: str, max_share: float):
    self._path, self._max_share = path, max_share
    self.kinds, self.examples = collections.Counter(), []

  def add(self, path: str, kinds: Mapping[str, int], examples: Sequence[dict[str, Any]]) -> None:
    """Counts those of a block of a file."""
    self.kinds.update(kinds)
    room = MAX_EXAMPLES - len(self.examples)
    self.examples += [{'path': path, **e} for e in examples[:room]]

  def told(self, samples: int) -> dict[str, Any]:
    """What meta.json says of them."""
    bad = self.kinds.total()
    of = {'records': bad, 'of': samples + bad}
    return of | {'kinds': dict(self.kinds), 'examples': self.examples}

  def check(self, samples: int) -> dict[str, Any]:
    """As `told`.

    Raises:
      BadPass: where there are no records, or too many bad ones.
    """
    bad, total = self.kinds.total(), samples + self.kinds.total()
    if not total:
      raise BadPass(f'{self._path}: found no records; wanted at least one')
    if bad:
      first = '{path}:{line}: {what}: found {found}; wanted {wanted}'.format(**self.examples[0])
      if bad > self._max_share * total:
        raise BadPass(
          f'{first}; {bad} of {total} records are bad, data.max_bad_share allows '
          f'{self._max_share:g} of them'
        )
      kinds = ', '.join(f'{k} {v}' for k, v in self.kinds.items())
      logging.warning('%s; dropped %d bad of %d records (%s)', first, bad, total, kinds)
    return self.told(samples)


def look_at(cfg: config.Config, raw_path: str) -> None:
  """Reads the beginnings of a raw pass's files.

  Raises:
    BadPass, UserError: as `prepare_pass`, where they show what is wrong.
  """
  _check(cfg)
  for file in files_of(raw_path):
    with plain_errors(f'cannot read {raw_path}'):
      with contextlib.closing(raw_blocks(cfg, file, wanted_columns(cfg))) as blocks:
        next(blocks, None)


def prepare_pass(
  cfg: config.Config,
  raw_path: str,
  out_dir: str,
  labelled: bool = True,
  on_block: Callable[[int], None] = lambda samples: None,
) -> dict[str, Any]:
  """Converts one raw pass, a file or a directory of files, into the directory `out_dir`, unless it
  was already, from these very files (size, time) with an equal schema.

  Bounded memory. Written beside `out_dir` under a temporary name, synced, then renamed.

  Args:
    cfg: the config.
    raw_path: the pass.
    out_dir: where the prepared pass goes.
    labelled: whether labels, weights and groups are read; what only predicts needs none.
    on_block: called after each block, with the samples so far; what it raises ends the conversion.
  Returns:
    The pass's meta.json.
  Raises:
    BadPass: where the pass is empty, damaged, or more than data.max_bad_share of its records are
      bad. Fewer are dropped, with a warning.
    UserError: where there is no such file, or it lacks a column.
  """
  _check(cfg)
  files = files_of(raw_path)
  meta = _meta(cfg, raw_path, files, labelled)
  if done := _done(out_dir, meta):
    try:
      PreparedPass(out_dir)
      return done
    except BadPass as e:
      logging.warning('%s; now converted again', e)
  with _writing(cfg, raw_path, out_dir) as writer:
    bad = BadRecords(raw_path, cfg.data.max_bad_share)
    for file in files:
      _convert(cfg, file, WHOLE, labelled, writer, bad, on_block)
    writer.close(meta | {'bad': bad.check(writer.samples)})
  return read_meta(out_dir)


def _convert(
  cfg: config.Config,
  file: LogFile,
  part: Part,
  labelled: bool,
  writer: Writer,
  bad: BadRecords,
  on_block: Callable[[int], None],
) -> None:
  """Writes a part of a file, and counts its bad records."""
  for parsed in parsed_blocks(cfg, file, labelled, part):
    writer.add(parsed)
    bad.add(file.path, parsed.bad, parsed.examples)
    on_block(writer.samples)


def is_prepared_from(cfg: config.Config, raw_path: str, out_dir: str, labelled: bool) -> bool:
  """Whether `prepare_pass` would find its work done."""
  return _done(out_dir, _meta(cfg, raw_path, files_of(raw_path), labelled)) is not None


def prepare_part(
  cfg: config.Config,
  file: LogFile,
  part: Part,
  out_dir: str,
  labelled: bool = True,
  on_block: Callable[[int], None] = lambda samples: None,
) -> None:
  """Converts a part of a raw pass's only file, for `join_parts`; as `prepare_pass`."""
  _check(cfg)
  with _writing(cfg, file.path, out_dir) as writer:
    bad = BadRecords(file.path, cfg.data.max_bad_share)
    _convert(cfg, file, part, labelled, writer, bad, on_block)
    writer.close({'schema': schema(cfg), 'day': 0, 'bad': bad.told(writer.samples)})


def join_parts(
  cfg: config.Config,
  raw_path: str,
  parts: Sequence[str],
  out_dir: str,
  labelled: bool = True,
  on_block: Callable[[int], None] = lambda samples: None,
) -> None:
  """Makes a prepared pass of its parts, the same as `prepare_pass` makes."""
  meta = _meta(cfg, raw_path, files_of(raw_path), labelled)
  with _writing(cfg, raw_path, out_dir) as writer:
    bad = BadRecords(raw_path, cfg.data.max_bad_share)
    for path in parts:
      one = PreparedPass(path, cfg)
      writer.append(one)
      found = one.meta['bad']
      bad.add(raw_path, found['kinds'], found['examples'])
      on_block(writer.samples)
    writer.close(meta | {'bad': bad.check(writer.samples)})


def _meta(
  cfg: config.Config, raw_path: str, files: Sequence[LogFile], labelled: bool
) -> dict[str, Any]:
  """What meta.json says of how and of what a pass was prepared."""
  return {
    'schema': schema(cfg),
    'day': pass_day(cfg, raw_path) or 0,
    'reading': reading(cfg) | {'labelled': labelled},
    'source': {
      'path': raw_path if is_remote(raw_path) else os.path.abspath(raw_path),
      'files': len(files),
      'bytes': sum(f.bytes for f in files),
      'mtime_ns': max(f.mtime_ns for f in files),
    },
  }


def _done(out_dir: str, meta: dict[str, Any]) -> dict[str, Any] | None:
  """The meta.json in a directory, where the pass was prepared as `meta` says; else None."""
  if os.path.exists(os.path.join(out_dir, META)):
    with contextlib.suppress(BadPass):  # a damaged one is written again
      done = read_meta(out_dir)
      if all(done.get(k) == v for k, v in meta.items()):
        return done
  return None


@contextlib.contextmanager
def _writing(cfg: config.Config, raw_path: str, out_dir: str) -> Iterator[Writer]:
  """Gives the writer of a directory that becomes `out_dir` when it was closed."""
  out_dir = os.path.normpath(out_dir)
  temporary = f'{out_dir}{UNFINISHED}{os.getpid()}'
  shutil.rmtree(temporary, ignore_errors=True)
  with contextlib.ExitStack() as stack:
    stack.enter_context(plain_errors(f'preparing {raw_path}'))
    os.makedirs(temporary)
    stack.callback(shutil.rmtree, temporary, ignore_errors=True)
    writer = Writer(temporary, cfg)
    stack.callback(writer.stop)
    yield writer
    sync_directory(temporary)
    shutil.rmtree(out_dir, ignore_errors=True)
    os.rename(temporary, out_dir)
    sync_directory(os.path.dirname(out_dir) or '.')
