"""Hashes columns of a log to keys, and encodes the fields of samples for a prepared pass.

A field is what a slot holds in one sample: no feature, one or several.
"""

import ctypes
import functools
from typing import NamedTuple

import numpy as np

from ops.library import PATH, load
from ops.tensors import borrow, to_tensor

NO_FEATURE = -1
MAX_SAMPLES = 65536  # the most that one call of `encode_fields` takes


class EncodedFields(NamedTuple):
  """The fields of n samples in F slots; a code is the number of a distinct field of its slot."""

  codes: np.ndarray  # uint16 [n, F]
  fields_of: np.ndarray  # int64 [F], the number of distinct fields of each slot
  # int32 [Σ fields_of]: how many features each distinct field has, ordered by slot, then by code.
  counts: np.ndarray
  keys: np.ndarray  # int64 [Σ counts], the features of the distinct fields, in the same order
  values: np.ndarray  # float32 [Σ counts]; empty if all are 1


def text_keys(values: np.ndarray, offsets: np.ndarray, slot_id: int) -> np.ndarray:
  """Hashes strings to keys as `trainer.data.features.hash_keys` does; NO_FEATURE for blank ones.

  `values`, uint8, are all strings' bytes; `offsets`, int32 [n + 1], say where they begin and end.
  """
  values, offsets = np.ascontiguousarray(values, np.uint8), np.ascontiguousarray(offsets, np.int32)
  n = len(offsets) - 1
  keys = np.empty([max(n, 0)], np.int64)
  text = values.ctypes.data, len(values), offsets.ctypes.data
  if n < 0 or not _functions().ctr_text_keys(*text, n, _checked(slot_id), keys.ctypes.data):
    raise ValueError(f'offsets: wanted at least one, ascending in [0, {len(values)}]')
  return keys


def integer_keys(values: np.ndarray, slot_id: int) -> np.ndarray:
  """Returns the keys of integers, int64 [n], which are hashed as their decimal texts."""
  values = np.ascontiguousarray(values, np.int64)
  keys = np.empty([len(values)], np.int64)
  _functions().ctr_integer_keys(
    values.ctypes.data, len(values), _checked(slot_id), keys.ctypes.data
  )
  return keys


@functools.cache
def _functions() -> ctypes.CDLL:
  """Returns the C functions of ops/cc/data/keys.h."""
  load()  # checks the library
  functions = ctypes.CDLL(PATH)
  pointer, number = ctypes.c_void_p, ctypes.c_int64
  functions.ctr_text_keys.argtypes = [pointer, number, pointer, number, number, pointer]
  functions.ctr_text_keys.restype = ctypes.c_bool
  functions.ctr_integer_keys.argtypes = [pointer, number, number, pointer]
  functions.ctr_integer_keys.restype = None
  return functions


def _checked(slot_id: int) -> int:
  if not 0 <= slot_id < 2048:
    raise ValueError(f'slot_id: found {slot_id}; wanted 0 to 2047')
  return slot_id


def encode_fields(
  keys: np.ndarray, values: np.ndarray | None, counts: np.ndarray | None, slots: int
) -> EncodedFields:
  """Numbers the distinct fields of samples, slot by slot, in the order of first occurrence.

  Args:
    keys: int64 [nnz], slot by slot, and sample by sample within a slot. An array that
      `ops.tensors.aligned` made is not copied.
    values: float32 [nnz]; None if all are 1, as they must be without `counts`.
    counts: int32 [F, n], the number of features in each field; n is at most MAX_SAMPLES. None if
      each field has one key, which may be NO_FEATURE.
    slots: F.
  """
  encoded = load().ctr_encode_fields(
    keys=borrow(keys),
    values=to_tensor(np.zeros([0], np.float32) if values is None else values),
    counts=to_tensor(np.reshape(() if counts is None else counts, -1).astype(np.int32)),
    slots=slots,
  )
  return EncodedFields(*(part.numpy() for part in encoded))
