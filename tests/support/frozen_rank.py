"""`python tests/support/frozen_rank.py PLACE [flags of trainer.run]`: freezes itself on the way.

PLACE is MODULE:FUNCTION:EVENT, such as trainer.runtime:start:call: where the process stops itself
with SIGSTOP, before a call of that function or after it.
"""

import functools
import importlib
import os
import runpy
import signal
import sys
from typing import Any


def freeze_at(module: str, name: str, event: str) -> None:
  """Wraps a function, which others call as an attribute of its module or class."""
  *owners, last = name.split('.')
  owner = functools.reduce(getattr, owners, importlib.import_module(module))
  function = getattr(owner, last)

  @functools.wraps(function)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    if event == 'call':
      os.kill(os.getpid(), signal.SIGSTOP)
    result = function(*args, **kwargs)
    if event == 'return':
      os.kill(os.getpid(), signal.SIGSTOP)
    return result

  setattr(owner, last, wrapped)


if __name__ == '__main__':
  freeze_at(*sys.argv.pop(1).split(':'))
  runpy.run_module('trainer.run', run_name='__main__', alter_sys=True)
