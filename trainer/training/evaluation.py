"""Prediction and evaluation, shared by all processes of a job."""

import collections
from collections.abc import Iterator, Mapping, Sequence

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
from trainer.plain_data import Json
from trainer.training.inputs import Inputs
from trainer.training.ranking_evaluation import RankingEvaluation


class Evaluation:
  """Predicts passes with the current model, and measures the predictions.

  Attributes:
    predictions: the prediction_histogram (trainer.model.calibration) of the last evaluation; None
      before the first.
    slots_before: the results of SlotCalibration for the last 100 evaluations, oldest first.
  """

  def __init__(self, inputs: Inputs):
    cfg, self._inputs = inputs.cfg, inputs
    self._communicator, self._step = inputs.communicator, inputs.step
    self._grouped = cfg.data.group is not None
    predicts_clicks = cfg.model.loss != 'squared_error'
    self._kept_negatives = cfg.model.negative_sampling_rate if predicts_clicks else 1.0
    self._metrics, self._blank_told = MetricSums(cfg), False
    self._slots = [slot.name for slot in cfg.ordered_slots]
    # Each day or hour brings new values of these slots.
    self._times = {slot.name for slot in cfg.data.slots if isinstance(slot.made, config.Time)}
    self.predictions: np.ndarray | None = None
    self.slots_before: collections.deque[Mapping[str, Json]] = collections.deque(maxlen=100)
    self._predicted = SlotCalibration(self._slots)
    self._measure = tf.function(self._metrics.update, autograph=False, reduce_retracing=True)

  def predict(self, prepared: PreparedPass) -> Iterator[tuple[SlotBatch, np.ndarray]]:
    """Yields each of this process's batches, as tensors, and its probabilities, in order.

    The probabilities are NumPy arrays, float32 [B], or [B, T] with several tasks.
    """
    for staged in self._inputs.staged(prepared):
      self._inputs.progress_made()
      probabilities, known = self._step.predict_and_know(staged)
      self._predicted.update(staged.batch, known, probabilities)
      yield staged.batch, probabilities

  def tell_unknown(self) -> None:
    """Warns of slots in which unknown features have become far more frequent.

    A feature is unknown if the model was not trained on it. The samples that `predict` has scored
    since the last call are compared with earlier evaluations. Every process calls it.
    """
    state = self._communicator.sum_arrays(self._predicted.state())
    self._tell_unknown(self._predicted.result(state))
    self._predicted = SlotCalibration(self._slots)

  def _tell_unknown(self, by_slot: Mapping[str, Json]) -> None:
    if self._step.steps == 0:  # everything is unknown to an untrained model
      return
    if self._communicator.rank == 0:
      written = {name: of_slot for name, of_slot in by_slot.items() if name not in self._times}
      for text in unknown_jumps(written, self.slots_before):
        logging.warning('%s', text)
    self.slots_before.append(by_slot)

  def evaluate(
    self, prepared: Sequence[PreparedPass], in_log: bool = False
  ) -> dict[str, float | int | None]:
    """Predicts passes; returns metrics over the samples of all processes. Every process calls it.

    Args:
      in_log: whether the passes were sampled like the training log, that is, hold only the share
        model.negative_sampling_rate of the negatives. If so, the metrics use the probability of a
        click in such a log; otherwise they use the probability among all impressions.
    Returns:
      {name: figure}. A figure is None if the samples do not define it.

      - For clicks: auc, logloss, base_logloss, calibration, ctr, examples and, with data.group,
        gauc. Also the figures of trainer.model.calibration: deciles, ranking and spread.
      - For squared error: rmse, examples, and base_rmse (the RMSE of predicting the mean label for
        every sample).
      - With several tasks: the figures of the first task, and `tasks`, {name: figures of the task}.
      - `slots`: the result of SlotCalibration.
    """
    self._metrics.reset()
    slots = SlotCalibration(self._slots)
    columns = []  # for each batch: group, label, probability, weight
    for data_pass in prepared:
      for staged in self._inputs.staged(data_pass):
        self._inputs.progress_made()
        batch = staged.batch
        probabilities, known = self._step.predict_and_know(staged)
        if in_log and self._kept_negatives < 1:
          negatives = self._kept_negatives * (1 - probabilities)
          probabilities = probabilities / (probabilities + negatives)
        slots.update(batch, known, probabilities)
        self._measure(batch.label, to_tensor(probabilities), batch.weight)
        if self._grouped:
          group, label, weight = (t.numpy() for t in (batch.group, batch.label, batch.weight))
          columns.append((group, label, probabilities, weight))
    state = self._communicator.sum_arrays(self._metrics.state() | slots.state())
    by_slot = slots.result({'slots': state.pop('slots')})
    self._tell_unknown(by_slot)
    values = result(state)
    labels = self._inputs.cfg.labels
    histogram = state.get(f'{labels[0].name}/histogram' if len(labels) > 1 else 'histogram')
    if histogram is not None:
      values |= {'deciles': deciles(histogram), 'ranking': ranking(histogram)}
      values['spread'] = spread(histogram)
      self.predictions = prediction_histogram(histogram)
    if by_slot:
      values['slots'] = by_slot
    for t, label in enumerate(labels):
      if label.loss == 'squared_error':
        base = {'base_rmse': rmse_of_mean(prepared, t)}
        values |= base if t == 0 else {}
        if 'tasks' in values:
          values['tasks'][label.name] |= base
    if self._grouped:
      columns = self._with_group(columns)
    if self._grouped and 'tasks' in values:
      for t, of_task in enumerate(values['tasks'].values()):
        some = [(group, *(c[:, t] for c in rest)) for group, *rest in columns]
        of_task['gauc'] = group_auc(some, self._communicator)
      values['gauc'] = next(iter(values['tasks'].values()))['gauc']
    elif self._grouped:
      values['gauc'] = group_auc(columns, self._communicator)
    return values

  def _with_group(self, columns: list[tuple[np.ndarray, ...]]) -> list[tuple[np.ndarray, ...]]:
    """Leaves out the samples without a group, which are no group together; tells their share once.

    Args:
      columns: for each batch of this process: group, then other columns.
    """
    known = [group != BLANK_GROUP for group, *_ in columns]
    counts = np.array([sum(k.sum() for k in known), sum(k.size for k in known)], np.float64)
    kept, count = self._communicator.sum_arrays({'counts': counts})['counts']
    if kept < count and not self._blank_told:
      self._blank_told = True
      if self._communicator.rank == 0:
        logging.warning(
          'GAUC leaves out %.1f %% of the samples, whose data.group, %s, is blank (reported once)',
          *(100 * (1 - kept / count), self._inputs.cfg.data.group),
        )
    return [tuple(c[k] for c in batch) for k, batch in zip(known, columns)]


