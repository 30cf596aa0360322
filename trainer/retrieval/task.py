"""The task to find items for queries, of a config with model.retrieval."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from trainer.comm.communicator import Communicator
from trainer.config import Config
from trainer.data.prepared import PreparedPass
from trainer.evaluation.task import Task, TextsOf
from trainer.plain_data import Json
from trainer.retrieval.dense_part import RetrievalPart
from trainer.retrieval.evaluation import RankingEvaluation
from trainer.retrieval.items import Items
from trainer.retrieval.recommendations import items_of, recommendations
from trainer.training.inputs import Inputs
from trainer.training.step import TrainStep


class _Retrieval(Task):
  exports = ('items', 'delta', 'saved_model')

  def step(
    self, cfg: Config, communicator: Communicator, dense_dtype: str | None = None
  ) -> TrainStep:
    return TrainStep(cfg, communicator, RetrievalPart(cfg, communicator))

  def evaluator(
    self, inputs: Inputs, slots_before: Iterable[Mapping[str, Json]] = ()
  ) -> RankingEvaluation:
    return RankingEvaluation(inputs)

  def items(self, inputs: Inputs, texts: TextsOf) -> Items | None:
    return items_of(inputs, texts)

  def recommendations(
    self, inputs: Inputs, texts: TextsOf, prepared: Sequence[PreparedPass], k: int
  ) -> Iterator[pa.Table]:
    return recommendations(inputs, texts, prepared, k)


RETRIEVAL = _Retrieval()
