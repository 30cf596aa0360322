"""Everything that a run leaves, comparable."""

import contextlib
import itertools
import json
import os
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from trainer.storage import checkpoint

# Figures of an event that differ between equal runs; and events that are as many as there were
# starts, with the windows of steps between them.
_FREE = ('time', 'examples_per_second', 'seconds', 'path', 'table_bytes', 'disk_bytes', 'disk_free')
_OF_STARTS = ('start', 'window', 'save', 'end')
OF_ROWS = (
  'show',
  'click',
  'delta_score',
  'unseen_days',
  'age_days',
  'admitted',
  'linear',
  'last_step',
)


def state_of(run_dir: str, without: Collection[str] = ()) -> dict[str, Any]:
  """Returns rows by key, dense arrays, progress, exports, metrics and events of a run.

  Values of rows and dense arrays are bytes, exports what their Parquet files hold, metrics the sums
  of the open pass, events those of metrics.jsonl without what differs between equal runs.

  Args:
    run_dir: of the run.
    without: names of further events, and of figures of events, that are left out.
  """
  rows: dict[int, tuple[bytes, ...]] = {}

  class Store:
    def import_state(self, chunks):
      for chunk in chunks:
        factors = iter(chunk.get('factors_default', ()))  # a model of linear weights has none
        for i, key in enumerate(chunk['key'].tolist()):
          of_key = [chunk[name][i].tobytes() for name in OF_ROWS]
          rows[key] = (
            *of_key,
            *(f.tobytes() for f in itertools.islice(factors, int(chunk['admitted'][i]))),
          )

  newest = next(iter(checkpoint.candidates(f'{run_dir}/checkpoints')))
  dense, progress = checkpoint.restore(newest, store=Store())
  exports = {}
  folder = f'{run_dir}/exports'
  for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
    for file in sorted(os.listdir(f'{folder}/{name}')):
      if file.endswith('.parquet'):
        exports[f'{name}/{file}'] = pq.read_table(f'{folder}/{name}/{file}').to_pydict()
  events = []
  with open(f'{run_dir}/metrics.jsonl', 'rb') as f:
    for line in f:
      with contextlib.suppress(ValueError):  # a full disk, or a campaign, has cut it
        events.append(json.loads(line))
  events = [e for e in events if e.get('event') not in (*_OF_STARTS, *without)]
  del progress['metrics_position'], progress['ancestors']  # of other checkpoints
  metrics = {name: dense.pop(name) for name in list(dense) if name.startswith('metrics/')}
  return {
    'rows': rows,
    'dense': {name: np.asarray(value).tobytes() for name, value in dense.items()},
    'progress': progress,
    'exports': exports,
    'metrics': metrics,
    'events': [{k: v for k, v in event.items() if k not in (*_FREE, *without)} for event in events],
  }
