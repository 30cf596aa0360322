"""Loads the compiled library of ops, once, when an op is first needed."""

import ctypes
import functools
import os
import types

import tensorflow as tf

# TensorFlow's deleter is private, but the alternative, DestroyResourceOp at the end of an object's
# life, fails if the garbage collector runs while a v1 graph is being built.
# tests/single/training/private_api_test.py fails when TensorFlow moves the deleter.
from tensorflow.python.ops import resource_variable_ops

from ops import build

PATH = build.library_path()

TensorLike = tf.types.experimental.TensorLike


@functools.cache
def load(path: str = PATH) -> types.ModuleType:
  """Returns a module with a function for each op; NotBuilt if the library is another build's."""
  sources = build.digest() if path == PATH else None
  compile_again = 'run `python -m ops.build` to compile the ops again'
  if not os.path.exists(path):
    if path == PATH and sources is None:  # an installed package has no sources to compile
      raise build.NotBuilt(
        f'{path}: this package was built for another TensorFlow than {tf.__version__}, which is '
        'installed here; install the TensorFlow that the package asks for, or build it again'
      )
    raise build.NotBuilt(f'{path}: no such file; run `python -m ops.build` to compile the ops')
  try:
    module = tf.load_op_library(path)
  except tf.errors.NotFoundError as e:
    raise build.NotBuilt(f'{path}: {e.message}; {compile_again}') from None
  if sources is not None:
    built_from = (ctypes.c_char * len(sources)).in_dll(ctypes.CDLL(path), 'ctr_sources')
    if built_from.value != sources.encode():
      raise build.NotBuilt(f'{path}: was built from other sources; {compile_again}')
  return module


class ResourceDeleter(resource_variable_ops.EagerResourceDeleter):
  """Deletes an eager resource once unreferenced; TensorFlow's own allows no weak references."""

  def __init__(self, handle: tf.Tensor):
    super().__init__(handle=handle, handle_device=handle.device)
