"""Turns NumPy arrays into tensors, which share the arrays' memory or have a copy."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

ALIGNMENT = 64  # bytes; TensorFlow's kernels rely on it


def aligned(shape: Sequence[int], dtype: npt.DTypeLike) -> np.ndarray:
  """Returns an uninitialised array whose memory is aligned to 64 bytes, as a tensor's is."""
  size = math.prod(shape) * np.dtype(dtype).itemsize
  memory = np.empty(size + ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % ALIGNMENT
  return memory[start : start + size].view(dtype).reshape(shape)


def share(array: np.ndarray) -> tf.Tensor:
  """Returns a tensor that shares the memory of an aligned, writeable array; change neither then.

  In TensorFlow 2.16, tf.constant would leak 340 bytes at each call.
  """
  if not array.size:
    return _empty(array.dtype.name, array.shape)
  return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def borrow(array: np.ndarray) -> tf.Tensor:
  """Returns a tensor that shares a contiguous, writeable, aligned array's memory; else a copy."""
  flags = array.flags
  fits = flags.c_contiguous and flags.writeable and array.ctypes.data % ALIGNMENT == 0
  return share(array) if fits else to_tensor(array)


class _Writeable:
  """Lets np.asarray make a writeable view of a read-only array, and keeps that array alive."""

  def __init__(self, array: np.ndarray):
    self._array = array
    address = array.__array_interface__['data'][0]
    self.__array_interface__ = array.__array_interface__ | {'data': (address, False)}


def view(array: np.ndarray) -> tf.Tensor:
  """Returns a tensor that shares the memory of a contiguous array, which may be a mapped file.

  Pass it only to `CtrGatherSamples`, which needs no alignment and does not write to inputs.
  """
  return share(np.asarray(_Writeable(array)))


def to_tensor(array: npt.ArrayLike) -> tf.Tensor:
  """Returns a tensor with a copy of an array."""
  array = np.asarray(array)
  copy = aligned(array.shape, array.dtype)
  copy[...] = array
  return share(copy)


@functools.cache
def _empty(dtype: str, shape: tuple[int, ...]) -> tf.Tensor:
  return tf.zeros(shape, dtype)
