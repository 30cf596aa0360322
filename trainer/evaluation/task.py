"""The task of a model: what it learns to do, and what trains, judges and answers for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from trainer.comm.communicator import Communicator
from trainer.config import Config
from trainer.data.prepared import PreparedPass
from trainer.evaluation.evaluators import Evaluation, Evaluator
from trainer.plain_data import Json
from trainer.storage.export_writer import Items
from trainer.training.dense_part import DensePart
from trainer.training.inputs import Inputs
from trainer.training.step import TrainStep
from trainer.wings import wing

# (slot, keys) -> {key: text}: all texts of the slot's features that the run has kept, and those of
# `keys` that were found elsewhere.
TextsOf = Callable[[str, np.ndarray], Mapping[int, str]]


class Task:
  """To predict labels, such as clicks; wings derive other tasks from it.

  A config with model.tasks has one such Task too, of several labels.
  """

  # The kinds of the exports of its models; the first is the one that begins a chain.
  exports: tuple[str, ...] = ('base', 'delta', 'saved_model')
  # Whether each sample has a prediction, whose error columns and slices may account for.
  scores_samples = True

  def __init__(self, cfg: Config):
    self._cfg = cfg

  def step(self, communicator: Communicator, dense_dtype: str | None = None) -> TrainStep:
    """Returns the training step of a rank; `dense_dtype` is that of DensePart."""
    dense = DensePart(self._cfg, communicator.all_reduce_with_gradient, dense_dtype)
    return TrainStep(self._cfg, communicator, dense)

  def evaluator(self, inputs: Inputs, slots_before: Iterable[Mapping[str, Json]] = ()) -> Evaluator:
    """Returns what judges its models; `slots_before` is that of Evaluation."""
    return Evaluation(self._cfg, inputs, slots_before)

  def items(self, inputs: Inputs, texts: TextsOf) -> Items | None:
    """Returns, on process 0, the items that exports hold beside rows; None if it finds no items.

    Every process calls it, and calls `texts`, whose result on process 0 counts.
    """
    return None

  def recommendations(
    self, inputs: Inputs, texts: TextsOf, prepared: Sequence[PreparedPass], k: int
  ) -> Iterator[pa.Table] | None:
    """Yields, on rank 0, tables of the best k items of each sample; None if it finds no items.

    Every process calls it; rank 0 calls `texts`. The columns are `sample` (from 0, in input order),
    `item` and `score`.
    """
    return None


def task_of(cfg: Config) -> Task:
  return (Task if cfg.model.retrieval is None else wing('retrieval.task'))(cfg)
