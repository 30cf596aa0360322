"""What the core knows by name alone: a wing is imported where a config or a command asks for it.

The core has the interface of each, and imports none of them.
"""

import importlib
from typing import Any

_PLACES = {
  # What judges and explains a run that the core has trained, or would train.
  'tools': 'trainer.tools.interface:TOOLS',
}


def wing(name: str) -> Any:
  """Returns the object of a name in `_PLACES`."""
  module, _, attribute = _PLACES[name].partition(':')
  return getattr(importlib.import_module(module), attribute)
