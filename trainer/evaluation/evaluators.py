"""What judges a model by passes."""

import abc
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from ops.tensors import to_tensor
from trainer import config
from trainer.comm.communicator import Communicator
from trainer.data.features import SlotBatch
from trainer.data.parse import BLANK_GROUP
from trainer.data.prepared import PreparedPass
from trainer.model.calibration import (
  SlotCalibration,
  deciles,
  prediction_histogram,
  ranking,
  spread,
  unknown_jumps,
)
from trainer.model.metrics import MetricSums, group_auc_sums, result
from trainer.plain_data import Json, JsonObject
from trainer.training.inputs import Inputs


class Evaluator(abc.ABC):
  """Judges a model by passes."""

  # The prediction_histogram (trainer.model.calibration) of the last call, or None.
  predictions: np.ndarray | None = None

  @abc.abstractmethod
  def figures(
    self, prepared: Sequence[PreparedPass], in_log: bool = False
  ) -> Iterator[tuple[str, Json]]:
    """Yields the name and the value of each figure over the samples of all processes.

    A value is None if the samples do not define it. All evaluators yield `examples`. Every process
    calls it. `in_log` says that the passes were sampled like the training log, that is, hold only
    the share model.negative_sampling_rate of the negatives.
    """


class Evaluation(Evaluator):
  """Predicts the labels of samples, and measures the predictions.

  `slots_before` has the figure `slots` of earlier evaluations, oldest first.
  """

  def __init__(
    self, cfg: config.Config, inputs: Inputs, slots_before: Iterable[Mapping[str, Json]] = ()
  ):
    self._cfg, self._inputs = cfg, inputs
    self._communicator, self._step = inputs.communicator, inputs.step
    self._grouped = cfg.data.group is not None
    predicts_clicks = cfg.model.loss != 'squared_error'
    self._kept_negatives = cfg.model.negative_sampling_rate if predicts_clicks else 1.0
    self._metrics, self._blank_told = MetricSums(cfg.kinds_of_labels), False
    # Each day or hour brings new values of these slots.
    self._times = {slot.name for slot in cfg.data.slots if isinstance(slot.made, config.Time)}
    self._slots_before = collections.deque(slots_before, maxlen=100)
    self._begin()
    self._measure = tf.function(self._metrics.update, autograph=False, reduce_retracing=True)

  def _begin(self) -> None:
    self._slots = SlotCalibration([slot.name for slot in self._cfg.ordered_slots])

  def predict(
    self, prepared: PreparedPass, in_log: bool = False
  ) -> Iterator[tuple[SlotBatch, np.ndarray]]:
    """Yields each of this process's batches, as tensors, and its probabilities, in order.

    The probabilities are NumPy arrays, float32 [B], or [B, T] with several tasks.
    """
    for staged in self._inputs.staged(prepared):
      self._inputs.progress_made()
      probabilities, known = self._step.predict_and_know(staged)
      if in_log and self._kept_negatives < 1:
        negatives = self._kept_negatives * (1 - probabilities)
        probabilities = probabilities / (probabilities + negatives)
      self._slots.update(staged.batch, known, probabilities)
      yield staged.batch, probabilities

  def tell_unknown(self) -> JsonObject:
    """Warns of slots in which unknown features have become far more frequent.

    A feature is unknown if it has no row. The samples that `predict` has scored since the last call
    are compared with earlier evaluations. Returns the figure `slots`.
    """
    by_slot = self._slots.result(self._communicator.sum_arrays(self._slots.state()))
    self._begin()
    if self._step.steps == 0:  # everything is unknown to an untrained model
      return by_slot
    if self._communicator.rank == 0:
      written = {name: of_slot for name, of_slot in by_slot.items() if name not in self._times}
      for text in unknown_jumps(written, self._slots_before):
        logging.warning('%s', text)
    self._slots_before.append(by_slot)
    return by_slot

  def figures(
    self, prepared: Sequence[PreparedPass], in_log: bool = False
  ) -> Iterator[tuple[str, Json]]:
    """Yields figures of the predictions.

    - For clicks: auc, logloss, base_logloss, calibration, ctr, examples and, with data.group, gauc.
      Also the figures of trainer.model.calibration: deciles, ranking and spread.
    - For squared error: rmse, examples, and base_rmse (the RMSE of predicting the mean label for
      every sample).
    - With several tasks: the figures of the first task, and `tasks`, {name: figures of the task}.
    - `slots`: the result of SlotCalibration.

    With `in_log`, the figures use the probability of a click in the training log; otherwise the
    probability among all impressions.
    """
    self._metrics.reset()
    self._begin()
    columns = []  # for each batch: group, label, probability, weight
    for batch, probabilities in (pair for p in prepared for pair in self.predict(p, in_log)):
      self._measure(batch.label, to_tensor(probabilities), batch.weight)
      if self._grouped:
        group, label, weight = (t.numpy() for t in (batch.group, batch.label, batch.weight))
        columns.append((group, label, probabilities, weight))
    by_slot, state = self.tell_unknown(), self._communicator.sum_arrays(self._metrics.state())
    values, labels = result(state), self._cfg.labels
    histogram = state.get(f'{labels[0].name}/histogram' if len(labels) > 1 else 'histogram')
    if histogram is not None:
      values |= {'deciles': deciles(histogram), 'ranking': ranking(histogram)}
      values['spread'] = spread(histogram)
      self.predictions = prediction_histogram(histogram)
    if by_slot:
      values['slots'] = by_slot
    if self._grouped:
      columns = self._with_group(columns)
    for t, (label, of_task) in enumerate(zip(labels, values.get('tasks', {'': values}).values())):
      if label.loss == 'squared_error':
        of_task['base_rmse'] = rmse_of_mean(prepared, t)
      if self._grouped:
        shaped = ((g, *(c.reshape(len(g), len(labels)) for c in rest)) for g, *rest in columns)
        some = [(group, *(c[:, t] for c in rest)) for group, *rest in shaped]
        of_task['gauc'] = group_auc(some, self._communicator)
      if t == 0:
        values |= of_task
    yield from values.items()

  def _with_group(self, columns: list[tuple[np.ndarray, ...]]) -> list[tuple[np.ndarray, ...]]:
    """Leaves out the samples without a group, and warns of their share once.

    `columns` has, for each batch, arrays [B], the first of which is the samples' groups.
    """
    known = [group != BLANK_GROUP for group, *_ in columns]
    counts = np.array([sum(k.sum() for k in known), sum(k.size for k in known)], np.float64)
    kept, count = self._communicator.sum_arrays({'counts': counts})['counts']
    if kept < count and not self._blank_told:
      self._blank_told = True
      if self._communicator.rank == 0:
        logging.warning(
          'GAUC leaves out %.1f %% of the samples, whose data.group, %s, is blank (reported once)',
          *(100 * (1 - kept / count), self._cfg.data.group),
        )
    return [tuple(c[k] for c in batch) for k, batch in zip(known, columns)]


