"""Writes the events of a run to metrics.jsonl, and gives their metrics to listeners."""

import contextlib
import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np
import pandas as pd
from absl import logging

from trainer.config import METRICS, RANKING_METRICS
from trainer.errors import one_line
from trainer.files import whole_file
from trainer.plain_data import Json, JsonObject
from trainer.reporting.listener import Listener

# The fields that listeners hear of.
SCALARS = (
  *(*METRICS, 'calibration', 'loss', 'examples_per_second', 'learning_rate_factor'),
  *('features', 'admitted', 'evicted', 'table_bytes'),
)

# Events about the job itself. Other events are of work that is repeated after a crash.
OF_THE_JOB = ('start', 'save', 'lost', 'heartbeat')


class EventLog:
  """Writes the events of a run to metrics.jsonl, and gives their metrics to listeners.

  A failure to write (a full disk, a file that was removed or cut, a server out of reach) never ends
  the training. It is reported once; `troubles` has a line for each.

  Args:
    active: whether this process writes; only the first process of a job does.
    keep_bytes: the size of metrics.jsonl at the checkpoint from which the run continues. Later
      events, except those in OF_THE_JOB, are removed: the run repeats that work. None keeps all.
    most_bytes: beyond it, the older half of the file is dropped, but for the first event, whose
      field `dropped` says how many bytes went before the second one. None: no bound.
  """

  def __init__(
    self, run_dir: str, active: bool, keep_bytes: int | None = 0, most_bytes: int | None = None
  ):
    self.active, self.troubles, self._most = active, [], most_bytes or math.inf
    # Called with each event that this process writes.
    self.note: Callable[[Mapping[str, Json]], None] = lambda record: None
    self._lock = threading.Lock()  # guards the file
    self._file: BinaryIO | None = None
    self._size = 0  # bytes of metrics.jsonl after the last write
    self._head = self._dropped = 0  # bytes of the first event if others were dropped, and of these
    self._listeners: Sequence[Listener] = ()
    self.ending = 'unfinished'  # the status in the event `end`; 'unfinished' before it
    self._validated: JsonObject = {}  # the last evaluation of data.valid
    if not active:
      return
    self._path = os.path.join(run_dir, 'metrics.jsonl')
    with self.guarded(self._path):
      self._open()
    self.cut(keep_bytes)

  def tell(self, listeners: Sequence[Listener]) -> None:
    """Gives what is written from now on to `listeners`."""
    if self.active:
      self._listeners = listeners
      self._each(lambda listener: listener.begin())

  def _each(self, call: Callable[[Listener], None]) -> None:
    for listener in self._listeners:
      with self.guarded(listener.what):
        call(listener)

  @contextlib.contextmanager
  def guarded(self, what: str) -> Iterator[None]:
    """Catches any error in a `with` statement that writes `what`, and reports it once."""
    try:
      yield
    except Exception as e:  # damaged events may raise anything when they are drawn
      reason = e.strerror if isinstance(e, OSError) and e.strerror else one_line(e)
      trouble = f'{what}: {reason}'
      if trouble not in self.troubles:
        self.troubles.append(trouble)
        logging.warning('cannot write %s; the training goes on', trouble)

  def _open(self) -> None:
    self._file = open(self._path, 'ab', buffering=0)
    with open(self._path, 'rb') as f:
      first = f.readline()
    before = (_record(first) or {}).get('dropped')
    self._head, self._dropped = (len(first), before - len(first)) if before else (0, 0)

  @property
  def position(self) -> int:
    """The size of metrics.jsonl with all that was dropped; 0 if this process does not write."""
    return self._file.tell() + self._dropped if self._file is not None else 0

  def cut(self, keep_bytes: int | None) -> None:
    """Removes the events after the first `keep_bytes` bytes, as the constructor does."""
    if self._file is not None:
      with self.guarded(self._path), self._lock:
        self._cut(keep_bytes)

  def _cut(self, keep_bytes: int | None) -> None:
    """Removes the events after the first `keep_bytes` bytes, except those in OF_THE_JOB.

    Raises OSError if no line ends at `keep_bytes`: then something else has changed the file.
    """
    size = self.position
    if keep_bytes is None or size == keep_bytes:
      return
    place = max(keep_bytes - self._dropped, self._head)
    with open(self._path, 'rb') as f:
      f.seek(max(0, place - 1))
      ends_a_line = place == 0 or f.read(1) == b'\n'
    if size < keep_bytes or not ends_a_line:
      lengths = f'{size:,} bytes now, {keep_bytes:,} at this checkpoint'
      raise OSError(errno.EIO, f'has changed ({lengths}): earlier events are missing or doubled')
    with open(self._path, 'rb') as f:
      f.seek(place)
      removed = [record for line in f if (record := _record(line)) is not None]
    self._file.truncate(place)
    self._size = self._file.seek(0, os.SEEK_END)
    for record in removed:
      if record['event'] in OF_THE_JOB:
        self._write_line(record)

  def write(self, event: str, step: int, **fields: Json) -> None:
    """Writes an event, without fields that are None; listeners get its metrics."""
    if not self.active:
      return
    known = {name: value for name, value in fields.items() if value is not None}
    record = {'event': event, 'step': step, **known}
    self.append(record)
    self._each(lambda listener: listener.wrote(record))
    if event == 'end':
      self.ending = record['status']
    if event == 'importance':  # its metrics are of fewer samples than those of `eval`
      return
    kind = record.get('split', event)
    if kind == 'valid':
      self._validated = record
    self._show(kind, step, self._validated if kind == 'best' else record)

  def _show(self, kind: str, step: int, record: JsonObject) -> None:
    of_tasks = {f'/{task}': figures for task, figures in record.get('tasks', {}).items()}
    ranked = [name for name in record if name.partition('@')[0] in RANKING_METRICS]
    values = {
      name + task: figures[name]
      for name in (*SCALARS, *ranked)
      for task, figures in {'': record, **of_tasks}.items()
      if isinstance(figures.get(name), (int, float))
    }
    if values:
      self._each(lambda listener: listener.scalars(kind, step, values))

  def append(self, record: Mapping[str, Json]) -> None:
    """Writes one event to metrics.jsonl only. Any thread may call this."""
    if self.active:
      with self.guarded(self._path), self._lock:
        self._write_line(record | {'time': round(time.time(), 3)})
      self.note(record)

  def count(self, event: str) -> int:
    """Returns how many events of one kind metrics.jsonl has."""
    with self.guarded(self._path), open(self._path, 'rb') as f:
      return sum(line.startswith(_begins(event)) for line in f)
    return 0

  def histograms(self, kind: str, step: int, histograms: Mapping[str, np.ndarray]) -> None:
    self._each(lambda listener: listener.histograms(kind, step, histograms))

  def _write_line(self, record: Mapping[str, Json]) -> None:
    """Appends a line to metrics.jsonl. If the file was removed or replaced, it starts a new one."""
    line = (json.dumps(record) + '\n').encode()
    there = os.stat(self._path) if os.path.exists(self._path) else None
    if not (self._file and there and os.path.samestat(there, os.fstat(self._file.fileno()))):
      lost = self._file
      self._open()
      if lost:
        lost.close()
        with self.guarded(self._path):
          raise OSError(errno.EIO, 'was removed or replaced while the run wrote to it')
        self._size = 0
    size = self._file.seek(0, os.SEEK_END)
    if size < self._size:
      with self.guarded(self._path):
        raise OSError(errno.EIO, 'was cut while the run wrote to it: earlier events are missing')
    if size:
      with open(self._path, 'rb') as f:
        f.seek(size - 1)
        if f.read(1) != b'\n':  # the last line was cut, for example by a full disk
          line = b'\n' + line
    while line:
      line = line[self._file.write(line) :]
      self._size = self._file.tell()
    if self._size > self._most:
      self._drop()

  def _drop(self) -> None:
    """Drops the older half of the events, but for the first one."""
    with open(self._path, 'rb') as f:
      first = _record(f.readline()) or {'event': 'start', 'step': 0}
      f.seek(self._size // 2)
      f.readline()
      first['dropped'], kept = f.tell() + self._dropped, f.read()
    with whole_file(self._path) as f:
      f.write((json.dumps(first) + '\n').encode() + kept)
    self._file.close()
    self._open()
    self._size = self._file.seek(0, os.SEEK_END)


def _begins(event: str) -> bytes:
  """Returns how the lines of one kind of events begin."""
  return json.dumps({'event': event})[:-1].encode()


def read_events(run_dir: str, without: str = '') -> pd.DataFrame:
  """Returns the events of a run, one in each row; without lines that were cut or damaged.

  Events of the kind `without` are left out.
  """
  left_out = _begins(without)
  with open(os.path.join(run_dir, 'metrics.jsonl'), 'rb') as f:
    lines = (line for line in f if not line.startswith(left_out))
    records = [record for line in lines if (record := _record(line)) is not None]
  # A run that was stopped early may have no events.
  return pd.DataFrame(records, columns=None if records else ['event', 'step', 'time'])


def _record(line: bytes) -> JsonObject | None:
  try:
    record = json.loads(line)
  except ValueError:
    return None
  return record if isinstance(record, dict) and {'event', 'step'} <= record.keys() else None
