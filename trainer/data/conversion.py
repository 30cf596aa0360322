"""Converts logs (raw passes) to arrays (prepared passes), which can be read much faster."""

import collections
import concurrent.futures
import contextlib
import functools
import importlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from absl import logging

from trainer import config
from trainer.data import csv_format, file_system, parquet_format
from trainer.data.arrays import one_each
from trainer.data.block import BadRecord, Block
from trainer.data.file_system import WHOLE, LogFile, Part
from trainer.data.parse import MAX_EXAMPLES, Parsed, parse
from trainer.data.pass_files import files_of, folder_columns, stamp_of, warn_once
from trainer.data.passes import pass_day
from trainer.data.prepared import PreparedPass, read_meta
from trainer.data.prepared_writer import Writer
from trainer.data.schema import reading, schema, wanted_columns
from trainer.data.spans import Spans
from trainer.data.values import as_text, canonical, trim
from trainer.errors import BadPass, UserError, plain_errors
from trainer.files import UNFINISHED, crc32_of_stream, sync_directory
from trainer.plain_data import JsonObject
from trainer.wings import wing

# Threads that parse; reading and writing go on beside them.
THREADS = min(8, max(2, len(os.sched_getaffinity(0))))

BLANK_BYTES = 4096  # a larger file holds records

OnBlock = Callable[[int], None]
# The parts of a raw pass, files or partitions of a topic: the name of each, for messages, and
# functions that return its blocks. A wing reads a topic, and notes in meta.json what it has read.
Parts = Iterator[tuple[str, Iterator[Callable[[], Block]]]]


def format_of(data: config.Data, path: str) -> str:
  """Returns the format of a raw file: data.format, else the format of its suffix, else csv."""
  return data.format or file_system.SUFFIXES.get(file_system.suffix_of(path), 'csv')


def reader(kind: str) -> ModuleType:
  """Returns the module that reads a format: `blocks(path, data, wanted)`, as csv_format's."""
  return importlib.import_module(f'trainer.data.{kind}_format')


def data_of_table(
  data: config.Data, path: str, names: Collection[str], changes: Mapping[str, Any]
) -> config.Data:
  """Returns settings that read a table, such as data.items, in place of the log.

  `changes` are other values of them; in a csv file, `names` show the delimiter.
  """
  files_of(path)  # refuses a pipe or a device, from which reading might never end
  update = {'group': None, 'format': None, 'columns': None, 'delimiter': None, **changes}
  if format_of(data.model_copy(update=update), path) == 'csv':
    update['delimiter'] = csv_format.delimiter_of(path, names)
  return data.model_copy(update=update)


def config_of_items(cfg: config.Config) -> config.Config:
  """Returns a config that reads data.items as if it were a log to predict for.

  The two towers are swapped: the columns of items are read, and those of queries are blank.
  """
  retrieval, id_slot = cfg.model.retrieval, cfg.item_slot
  swapped = {'query': retrieval.item, 'item': retrieval.query}
  model = cfg.model.model_copy(update={'retrieval': retrieval.model_copy(update=swapped)})
  changes = {'label': None, 'weight': None, 'day_pattern': None, 'keep_texts': [id_slot.name]}
  names = [id_slot.column or id_slot.name]
  table = data_of_table(cfg.data, cfg.data.items, names, changes | {'items': None})
  return cfg.model_copy(update={'data': table, 'model': model})


def _with_folders(read: Callable[[], Block], path: str, texts: dict[str, str | None]) -> Block:
  """Reads a block, and adds the {column: text} of a file's folders to all records.

  Raises BadPass if the file has a column of such a name too, in which a value is another one.
  """
  block = read()
  n = len(block.lines)
  columns = {}
  for name, text in texts.items():
    given = pa.array([text], pa.string())
    if name in block.columns:
      own = one_each(block.columns[name])[0]
      own = own.cast(pa.string()) if pa.types.is_floating(own.type) else as_text(own, name)
      own, wanted = (canonical(trim(column)).fill_null('') for column in (own, given))
      for row in np.flatnonzero(pc.not_equal(own, wanted[0]))[:1].tolist():
        raise BadPass(
          f"{path}:{block.lines[row]}: column '{name}': found {own[row].as_py()!r}, and "
          f'{text!r} in the name of its folder; wanted only one of both'
        )
    code = pa.scalar(None if text is None else 0, pa.int32())
    columns[name] = pa.DictionaryArray.from_arrays(pa.repeat(code, n), given)
  return block._replace(columns=block.columns | columns)


