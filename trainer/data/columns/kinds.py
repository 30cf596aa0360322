import importlib
import types

from trainer import config
from trainer.errors import UserError


def module_of(made: config.Made) -> types.ModuleType:
  """Returns the module that computes a made column, one with `from` in the config.

  `arrow(made, reader)` computes the column [n] from those of an ArrowReader, as an Arrow array that
  a file of the log could hold; `graph(made, reader)` a GraphColumn from those of a GraphReader.
  Both give the same keys and float32 numbers, to the bit. UserError if a measured value is missing.
  """
  if made.left_open:
    raise UserError(
      f"{made.kind} of '{made.reads()[0]}': {made.left_open} is left open; wanted the "
      'config of a run, which fills it in'
    )
  return importlib.import_module(f'trainer.data.columns.{made.kind}')
