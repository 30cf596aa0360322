import importlib
import types

from trainer import config
from trainer.errors import UserError


def module_of(made: config.Made) -> types.ModuleType:
  """Returns the module that computes a made column, one with `from` in the config.

  Its function `arrow(made, reader)` computes the column [n] from the columns of an ArrowReader, as
  an Arrow array that a file of the log could hold. Its function `graph(made, reader)` computes a
  GraphColumn from the columns of a GraphReader, in plain TensorFlow ops. Both give the same keys
  and float32 numbers, to the bit.

  Raises:
    UserError: if the config lacks a value that a run measures, such as boundaries of bins.
  """
  if made.left_open:
    raise UserError(
      f"{made.kind} of '{made.reads()[0]}': {made.left_open} is left open; wanted the "
      'config of a run, which fills it in'
    )
  return importlib.import_module(f'trainer.data.columns.{made.kind}')
