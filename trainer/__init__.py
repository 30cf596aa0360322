"""Trains CTR models on logs that never end, in which new features keep appearing.

A log comes in *passes*, an hour or a day each. A categorical column is a *slot* (or field). A value
in a slot is a *feature*, identified by its *key*. A feature has *shows* and *clicks*, the numbers
of impressions and clicks in which it occurred, and a *row*: its linear weight, and after
*admission* its *factors* (the embedding). The process that keeps a row is its *owner*. Each process
owns some of the 4,096 *logical shards*, into which a hash divides all keys.

trainer/run.py starts a job, job/job.py goes through its passes and days, and training/step.py
takes one step. embedding/exchange.py reads and updates rows, model/builder.py makes the layers.

`trainer.fit`, `trainer.load`, `trainer.compare`, `trainer.Run`, `trainer.Callback` and
`trainer.tune` are imported when they are first used.
"""

import os
import signal
import sys
from typing import Any

__all__ = ['Callback', 'Run', 'compare', 'fit', 'load', 'tune']
_PLACES = dict.fromkeys(('fit', 'load', 'compare', 'Run'), 'trainer.api') | {
  'tune': 'trainer.tools.tuning',
  'Callback': 'trainer.job.callback',
}


def __getattr__(name: str) -> Any:
  import importlib

  if name not in _PLACES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
  return __all__


def _is_a_command() -> bool:
  """Returns whether this process was started to run one of our commands."""
  name = os.path.basename(sys.argv[0]) if sys.argv else ''
  as_module = name == '-m' and any(a.startswith('trainer.') for a in sys.orig_argv)
  return as_module or name.startswith('ctr-')


# While a command imports its modules, Ctrl-C ends it without a stack trace. `command_line.entry`
# makes Ctrl-C an exception again.
if _is_a_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, signal.SIG_DFL)