def _holds(data: config.Data, file: LogFile, column: str) -> bool:
  """Returns whether a file itself has a column; of JSON lines and TFRecord, in its first block."""
  kind = format_of(data, file.path)
  with contextlib.suppress(UserError):  # whoever reads the file tells what else is wrong
    with contextlib.closing(reader(kind).blocks(file.path, data, {column: ''})) as blocks:
      read = next(blocks, None)
      if read is None or kind not in ('jsonl', 'tfrecord'):
        return read is not None
      values, several = one_each(read().columns[column])
      return values.null_count < len(values) or bool(np.any(several))
  return False


def _is_blank(file: LogFile) -> bool:
  """Returns whether a file holds no byte, or white space alone, perhaps compressed."""
  if 0 < file.bytes < BLANK_BYTES:
    with contextlib.suppress(OSError), file_system.open_stream(file.path) as f:
      return not f.read(BLANK_BYTES).strip()
  return not file.bytes


def raw_blocks(
  data: config.Data,
  file: LogFile,
  wanted: dict[str, str],
  part: Part = WHOLE,
  as_written: bool = False,
) -> Iterator[Callable[[], Block]]:
  """Yields functions that return blocks of a raw file; paths as dt=31/part.csv give columns too.

  A blank part of a directory, as many programs write it beside others, has no blocks. `as_written`
  is that of `csv_format.blocks`.
  """
  if file.below and _is_blank(file):
    return
  if file.bytes == 0:
    raise BadPass(f'{file.path}: the file is empty; wanted records')
  inside, above = ({c: t for c, t in f.items() if c in wanted} for f in folder_columns(file))
  both = {name for name in above | inside if _holds(data, file, name)}
  for name in both - inside.keys():
    where, folder = file.below or os.path.dirname(file.path), f'{name}={above[name]}'
    warn_once(f"{where}: column '{name}': the files have it; the folder {folder} does not count")
  given = {name: above[name] for name in above.keys() - both} | inside
  of_file = {name: wanted[name] for name in wanted if name not in given.keys() - both}
  kind = format_of(data, file.path)
  options = {} if part == WHOLE else {'part': part}  # not all readers can begin in the middle
  if as_written and kind in ('csv', 'jsonl'):  # in others, values have types
    options['as_written'] = True
  for read in reader(kind).blocks(file.path, data, of_file, **options):
    yield functools.partial(_with_folders, read, file.path, given) if given else read


def blocks_of_pass(data: config.Data, path: str, wanted: dict[str, str]) -> Iterator[Block]:
  """Yields the blocks of all files of a raw pass, in order; see `raw_blocks`."""
  for file in files_of(path):
    for read in raw_blocks(data, file, wanted):
      yield read()


def warn(path: str, remarks: Sequence[tuple[int, str]]) -> None:
  """Warns of what is odd in a file, once for each kind, with its first line and how often."""
  for text in dict.fromkeys(text for _, text in remarks):
    lines = [line for line, other in remarks if other == text]
    times = f'{len(lines)} times' if len(lines) > 1 else 'once'
    logging.warning('%s:%d: %s', path, min(lines), text.replace('TIMES', times))


class BadRecords:
  """Counts the bad records of a pass, and raises an error if they are too many.

  It also keeps the largest number in good records and its place, FILE:LINE, for messages.
  """

  def __init__(self, path: str, max_share: float):
    self._path, self._max_share = path, max_share
    self._kinds: collections.Counter[str] = collections.Counter()
    self._examples: list[BadRecord] = []
    self._largest = 0.0, ''

  def add(
    self,
    path: str,
    kinds: Mapping[str, int],
    examples: Sequence[BadRecord],
    largest: tuple[float, int | str],
  ) -> None:
    if largest[0] > self._largest[0]:
      self._largest = largest[0], f'{path}:{str(largest[1]).rpartition(":")[2]}'
    self._kinds.update(kinds)
    room = MAX_EXAMPLES - len(self._examples)
    self._examples += [example._replace(path=path) for example in examples[:room]]

  def counted(self, samples: int) -> JsonObject:
    """Returns the numbers and examples of bad records, for meta.json."""
    bad, examples = self._kinds.total(), [example._asdict() for example in self._examples]
    kinds = dict(self._kinds)
    counts = {'records': bad, 'of': samples + bad, 'kinds': kinds}
    return counts | {'examples': examples, 'largest': self._largest}

  def checked(self, samples: int) -> JsonObject:
    """Returns what `counted` does, and warns of bad records; BadPass if too many, or no records."""
    bad, total = self._kinds.total(), samples + self._kinds.total()
    if not total:
      raise BadPass(f'{self._path}: found no records; wanted at least one')
    if bad > self._max_share * total:
      raise BadPass(
        f'{self._examples[0]}; {bad:,} of {total:,} records {"is" if bad == 1 else "are"} bad'
        f', data.max_bad_share allows {self._max_share:g} of them'
      )
    if bad:
      kinds = ', '.join(f'{k} {v}' for k, v in self._kinds.items())
      logging.warning('%s; dropped %d bad of %d records (%s)', self._examples[0], bad, total, kinds)
    return self.counted(samples)


