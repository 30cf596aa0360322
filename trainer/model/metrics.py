"""Metrics computed from running sums; the sums of several steps, ranks or passes can be added."""

import functools
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from ops import library
from trainer.plain_data import JsonObject

State = dict[str, np.ndarray]

# The op divides each octave of |logit| from 2^-20 to 2^5 into equally many buckets. The bits of
# positive float32 numbers, read as integers, have the order of the numbers.
_LEAST_BITS, _BITS = (127 - 20) << 23, 25 << 23


def bucket_logits(buckets: int) -> np.ndarray:
  """Returns the logits in the middle of the buckets, float64 [buckets], ascending."""
  half = buckets // 2
  bits = _LEAST_BITS + (np.arange(half) + 0.5) * (_BITS / half)
  positive = bits.astype(np.int32).view(np.float32).astype(np.float64)
  return np.concatenate([-positive[::-1], positive])


class _Sums:
  """Sums over the samples of one task, of a kind: clicks, squared_error, or losses of retrieval."""

  def __init__(self, kind: str, buckets: int, name: str):
    self._kind, self._buckets = kind, buckets
    shapes = {
      'clicks': {'sums': [8], 'histogram': [2, buckets]},
      'squared_error': {'errors': [4], 'labels': [4], 'squares': [4]},
      'losses': {'losses': [4]},
    }[kind]
    with tf.device('CPU:0'):
      self.state = {
        key: tf.Variable(tf.zeros(shape, tf.float64), trainable=False, name=f'metrics_{name}{key}')
        for key, shape in shapes.items()
      }

  def update(self, labels: tf.Tensor, probabilities: tf.Tensor, weights: tf.Tensor) -> None:
    """Adds a batch; the arguments are those of `MetricSums.update` for one task."""
    sums, *others = (variable.handle for variable in self.state.values())
    histogram = others if self._kind == 'clicks' else []
    add = functools.partial(library.load().ctr_metric_sums, buckets=self._buckets)
    add(labels, probabilities, weights, sums, histogram, kind=self._kind)
    if self._kind == 'squared_error':
      add(labels, labels, weights, others[0], [], kind='losses')
      add(labels, tf.zeros_like(labels), weights, others[1], [], kind='squared_error')


class MetricSums:
  """Sums over the samples seen since the last `reset`; `update` works inside a tf.function.

  A state is {name: float64 array}:
    histogram [2, buckets], for clicks: the weight of negatives, and of positives, in each bucket of
      the predicted probability, from which AUC is computed; `buckets` is even
    sums [8], for clicks: Σ weight, the number of samples, Σ weight·log loss, Σ weight·predicted,
      Σ weight·clicked, the number of samples of weight above 0, Σ weight², Σ weight²·clicked
    errors [4], for squared error: Σ weight, the number of samples, Σ weight·error², the number of
      samples of weight above 0
    labels [4] and squares [4], for squared error: the same with Σ weight·label and Σ weight·label²
    losses [4], for model.retrieval: the same with Σ weight·loss
  With several tasks there is one array for each task, named as in `TASK/histogram`.
  """

  def __init__(self, kinds: Mapping[str, str], buckets: int = 100_000):
    """`kinds` are Config.kinds_of_labels."""
    prefixes = [f'{name}/' for name in kinds] if len(kinds) > 1 else ['']
    self._tasks = [_Sums(kind, buckets, prefix) for kind, prefix in zip(kinds.values(), prefixes)]
    self._state = {
      prefix + key: variable
      for prefix, sums in zip(prefixes, self._tasks)
      for key, variable in sums.state.items()
    }

  def update(self, labels: tf.Tensor, probabilities: tf.Tensor, weights: tf.Tensor) -> None:
    """Adds a batch, float32 [B] each, or [B, T] with several tasks.

    `probabilities` are predictions for squared error, and the losses for retrieval.
    """
    count = len(self._tasks)
    columns = [(labels, probabilities, weights)]
    if count > 1:
      columns = zip(*(tf.unstack(t, count, 1) for t in (labels, probabilities, weights)))
    for sums, column in zip(self._tasks, columns):
      sums.update(*column)

  def state(self) -> State:
    """Returns the sums as {name: array}; add the arrays of several states name by name."""
    return {name: v.numpy() for name, v in self._state.items()}

  def load(self, state: Mapping[str, np.ndarray]) -> None:
    for name, variable in self._state.items():
      variable.assign(_complete(state[name]))

  def reset(self) -> None:
    for variable in self._state.values():
      variable.assign(tf.zeros_like(variable))


def _complete(sums: np.ndarray) -> np.ndarray:
  """Adds the sums that a checkpoint of version 0.2 lacks, as if all its weights were 1."""
  lacking = {5: [1, 0, 4], 3: [1]}.get(len(sums))
  return np.append(sums, sums[lacking]) if lacking else sums


def _ratio(a: float, b: float) -> float | None:
  return float(a / b) if b > 0 else None


