"""Trains click models whose features never stop coming.

`trainer.fit`, `trainer.load` and `trainer.Run` are those of trainer.api, imported when they are
asked for.
"""

from typing import Any


def __getattr__(name: str) -> Any:
  if name not in ('fit', 'load', 'Run'):
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from trainer import api

  return getattr(api, name)
