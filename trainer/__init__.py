"""Trains click models on logs that never end, whose features never stop coming.

A log comes in *passes*, an hour or a day each. A categorical column is a *slot* (or field). A value
in a slot is a *feature*, identified by its *key*. It has *shows* and *clicks*, the impressions and
clicks that it was seen with, and a *row*: its linear weight, and after *admission* its *factors*
(the embedding). The process that keeps a row is its *owner*; each owns some of the 4,096
*logical shards* of keys.

trainer/run.py starts a job, training/job.py goes through its passes and days, training/step.py
takes one step; embedding/exchange.py reads and updates rows, model/builder.py makes the layers.

`trainer.fit`, `trainer.load`, `trainer.Run`, `trainer.Callback` and `trainer.tune` are imported
when they are first used.
"""

import os
import signal
import sys
from typing import Any

__all__ = ['Callback', 'Run', 'fit', 'load', 'tune']
_PLACES = dict.fromkeys(('fit', 'load', 'Run'), 'trainer.api') | {
  'tune': 'trainer.tuning',
  'Callback': 'trainer.training.callback',
}


def __getattr__(name: str) -> Any:
  import importlib

  if name not in _PLACES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
  return __all__


def _is_a_command() -> bool:
  """Returns whether this process runs a command, whose own module is not imported yet."""
  name = os.path.basename(sys.argv[0]) if sys.argv else ''
  as_module = name == '-m' and any(a.startswith('trainer.') for a in sys.orig_argv)
  return as_module or name.startswith('ctr-')


# Ctrl-C while a command imports its modules ends it without a trace; later it is an exception.
if _is_a_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, signal.SIG_DFL)
