"""The kinds of made columns: the module that computes each."""

import importlib
import types

from trainer import config


def kind_of(made: config.Made) -> types.ModuleType:
  """Returns the module of a kind, with its two faces.

  `arrow(made, reader)` returns a column [n] as a file could hold it, of an ArrowReader's columns;
  `graph(made, reader)` a GraphColumn of a GraphReader's, in plain TensorFlow ops. Keys and float32
  numbers of both are equal to the bit.
  """
  return importlib.import_module(f'trainer.data.columns.{made.kind}')