def rmse_of_mean(prepared: Sequence[PreparedPass], task: int) -> float | None:
  """Returns the weighted RMSE of predicting the mean label; None if the weights sum to 0.

  It needs no communication, because every process can read all passes.
  """
  columns = [np.zeros([2, 0]), *(data_pass.labels(task) for data_pass in prepared)]
  labels, weights = (np.concatenate(parts) for parts in zip(*columns))
  if not weights.sum() > 0:
    return None
  mean = np.average(labels, weights=weights)
  return float(np.sqrt(np.average(np.square(labels - mean), weights=weights)))


def group_auc(
  columns: Sequence[tuple[np.ndarray, ...]], communicator: Communicator
) -> float | None:
  """Returns GAUC: the mean of the groups' own AUC, weighted by impressions, over all processes.

  All samples of a group are sent to one process, so its AUC is exact. The result is None if no
  group has both a positive and a negative. Every process calls it; `columns` are, for each of its
  batches, group (int64), label, probability and weight (float32), each [B].
  """
  size = communicator.size
  empty = [np.zeros([0], np.int64)] + [np.zeros([0], np.float32)] * 3
  own = [np.concatenate(parts) for parts in zip(empty, *columns)]
  to = own[0] % size
  received = communicator.exchange([[c[to == r] for c in own] for r in range(size)])
  groups, labels, probabilities, weights = (np.concatenate(parts) for parts in zip(*received))
  sums = group_auc_sums(labels, probabilities, groups, weights)
  total, weight = communicator.sum_arrays({'gauc': np.array(sums, np.float64)})['gauc']
  return float(total / weight) if weight > 0 else None
