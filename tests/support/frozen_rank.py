"""`python tests/support/frozen_rank.py PLACE [flags of trainer.run]`: freezes itself on the way.

PLACE is MODULE:FUNCTION:EVENT, such as trainer.runtime:start:call: where the process stops itself
with SIGSTOP, before a call of that function or after it.
"""

import functools
import importlib.machinery
import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Freezes:
  """Finds one module, and wraps a function of it before anybody can import that."""

  def __init__(self, place: str):
    self._module, self._function, self._event = place.split(':')

  def find_spec(
    self, name: str, path: Any, target: Any = None
  ) -> importlib.machinery.ModuleSpec | None:
    if name != self._module:
      return None
    sys.meta_path.remove(self)
    spec = importlib.util.find_spec(name)
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
      execute(module)
      *owners, function = self._function.split('.')
      owner = functools.reduce(getattr, owners, module)
      setattr(owner, function, self._wrapped(getattr(owner, function)))

    spec.loader.exec_module = exec_module
    return spec

  def _wrapped(self, function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
      if self._event == 'call':
        os.kill(os.getpid(), signal.SIGSTOP)
      result = function(*args, **kwargs)
      if self._event == 'return':
        os.kill(os.getpid(), signal.SIGSTOP)
      return result

    return wrapped


if __name__ == '__main__':
  sys.meta_path.insert(0, _Freezes(sys.argv.pop(1)))
  sys.path.insert(0, os.getcwd())
  runpy.run_module('trainer.run', run_name='__main__', alter_sys=True)
