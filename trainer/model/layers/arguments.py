"""Checks of the arguments that several layers take."""

import tensorflow as tf

from trainer.errors import short


def check_whole(name: str, value: object, or_null: bool = False) -> None:
  """Raises ValueError unless `value` is a whole number >= 1 or, if `or_null`, None."""
  if not (or_null and value is None) and (type(value) is not int or value < 1):
    wanted = 'a whole number >= 1' + ' or null' * or_null
    raise ValueError(f'{name}: found {short(value)}; wanted {wanted}')


def check_widths(name: str, value: object) -> None:
  """Raises ValueError unless `value` is a list of whole numbers >= 1."""
  if not isinstance(value, (list, tuple)) or not all(type(h) is int and h > 0 for h in value):
    raise ValueError(f'{name}: found {short(value)}; wanted a list of whole numbers >= 1')


def check_perceptron(hidden: object, activation: object, dropout: object) -> None:
  """Raises ValueError unless the arguments are valid for a multilayer perceptron."""
  check_widths('hidden', hidden)
  if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
    raise ValueError(f'dropout: found {short(dropout)}; wanted a number in [0, 1)')
  named = isinstance(activation, str) and getattr(tf.keras.activations, activation, None)
  if not callable(named):
    raise ValueError(
      f"activation: found {short(activation)}; wanted the name of a Keras activation, as 'relu'"
    )
