"""Reads the texts of a request into the features of its samples, without TensorFlow."""

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ops.library import PATH, load


class TextSlot(NamedTuple):
  """A slot that is read from texts."""

  field: int  # its place among all slots
  slot_id: int  # of its keys
  separator: str = ''  # between the features of a text; '': a text is a feature
  most: int = 0  # features that a sample keeps, the last ones; 0: all
  has_markers: bool = True  # whether a text may be a marker of missing values


class _Layout(ctypes.Structure):
  """TextSlots of ops/cc/data/request.h."""

  _fields_ = (
    ('n', ctypes.c_int64),
    ('fields_of_model', ctypes.c_int64),
    *((name, ctypes.c_void_p) for name in ('fields', 'ids', 'separators', 'separator_sizes')),
    *((name, ctypes.c_void_p) for name in ('most', 'has_markers', 'markers')),
    ('num_markers', ctypes.c_int64),
  )


class RequestReader:
  """Reads the texts of slots, in the order of their fields; the model has `num_slots`, F.

  `markers` are the keys of slot id 0, int64 [m], of the texts that are missing values.
  """

  def __init__(self, slots: Sequence[TextSlot], num_slots: int, markers: np.ndarray):
    separators = [slot.separator.encode() for slot in slots]
    self._arrays = {
      'fields': np.array([slot.field for slot in slots], np.int32),
      'ids': np.array([slot.slot_id for slot in slots], np.int64),
      'separators': np.frombuffer(b''.join(separators) + b'\0', np.uint8),
      'separator_sizes': np.array([len(separator) for separator in separators], np.int32),
      'most': np.array([slot.most for slot in slots], np.int32),
      'has_markers': np.array([slot.has_markers for slot in slots], bool),
      'markers': np.array(markers, np.int64),
    }
    pointers = {name: array.ctypes.data for name, array in self._arrays.items()}
    self._layout = _Layout(len(slots), num_slots, num_markers=len(markers), **pointers)
    self._functions = _functions()

  def read(
    self, texts: bytes, counts: Sequence[int], is_shared: Sequence[bool], shared: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Reads `texts`, UTF-8, slot by slot, with line ends between; None if a text has a line end.

    Args:
      counts: of each slot, how many texts it has: one for each of B samples, or C that they share.
      is_shared: of each slot, whether samples share its texts.
      shared: int32 [B], for each sample, which of the C texts it has.
    Returns:
      The keys of features, int64 [u]; for each of the n features of samples, its place among these,
      int32 [n]; and sample * F + field, int32 [n], or [0] if each slot of each has one feature.
    """
    counts, is_shared = np.array(counts, np.int64), np.array(is_shared, bool)
    shared = np.ascontiguousarray(shared, np.int32)
    if not len(counts) == len(is_shared) == self._layout.n:
      raise ValueError(f'counts: found {len(counts)}; wanted {self._layout.n}, one of each slot')
    sizes = np.empty([3], np.int64)
    if not self._functions.ctr_read_request(
      ctypes.byref(self._layout),
      texts,
      len(texts),
      counts.ctypes.data,
      is_shared.ctypes.data,
      shared.ctypes.data,
      len(shared),
      sizes.ctypes.data,
    ):
      return None
    u, n, with_segments = sizes.tolist()
    found = np.empty([u], np.int64), np.empty([n], np.int32), np.empty([with_segments], np.int32)
    self._functions.ctr_take_request(*(array.ctypes.data for array in found))
    return found


@functools.cache
def _functions() -> ctypes.CDLL:
  """Returns the C functions of ops/cc/data/request.h."""
  load()  # checks the library
  functions = ctypes.CDLL(PATH)
  pointer, number = ctypes.c_void_p, ctypes.c_int64
  functions.ctr_read_request.argtypes = [
    *(pointer, ctypes.c_char_p, number, pointer, pointer, pointer, number, pointer),
  ]
  functions.ctr_read_request.restype = ctypes.c_bool
  functions.ctr_take_request.argtypes = [pointer, pointer, pointer]
  functions.ctr_take_request.restype = None
  return functions
