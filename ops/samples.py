"""Reads samples of a prepared pass by their indices; docs/data.md describes the format."""

from typing import NamedTuple

import numpy as np

from ops.library import load
from ops.tensors import to_tensor, view


class Samples(NamedTuple):
  """B samples, with the columns of trainer.data.features.SlotBatch."""

  keys: np.ndarray  # int64 [nnz]
  values: np.ndarray  # float32 [nnz]; empty if all are 1
  segments: np.ndarray  # int32 [nnz]; empty if each slot of each sample has one feature
  dense: np.ndarray  # float32 [B, Dn]
  group: np.ndarray  # int64 [B]; empty without a group


class SampleArrays:
  """The arrays of a prepared pass, which are read without a copy; docs/data.md describes each.

  Args:
    codes: uint16 [n, W], where W is the number of slots, or one more for the group.
    bases: int64 [chunks, W, 2].
    keys: int64 [K], the features of all distinct fields.
    splits: uint32 [S], where the features of each distinct field begin; None if every field has one
      feature.
    values: float32 [K]; None if all are 1.
    dense: float32 [n, Dn]; None if there are no dense columns.
    slots: F, the number of slots.
    chunk: the number of samples in a chunk.
  """

  def __init__(
    self,
    codes: np.ndarray,
    bases: np.ndarray,
    keys: np.ndarray,
    splits: np.ndarray | None,
    values: np.ndarray | None,
    dense: np.ndarray | None,
    slots: int,
    chunk: int,
  ):
    arrays = {
      'codes': codes,
      'bases': bases,
      'keys': keys,
      'splits': np.zeros([0], np.uint32) if splits is None else splits,
      'values': np.zeros([0], np.float32) if values is None else values,
      'dense': np.zeros([len(codes), 0], np.float32) if dense is None else dense,
    }
    self._slots, self._chunk = slots, chunk
    self._tensors = {name: view(array) for name, array in arrays.items()}

  def gather(self, samples: np.ndarray) -> Samples:
    """Returns a batch of the samples at these indices, in their order.

    Args:
      samples: the indices of the samples in the pass, integers [B].
    Raises:
      InvalidArgumentError: if an index, or a value that the arrays hold at it, is out of range.
    """
    columns = load().ctr_gather_samples(
      rows=to_tensor(samples.astype(np.int64)),
      slots=self._slots,
      chunk=self._chunk,
      **self._tensors,
    )
    return Samples(*map(np.asarray, columns))
