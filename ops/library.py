"""The compiled ops, loaded once when first needed."""
import functools
import os

import tensorflow as tf

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), '_ctr_ops.so')


@functools.cache
def load(path=PATH):
  """The module of the op library's generated functions.

  Raises: ImportError where it is not built, or was built for another TensorFlow.
  """
  if not os.path.exists(path):
    raise ImportError(f'{path}: no such file; run `python -m ops.build` to compile the ops')
  try:
    return tf.load_op_library(path)
  except tf.errors.NotFoundError as e:
    raise ImportError(f'{path}: {e.message}; run `python -m ops.build` to compile the ops again') from None
