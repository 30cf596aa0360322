"""Recommends items, and looks up their texts; rows hold only hashes of the texts."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from absl import logging

from trainer.data.prepared import PreparedPass
from trainer.errors import UserError
from trainer.evaluation.task import TextsOf
from trainer.retrieval.items import Items
from trainer.retrieval.ranker import Ranker
from trainer.training.inputs import Inputs


def _named(slot: str, keys: np.ndarray, texts: Mapping[int, str]) -> np.ndarray:
  """Returns the texts of items, object [n], out of {key: text}; UserError if one is unknown."""
  if unknown := len(set(keys.tolist()) - texts.keys()):
    raise UserError(
      f"data.keep_texts: the texts of {unknown:,} of {len(keys):,} items of slot '{slot}' were not "
      f'kept, and no pass of data.train has them; wanted [{slot}] there when the run is trained'
    )
  return np.array([texts[key] for key in keys.tolist()], object)


def items_of(inputs: Inputs, texts: TextsOf) -> Items | None:
  """Returns all trained items, the most shown first, on process 0; None on the others.

  Every process calls it.
  """
  ranker, slot = Ranker(inputs), inputs.cfg.item_slot.name
  keys, vectors = ranker.all_item_vectors()
  table = ranker.catalogue.table
  known = texts(slot, keys) if table is None else table.texts

  def named() -> Items | None:
    if inputs.communicator.rank:
      return None
    return Items(keys, _named(slot, keys, known), vectors)

  return inputs.communicator.together('cannot name items', named)


def recommendations(
  inputs: Inputs, texts: TextsOf, prepared: Sequence[PreparedPass], k: int
) -> Iterator[pa.Table]:
  """Yields, on rank 0, the best k items of each sample: a table for each block of samples.

  Its columns are `sample` (from 0, in input order), `item` (its text) and `score`. Items that the
  sample's user already has in data.train or data.valid are left out, as Ranker.recommend says.
  """
  ranker, slot, done, few = Ranker(inputs), inputs.cfg.item_slot.name, 0, 0
  keys, names = np.zeros([0], np.int64), np.zeros([0], object)
  for items, scores in ranker.recommend(prepared, k):
    if inputs.communicator.rank == 0:
      if not done:
        keys, table = ranker.catalogue.keys, ranker.catalogue.table
        names = _named(slot, keys, texts(slot, keys) if table is None else table.texts)
      counts = (items >= 0).sum(1)
      few += int(((0 < counts) & (counts < k)).sum())
      sample, place = np.nonzero(items >= 0)
      item = names[np.searchsorted(keys, items[sample, place])]
      columns = {'sample': sample + done, 'item': item, 'score': scores[sample, place]}
      yield pa.table({name: pa.array(column) for name, column in columns.items()})
    done += len(items)
  if few:
    logging.warning(
      '%d of %d samples find fewer than %d items: of the %d in the catalogue, those are left out '
      'that their user has in data.train or data.valid',
      *(few, done, k, len(keys)),
    )