def look_at(cfg: config.Config, raw_path: str) -> None:
  """Reads the first block of each file of a raw pass, to find mistakes early."""
  for file in files_of(raw_path):
    with plain_errors(f'cannot read {raw_path}'):
      with contextlib.closing(raw_blocks(cfg.data, file, wanted_columns(cfg))) as blocks:
        next(blocks, None)


def _file_parts(
  data: config.Data, files: Sequence[LogFile], wanted: dict[str, str], writer: Writer
) -> Parts:
  filled = []
  for file in files:
    before = writer.samples
    yield file.path, raw_blocks(data, file, wanted)
    filled += [file] * (writer.samples > before)
  _warn_of_twins(filled)


def prepare_pass(
  cfg: config.Config,
  raw: str | Spans,
  out_dir: str,
  labelled: bool = True,
  on_block: OnBlock = lambda samples: None,
) -> JsonObject:
  """Converts one raw pass, files at a path or messages; returns the meta.json of `out_dir`.

  Nothing is done if `out_dir` was converted from the same files (by size and time) with the same
  settings. Memory is bounded. `out_dir` appears once the pass is complete.

  Args:
    labelled: whether to read labels, weights and groups; prediction needs none.
    on_block: called after each block with the number of samples so far; its error ends the
      conversion.
  Raises:
    BadPass: if the pass is empty or damaged, or the share of bad records exceeds
      data.max_bad_share. Below that, bad records are dropped with a warning.
    UserError: if there is no such file, or it lacks a column.
  """
  of_topic = isinstance(raw, Spans)
  path, files = (raw.path, []) if of_topic else (raw, files_of(raw))
  meta = _meta(cfg, path, files, labelled)
  if of_topic and cfg.data.has_days:
    meta['day'] = raw.day
  if done := _done(out_dir, meta):
    try:
      PreparedPass(out_dir)
      return done
    except BadPass as e:
      logging.warning('%s; now converted again', e)
  with _writing(cfg, path, out_dir, labelled, on_block) as out:
    wanted = wanted_columns(cfg, labelled)
    if of_topic:
      waits = lambda: on_block(out.writer.samples)
      parts: Parts = wing('topic_parts')(cfg.data, raw, wanted, waits, meta)
    else:
      parts = _file_parts(cfg.data, files, wanted, out.writer)
    with contextlib.closing(parts):
      for name, reads in parts:
        out.convert(name, reads)
    out.close(meta)
  return read_meta(out_dir)


def prepare_table(
  cfg: config.Config, table: pa.Table, name: str, out_dir: str, labelled: bool = True
) -> None:
  """Converts a table in memory, called `name` in messages; the rest is as in `prepare_pass`."""
  with _writing(cfg, name, out_dir, labelled) as out:
    out.convert(name, parquet_format.table_blocks(table, wanted_columns(cfg, labelled)))
    out.close({'schema': schema(cfg), 'day': 0, 'source': {'path': name}})


def is_prepared_from(cfg: config.Config, raw_path: str, out_dir: str, labelled: bool) -> bool:
  """Returns whether `out_dir` was converted from the pass as it is now, with the same settings."""
  return _done(out_dir, _meta(cfg, raw_path, files_of(raw_path), labelled)) is not None


def prepare_part(
  cfg: config.Config,
  file: LogFile,
  part: Part,
  out_dir: str,
  labelled: bool = True,
  on_block: OnBlock = lambda samples: None,
) -> None:
  """Converts a part of a pass that has only one file; `join_parts` joins the parts."""
  with _writing(cfg, file.path, out_dir, labelled, on_block) as out:
    out.convert(file.path, raw_blocks(cfg.data, file, wanted_columns(cfg, labelled), part))
    bad = out.bad.counted(out.writer.samples)
    out.writer.close({'schema': schema(cfg), 'day': 0, 'bad': bad})


def join_parts(
  cfg: config.Config,
  raw_path: str,
  parts: Sequence[str],
  out_dir: str,
  labelled: bool = True,
  on_block: OnBlock = lambda samples: None,
) -> None:
  """Joins the parts of a pass; the result is the same as that of `prepare_pass`."""
  meta = _meta(cfg, raw_path, files_of(raw_path), labelled)
  with _writing(cfg, raw_path, out_dir, labelled) as out:
    for path in parts:
      prepared = PreparedPass(path, cfg)
      out.writer.append(prepared)
      of_part = prepared.meta['bad']
      examples = [BadRecord(**e) for e in of_part['examples']]
      out.bad.add(raw_path, of_part['kinds'], examples, of_part['largest'])
      on_block(out.writer.samples)
    out.close(meta)