def rmse_of_mean(prepared: Sequence[PreparedPass], task: int) -> float | None:
  """Returns the weighted RMSE of predicting the mean label; None if the weights sum to 0.

  It needs no communication, because every process can read all passes.

  Args:
    task: the index of the label.
  """
  columns = [np.zeros([2, 0]), *(data_pass.labels(task) for data_pass in prepared)]
  labels, weights = (np.concatenate(parts) for parts in zip(*columns))
  if not weights.sum() > 0:
    return None
  mean = np.average(labels, weights=weights)
  return float(np.sqrt(np.average(np.square(labels - mean), weights=weights)))


def evaluation_of(inputs: Inputs) -> Evaluation | RankingEvaluation:
  """Returns a RankingEvaluation for a model with model.retrieval, else an Evaluation."""
  return (RankingEvaluation if inputs.cfg.model.retrieval else Evaluation)(inputs)


def group_auc(
  columns: Sequence[tuple[np.ndarray, ...]], communicator: Communicator
) -> float | None:
  """Returns GAUC: the mean of the groups' own AUC, weighted by impressions, over all processes.

  All samples of a group are sent to one process, so its AUC is exact. Every process calls it.

  Args:
    columns: for each batch of this process: group (int64), label, probability and weight (float32),
      each [B].
  Returns:
    None if no group has both a positive and a negative.
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
