"""Reads samples from a prepared pass, a part of the log that was converted to arrays."""

from typing import NamedTuple

import numpy as np

from ops.library import load
from ops.tensors import to_tensor, view


class Samples(NamedTuple):
  """The columns of B samples, as in trainer.data.features.SlotBatch."""

  keys: np.ndarray  # int64 [nnz]
  values: np.ndarray  # float32 [nnz]; empty if all are 1
  segments: np.ndarray  # int32 [nnz]; empty if each slot of each sample has one feature
  dense: np.ndarray  # float32 [B, Dn]
  group: np.ndarray  # int64 [B], the key of each sample's group; empty without data.group


class SampleArrays:
  """The arrays of a prepared pass of n samples (docs/data.md), which are read without a copy.

  A field is what a slot holds in one sample: no feature, one or several. Each chunk of samples
  stores equal fields of a slot only once, and numbers its distinct fields.

  Args:
    codes: uint16 [n, W], the number of each sample's field in each slot. W is the number of slots,
      plus one if there is a group.
    bases: int64 [chunks, W, 2], where each chunk's fields of a slot begin in `splits`, and where
      their features begin in `keys`.
    keys: int64 [K], the features of all distinct fields.
    splits: uint32 [S], where the features of each distinct field begin; None if each has one.
    values: float32 [K], the values of the features; None if all are 1.
    dense: float32 [n, Dn], or None.
    slots: the number of slots, without the group.
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
    """Returns a batch of the samples at these indices, integers [B], in this order.

    Raises InvalidArgumentError if an index in `samples`, or in the arrays, is out of range.
    """
    columns = load().ctr_gather_samples(
      rows=to_tensor(samples.astype(np.int64)),
      slots=self._slots,
      chunk=self._chunk,
      **self._tensors,
    )
    return Samples(*map(np.asarray, columns))
