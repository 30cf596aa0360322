"""The task of a config with model.retrieval: to find items for queries."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from absl import logging

from trainer.comm.communicator import Communicator
from trainer.data.prepared import PreparedPass
from trainer.errors import UserError
from trainer.evaluation.evaluators import Evaluator
from trainer.evaluation.task import Task, TextsOf
from trainer.plain_data import Json
from trainer.retrieval.dense_part import RetrievalPart
from trainer.retrieval.evaluation import RankingEvaluation
from trainer.retrieval.items import Items
from trainer.retrieval.ranker import Ranker
from trainer.training.inputs import Inputs
from trainer.training.step import TrainStep


class RetrievalTask(Task):
  exports = ('items', 'delta', 'saved_model')
  scores_samples = False

  def step(self, communicator: Communicator, dense_dtype: str | None = None) -> TrainStep:
    return TrainStep(self._cfg, communicator, RetrievalPart(self._cfg, communicator))

  def evaluator(self, inputs: Inputs, slots_before: Iterable[Mapping[str, Json]] = ()) -> Evaluator:
    return RankingEvaluation(self._cfg.model.retrieval, Ranker(self._cfg, inputs))

  def items(self, inputs: Inputs, texts: TextsOf) -> Items | None:
    """Returns, on process 0, all trained items, the most shown first; None on the others."""
    ranker = Ranker(self._cfg, inputs)
    keys, vectors = ranker.all_item_vectors()
    known = self._texts(ranker, keys, texts)

    def named() -> Items | None:
      if inputs.communicator.rank:
        return None
      return Items(keys, self._named(keys, known), vectors)

    return inputs.communicator.together('cannot name items', named)

  def recommendations(
    self, inputs: Inputs, texts: TextsOf, prepared: Sequence[PreparedPass], k: int
  ) -> Iterator[pa.Table]:
    """Yields a table for each block of samples; Ranker.recommend says which items are left out."""
    ranker, done, few = Ranker(self._cfg, inputs), 0, 0
    keys, names = np.zeros([0], np.int64), np.zeros([0], object)
    for items, scores in ranker.recommend(prepared, k):
      if inputs.communicator.rank == 0:
        if not done:
          keys = ranker.catalogue.keys
          names = self._named(keys, self._texts(ranker, keys, texts))
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

  def _texts(self, ranker: Ranker, keys: np.ndarray, texts: TextsOf) -> Mapping[int, str]:
    """Returns {key: text} of items; rows hold only hashes of the texts."""
    table = ranker.catalogue.table
    return texts(self._cfg.item_slot.name, keys) if table is None else table.texts

  def _named(self, keys: np.ndarray, texts: Mapping[int, str]) -> np.ndarray:
    """Returns the texts of items, object [n], out of {key: text}; UserError if one is unknown."""
    if unknown := len(set(keys.tolist()) - texts.keys()):
      slot = self._cfg.item_slot.name
      raise UserError(
        f"data.keep_texts: the texts of {unknown:,} of {len(keys):,} items of slot '{slot}' were "
        f'not kept, and no pass of data.train has them; wanted [{slot}] there when the run is '
        'trained'
      )
    return np.array([texts[key] for key in keys.tolist()], object)
