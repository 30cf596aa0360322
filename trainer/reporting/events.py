"""The events of a run: metrics.jsonl, and their numbers in TensorBoard."""

import json
import os
import time
from typing import Any

import pandas as pd
import tensorflow as tf

# Figures of an event that TensorBoard shows.
SCALARS = (
  'logloss',
  'auc',
  'gauc',
  'calibration',
  'rmse',
  'examples_per_second',
  'features',
  'admitted',
  'evicted',
  'table_bytes',
)


class EventLog:
  """Appends events to `run_dir`; on processes other than the first it does nothing.

  Args:
    run_dir: of the run.
    active: whether this process writes.
    keep_bytes: how much of metrics.jsonl to keep: what the checkpoint that the run continues from
      had seen. Later lines belong to work that is done again. None keeps all of it.
  """

  def __init__(self, run_dir: str, active: bool, keep_bytes: int | None = 0):
    self._active = active
    if not active:
      return
    self._file = open(os.path.join(run_dir, 'metrics.jsonl'), 'ab')
    if keep_bytes is not None:
      self._file.truncate(keep_bytes)
    self._board = tf.summary.create_file_writer(os.path.join(run_dir, 'tensorboard'))

  @property
  def position(self) -> int:
    """Bytes of metrics.jsonl written so far."""
    return self._file.tell() if self._active else 0

  def write(self, event: str, step: int, **fields: Any) -> None:
    """Writes one event (train, eval, day_end or export); fields that are None are left out."""
    if not self._active:
      return
    given = {name: value for name, value in fields.items() if value is not None}
    record = {'event': event, 'step': step, **given, 'time': round(time.time(), 3)}
    self._file.write((json.dumps(record) + '\n').encode())
    self._file.flush()
    with self._board.as_default(step=step):
      for name in SCALARS:
        if isinstance(record.get(name), (int, float)):
          tf.summary.scalar(f'{event}/{name}', record[name])
        for task, figures in record.get('tasks', {}).items():
          if isinstance(figures.get(name), (int, float)):
            tf.summary.scalar(f'{event}/{name}/{task}', figures[name])
    self._board.flush()


def read_events(run_dir: str) -> pd.DataFrame:
  """The events of a run, a row each, in order; NaN or None where an event has no such field."""
  with open(os.path.join(run_dir, 'metrics.jsonl'), encoding='utf-8') as f:
    # The last line of a run that goes on, or was killed, may have no end yet.
    records = [json.loads(line) for line in f if line.endswith('\n')]
  # A run that was stopped early may have none: the frame has the columns that every event has.
  return pd.DataFrame(records, columns=None if records else ['event', 'step', 'time'])
