"""The kinds of made columns: the module that computes each."""

import importlib
import types

from trainer import config
from trainer.errors import UserError


def module_of(made: config.Made) -> types.ModuleType:
  """Returns the module of a kind, with its two faces.

  `arrow(made, reader)` returns a column [n] as a file could hold it, of an ArrowReader's columns;
  `graph(made, reader)` a GraphColumn of a GraphReader's, in plain TensorFlow ops. Keys and float32
  numbers of both are equal to the bit.

  Raises:
    UserError: if a value is missing that only the config of a run has, such as measured bins.
  """
  if made.left_open:
    raise UserError(
      f"{made.kind} of '{next(made.reads())[0]}': {made.left_open} is left open; wanted the "
      'config of a run, which fills it in'
    )
  return importlib.import_module(f'trainer.data.columns.{made.kind}')