def result(state: Mapping[str, np.ndarray]) -> JsonObject:
  """Returns the metrics of a state, or of a sum of states, {metric: value}.

  For clicks: auc, logloss, base_logloss (the log loss of predicting the share of clicks for every
  sample), calibration (Σ predicted / Σ clicked), ctr (the share of clicks), and the effective
  numbers of samples of unequal weights (Kish 1965), effective_clicks of those with a click and
  effective_others of those without. For squared error: rmse, mean (of the labels) and base_rmse (of
  predicting the mean; also None if it is below a thousandth of the labels' size). Both have weight
  (Σ weight). For model.retrieval: loss. All have samples, and examples: those of weight above 0; a
  sample without a label has weight 0. A metric that the samples do not define is None. With several
  tasks, these are those of the first one, and `tasks` is {task: its metrics}.
  """
  if any('/' in name for name in state):
    of_tasks: dict[str, State] = {}
    for name, array in state.items():
      task, _, key = name.partition('/')
      of_tasks.setdefault(task, {})[key] = array
    tasks = {task: result(sums) for task, sums in of_tasks.items()}
    return next(iter(tasks.values())) | {'tasks': tasks}
  if 'losses' in state:
    weight, samples, losses, examples = state['losses']
    return {'loss': _ratio(losses, weight), 'examples': int(examples), 'samples': int(samples)}
  if 'errors' in state:
    weight, samples, squares, examples = state['errors']
    rmse = float(np.sqrt(squares / weight)) if weight > 0 else None
    mean, square = (_ratio(state[name][2], weight) for name in ('labels', 'squares'))
    values = {'rmse': rmse, 'mean': mean, 'weight': float(weight)}
    variance = 0 if mean is None else square - mean**2
    # The sums have 32 bits.
    is_known = variance > 0 and variance > 1e-6 * square
    values['base_rmse'] = float(np.sqrt(variance)) if is_known else None
    return values | {'examples': int(examples), 'samples': int(samples)}
  negatives, positives = state['histogram']
  weight, samples, loss, predicted, clicked, examples, weight2, clicked2 = state['sums']
  shares = [n / weight for n in (clicked, weight - clicked) if n > 0]
  # A pair within one bucket counts half.
  below = np.cumsum(negatives) - 0.5 * negatives
  return {
    'auc': _ratio(positives @ below, positives.sum() * negatives.sum()),
    'logloss': _ratio(loss, weight),
    'base_logloss': sum(float(-p * np.log(p)) for p in shares) if weight > 0 else None,
    'calibration': _ratio(predicted, clicked),
    'ctr': _ratio(clicked, weight),
    'weight': float(weight),
    'effective_clicks': _ratio(clicked**2, clicked2) or 0.0,
    'effective_others': _ratio((weight - clicked) ** 2, weight2 - clicked2) or 0.0,
    'examples': int(examples),
    'samples': int(samples),
  }


def group_auc_sums(
  labels: np.ndarray, probabilities: np.ndarray, groups: np.ndarray, weights: np.ndarray
) -> tuple[float, float]:
  """Returns the two sums whose ratio is GAUC, the mean of the groups' AUCs weighted by impressions.

  They are Σ_g weight_g · AUC_g and Σ_g weight_g, where weight_g is the sum of the group's weights,
  and can be added over disjoint sets of groups. GAUC is that of Zhu et al. 2017, "Optimized Cost
  per Click in Taobao Display Advertising". A group of one class has no AUC and is left out. All
  arguments are [n]; the groups are int64.
  """
  if not len(labels):
    return 0.0, 0.0
  order = np.lexsort((probabilities, groups))
  g, p = np.asarray(groups)[order], np.asarray(probabilities)[order]
  w = np.asarray(weights, np.float64)[order]
  positive = np.where(np.asarray(labels)[order] > 0.5, w, 0)
  negative = w - positive
  new_group = np.concatenate([[True], g[1:] != g[:-1]])
  new_probability = np.concatenate([[True], p[1:] != p[:-1]])
  starts = np.flatnonzero(new_group)
  # A tie is a run of samples of one group and one probability.
  ties = np.flatnonzero(new_group | new_probability)
  tied_positive, tied_negative = np.add.reduceat(positive, ties), np.add.reduceat(negative, ties)
  group_positive = np.add.reduceat(positive, starts)
  group_negative = np.add.reduceat(negative, starts)
  # Negatives before each sample, over all groups.
  before = np.concatenate([[0.0], np.cumsum(negative)[:-1]])
  group_of_tie = np.searchsorted(starts, ties, side='right') - 1
  won_by_tie = tied_positive * (before[ties] - before[starts][group_of_tie] + 0.5 * tied_negative)
  won = np.add.reduceat(won_by_tie, np.searchsorted(ties, starts))
  both = (group_positive > 0) & (group_negative > 0)
  weight = (group_positive + group_negative)[both]
  auc = won[both] / (group_positive * group_negative)[both]
  return float(np.sum(weight * auc)), float(np.sum(weight))