def _warn_of_twins(files: Sequence[LogFile]) -> None:
  """Warns of files that hold the same bytes as others of their pass."""
  sizes, known = collections.Counter(f.bytes for f in files), {}
  for file in files:
    if sizes[file.bytes] > 1:
      with file_system.open_file(file.path) as f:
        first = known.setdefault((file.bytes, crc32_of_stream(f)), file)
      if first is not file:
        text = '%s: has the bytes of %s, so its samples count twice; wanted one of them'
        logging.warning(text, file.path, os.path.basename(first.path))


def _meta(
  cfg: config.Config, raw_path: str, files: Sequence[LogFile], labelled: bool
) -> JsonObject:
  """Returns the entries of meta.json that record the files and the settings of a conversion."""
  stamp = stamp_of(files)
  above = folder_columns(files[0])[1] if files and stamp is None else {}
  folders = {name: text for name, text in above.items() if name in wanted_columns(cfg, labelled)}
  return {
    'schema': schema(cfg),
    'day': pass_day(cfg.data, raw_path) or 0,
    'reading': reading(cfg) | {'labelled': labelled} | ({'folders': folders} if folders else {}),
    'source': {
      'path': file_system.absolute(raw_path),
      'files': len(files),
      'bytes': sum(f.bytes for f in files),
      'mtime_ns': max((f.mtime_ns for f in files), default=0),  # a topic has no files
    }
    | ({} if stamp is None else {'stamp': stamp}),
  }


def _done(out_dir: str, meta: JsonObject) -> JsonObject | None:
  """Returns the meta.json of an intact prepared pass that has all entries of `meta`, else None."""
  try:
    done = read_meta(out_dir)
  except UserError as e:
    if os.path.isdir(out_dir):
      logging.warning('%s; now converted again', e)
    return None
  return done if done.items() >= meta.items() else None


class _Conversion(NamedTuple):
  """A conversion that is under way."""

  writer: Writer
  bad: BadRecords
  parsed_of: Callable[[Block], Parsed]
  on_block: OnBlock

  def convert(self, path: str, reads: Iterator[Callable[[], Block]]) -> None:
    """Adds a file's blocks in order; threads parse them, with few blocks in memory at a time."""
    pool, waiting = concurrent.futures.ThreadPoolExecutor(THREADS), collections.deque()
    remarks: list[tuple[int, str]] = []

    def parsed(read: Callable[[], Block]) -> Parsed:
      block = read()
      remarks.extend(block.remarks)
      return self.parsed_of(block)

    def add() -> None:
      one = waiting.popleft().result()
      self.writer.add(one)
      self.bad.add(path, one.bad, one.examples, one.largest)
      self.on_block(self.writer.samples)

    try:
      for read in reads:
        waiting.append(pool.submit(parsed, read))
        if len(waiting) > THREADS:
          add()
      while waiting:
        add()
    finally:
      pool.shutdown(cancel_futures=True)
    warn(path, remarks)

  def close(self, meta: JsonObject) -> None:
    """Ends a pass, whose bad records are checked and added to `meta`."""
    self.writer.close(meta | {'bad': self.bad.checked(self.writer.samples)})


@contextlib.contextmanager
def _writing(
  cfg: config.Config,
  raw_path: str,
  out_dir: str,
  labelled: bool,
  on_block: OnBlock = lambda samples: None,
) -> Iterator[_Conversion]:
  """Yields a conversion; `out_dir` appears at the end without an error."""
  out_dir = os.path.normpath(out_dir)
  temporary = f'{out_dir}{UNFINISHED}{os.getpid()}'
  shutil.rmtree(temporary, ignore_errors=True)
  with contextlib.ExitStack() as stack:
    stack.enter_context(plain_errors(f'preparing {raw_path}'))
    os.makedirs(temporary)
    stack.callback(shutil.rmtree, temporary, ignore_errors=True)
    writer = Writer(temporary, cfg.data, cfg.labels)
    stack.callback(writer.stop)
    bad = BadRecords(raw_path, cfg.data.max_bad_share)
    yield _Conversion(writer, bad, functools.partial(parse, cfg, labelled=labelled), on_block)
    sync_directory(temporary)
    shutil.rmtree(out_dir, ignore_errors=True)
    os.rename(temporary, out_dir)
    sync_directory(os.path.dirname(out_dir) or '.')
