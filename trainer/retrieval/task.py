"""The task of a config with model.retrieval: to find items for queries."""

from trainer.comm.communicator import Communicator
from trainer.config import Config
from trainer.evaluation.task import Task
from trainer.retrieval.dense_part import RetrievalPart
from trainer.retrieval.evaluation import RankingEvaluation
from trainer.retrieval.recommendations import items_of, recommendations
from trainer.training.step import TrainStep


class _Retrieval(Task):
  exports = ('items', 'delta', 'saved_model')
  evaluator = RankingEvaluation
  items = staticmethod(items_of)
  recommendations = staticmethod(recommendations)

  def step(
    self, cfg: Config, communicator: Communicator, dense_dtype: str | None = None
  ) -> TrainStep:
    return TrainStep(cfg, communicator, RetrievalPart(cfg, communicator))


RETRIEVAL = _Retrieval()
