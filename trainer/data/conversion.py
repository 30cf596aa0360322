"""Converts raw passes, once, to what training reads fast."""

import collections
import concurrent.futures
import contextlib
import os
import re
import shutil

import numpy as np
from absl import logging

from trainer.data import csv_format as csv_format
from trainer.data import parquet_format as parquet_format
from trainer.data.parse import MAX_EXAMPLES, merge_stats, parse
from trainer.data.passes import pass_day
from trainer.data.prepared import META, Writer, read_meta
from trainer.data.schema import reading, schema, wanted_columns
from trainer.errors import UserError, plain_errors
from trainer.files import UNFINISHED, sync_directory

READERS = {'csv': csv_format.blocks, 'parquet': parquet_format.blocks}
THREADS = 2  # that parse; reading and writing go on beside them


def _parsed(cfg, raw_path):
  """Yields the file's blocks parsed, in order, a few at a time in memory."""
  pool = concurrent.futures.ThreadPoolExecutor(THREADS)
  try:
    waiting = collections.deque()
    for read in READERS[cfg.data.format](raw_path, cfg.data, wanted_columns(cfg)):
      waiting.append(pool.submit(lambda read=read: parse(cfg, read())))
      if len(waiting) > THREADS:
        yield waiting.popleft().result()
    while waiting:
      yield waiting.popleft().result()
  finally:
    pool.shutdown(cancel_futures=True)


def _check(cfg, raw_path):
  data = cfg.data
  if not os.path.isfile(raw_path):
    raise UserError(
      f'{raw_path}: '
      + ('found a directory; wanted a file' if os.path.isdir(raw_path) else 'no such file')
    )
  if os.path.getsize(raw_path) == 0:
    raise UserError(f'{raw_path}: the file is empty; wanted records')
  if data.label_positive is not None:
    if data.label_is == 'real':
      raise UserError(
        "data.label_positive: makes labels of 0 and 1; wanted data.label_is 'binary' with it"
      )
    try:
      re.compile(data.label_positive)
    except re.error as e:
      raise UserError(
        f'data.label_positive: found {data.label_positive!r}; wanted a regular expression ({e})'
      ) from None


def prepare_pass(cfg, raw_path, out_dir):
  """Converts one raw pass into the directory `out_dir`, unless it was already, from this very file
  (size, time) with an equal schema.

  Bounded memory. Written beside `out_dir` under a temporary name, synced, then renamed.

  Returns: the pass's meta.json as a dict.
  Raises: UserError where the file is missing, empty, lacks a column, or more than
    data.max_bad_share of its records are bad.
    Fewer are dropped, with a warning.
  """
  _check(cfg, raw_path)
  stat = os.stat(raw_path)
  meta = {
    'schema': schema(cfg),
    'day': pass_day(cfg, raw_path) or 0,
    'reading': reading(cfg),
    'source': {
      'path': os.path.abspath(raw_path),
      'bytes': stat.st_size,
      'mtime_ns': stat.st_mtime_ns,
    },
  }
  if os.path.exists(os.path.join(out_dir, META)):
    done = read_meta(out_dir)
    if all(done.get(k) == v for k, v in meta.items()):
      return done
  out_dir = os.path.normpath(out_dir)
  temporary = f'{out_dir}{UNFINISHED}{os.getpid()}'
  shutil.rmtree(temporary, ignore_errors=True)
  with contextlib.ExitStack() as stack:
    stack.enter_context(plain_errors(f'preparing {raw_path}'))
    os.makedirs(temporary)
    stack.callback(shutil.rmtree, temporary, ignore_errors=True)
    data = cfg.data
    writer = Writer(
      temporary,
      len(cfg.slots),
      len(data.dense),
      data.weight is not None,
      data.group is not None,
      len(cfg.labels),
    )
    bad, examples, stats = collections.Counter(), [], np.zeros([len(data.dense), 3])
    for parsed in _parsed(cfg, raw_path):
      writer.add(parsed)
      stats = merge_stats(stats, parsed.stats)
      bad.update(parsed.bad)
      examples = (examples + parsed.examples)[:MAX_EXAMPLES]
    num_bad, total = bad.total(), writer.samples + bad.total()
    if not total:
      raise UserError(f'{raw_path}: found no records; wanted at least one')
    if num_bad:
      first = '{}:{line}: {what}: found {found}; wanted {wanted}'.format(raw_path, **examples[0])
      if num_bad > data.max_bad_share * total:
        raise UserError(
          f'{first}; {num_bad} of {total} records are bad, data.max_bad_share allows '
          f'{data.max_bad_share:g} of them'
        )
      logging.warning(
        '%s; dropped %d bad of %d records (%s)',
        first,
        num_bad,
        total,
        ', '.join(f'{k} {v}' for k, v in bad.items()),
      )
    meta |= {
      'dense': {c.name: row for c, row in zip(data.dense, stats.tolist())},
      'bad': {'records': num_bad, 'of': total, 'kinds': dict(bad), 'examples': examples},
    }
    writer.close(meta)
    sync_directory(temporary)
    shutil.rmtree(out_dir, ignore_errors=True)
    os.rename(temporary, out_dir)
    sync_directory(os.path.dirname(out_dir) or '.')
  return read_meta(out_dir)
