"""Recommends items, and looks up their texts; rows hold only hashes of the texts."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from absl import logging

from trainer import config
from trainer.data.prepared import PreparedPass
from trainer.errors import UserError
from trainer.evaluation.finished_run import FinishedRun
from trainer.retrieval.items import Items
from trainer.retrieval.ranker import Ranker
from trainer.storage.checkpoint_reader import CheckpointReader


def texts_of_items(cfg: config.Config, keys: np.ndarray, texts: Mapping[int, str]) -> np.ndarray:
  """Returns the texts of items, object [n], out of {key: text}; UserError if one is unknown."""
  if unknown := len(set(keys.tolist()) - texts.keys()):
    slot = cfg.item_slot.name
    raise UserError(
      f"data.keep_texts: the texts of {unknown:,} of {len(keys):,} items of slot '{slot}' were not "
      f'kept, and no pass of data.train has them; wanted [{slot}] there when the run is trained'
    )
  return np.array([texts[key] for key in keys.tolist()], object)


def _texts(run: FinishedRun, ranker: Ranker, keys: np.ndarray) -> np.ndarray:
  if (table := ranker.catalogue.table) is not None:
    return texts_of_items(run.cfg, keys, table.texts)
  texts = CheckpointReader(run.cfg.run_dir, run.checkpoint).texts(run.cfg.item_slot.name, keys)
  return texts_of_items(run.cfg, keys, texts)


def items_of(run: FinishedRun) -> Items:
  """Returns the trained items of a run that a single process has opened, the most shown first."""
  ranker = Ranker(run.inputs)
  keys, vectors = ranker.all_item_vectors()
  return Items(keys, _texts(run, ranker, keys), vectors)


def recommendations(
  run: FinishedRun, prepared: Sequence[PreparedPass], k: int
) -> Iterator[pa.Table]:
  """Yields, on rank 0, tables with the best k items of each sample. Every rank calls it.

  What Ranker.recommend says of a user's items in data.train and data.valid is left out.

  Yields:
    A table for each block of samples, with a row per item, the best item of a sample first. Its
    columns: `sample` (int64, from 0 in input order), `item` (string) and `score` (float32).
  """
  ranker, done, few = Ranker(run.inputs), 0, 0
  keys, texts = np.zeros([0], np.int64), np.zeros([0], object)
  for items, scores in ranker.recommend(prepared, k):
    if run.communicator.rank == 0:
      if not done:
        keys = ranker.catalogue.keys
        texts = _texts(run, ranker, keys)
      counts = (items >= 0).sum(1)
      few += int(((0 < counts) & (counts < k)).sum())
      sample, place = np.nonzero(items >= 0)
      item = texts[np.searchsorted(keys, items[sample, place])]
      columns = {'sample': sample + done, 'item': item, 'score': scores[sample, place]}
      yield pa.table({name: pa.array(column) for name, column in columns.items()})
    done += len(items)
  if few:
    logging.warning(
      '%d of %d samples find fewer than %d items: of the %d in the catalogue, those are left out '
      'that their user has in data.train or data.valid',
      *(few, done, k, len(keys)),
    )
