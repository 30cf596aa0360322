"""The inputs of interactions: slot sums, dense columns, histories and more."""

from typing import NamedTuple

import tensorflow as tf

# The names that an interaction may list in `needs`. With `totals` come `squares`, and with
# `field_factors` come `field_squares`. `shared` is the output of `model.shared`. `histories` needs
# `factors` too. `position` seeds what a layer draws at random in a training step, such as dropout.
NEEDS = ('linear', 'factors', 'totals', 'field_factors', 'histories', 'shared', 'position')


class HistoryVectors(NamedTuple):
  """The histories of B samples in one slot, each of up to L features."""

  vectors: tf.Tensor
  """float32 [B, L, D]: the features' factors, in order; 0 where the mask is false."""
  mask: tf.Tensor
  """bool [B, L], true where there is a feature and it has factors."""
  candidate: tf.Tensor
  """float32 [B, D]: the slot sum of the slot that the history's slot `shares`."""


class LayerInputs(NamedTuple):
  """Slot sums and other layer inputs of a batch of B samples with F slots; B may be 0.

  Slots are in the order of `Config.ordered_slots`, by table. Σ runs over the features i of a slot,
  or of the sample, with values x_i, linear weights w_i and factors v_i. Inputs that no interaction
  needs are None or, for lists, [].
  """

  linear: tf.Tensor | None
  """float32 [B, F]: Σ x·w."""
  factors: list[tf.Tensor]
  """For each table, float32 [B, F_t, D_t]: Σ x·v, the slot sums."""
  totals: list[tf.Tensor]
  """For each table, float32 [B, D_t]: Σ x·v over all slots of the table."""
  squares: tf.Tensor | None
  """float32 [B]: Σ x²·‖v‖² over all features."""
  field_factors: tf.Tensor | None
  """float32 [B, F, F·D]: Σ x·v; columns [g·D, (g+1)·D) are the factors for field g."""
  field_squares: tf.Tensor | None
  """float32 [B]: Σ x²·‖v‖² over all features, v being a feature's factors for its own field."""
  norm: tf.Tensor | None
  """float32 [B, F]: the divisors of slot sums (`pooling`); None if all are 1."""
  dense: tf.Tensor
  """float32 [B, Dn + 2·Fc]: the Dn dense columns, transformed, with numbers in place of missing
  ones; then, for the Fc slots with `counts`, the shows of each, and after these the log-odds of a
  click of each, as trainer.data.features.transform_counts returns them."""
  position: tf.Tensor | None = None
  """int64 [2]: the number of the step, and how many of its samples are on ranks below this one. The
  random numbers of dropout follow from it."""
  shared: tf.Tensor | None = None
  """float32 [B, H]: what `model.shared` computes for the task of this layer."""
  histories: dict[str, HistoryVectors] | None = None
  """Name of a slot -> its histories."""

  def of_rows(self) -> list[tf.Tensor]:
    """Returns the inputs that are computed from rows. Through them, gradients flow to the rows."""
    histories = (self.histories or {}).values()
    given = [self.linear, self.squares, self.field_factors, self.field_squares]
    given += [*self.factors, *self.totals, *(h.vectors for h in histories)]
    given += [h.candidate for h in histories]
    return [t for t in given if t is not None]


def with_fields(inputs: LayerInputs, vectors: tf.Tensor) -> LayerInputs:
  """Adds C slots, each with one feature of value 1 that has the factors `vectors` [B, C, D]."""
  factors, totals, squares, norm = inputs.factors, inputs.totals, inputs.squares, inputs.norm
  if factors:
    factors = [*factors, vectors]
    norm = norm if norm is None else tf.concat([norm, tf.ones_like(vectors[:, :, 0])], 1)
  if totals:
    totals = [*totals, tf.reduce_sum(vectors, 1)]
    squares += tf.reduce_sum(tf.square(vectors), [1, 2])
  return inputs._replace(factors=factors, totals=totals, squares=squares, norm=norm)


def slot_vectors(inputs: LayerInputs) -> list[tf.Tensor]:
  """Returns the pooled slot vectors and the dense columns, which `dnn` and `cross` read.

  These are a float32 [B, F_t·D_t] for each table, then LayerInputs.dense if it has columns. A slot
  vector is the slot sum divided by `norm` (sum, mean or sqrt-n pooling); it is 0 for an empty slot.
  """
  parts, start = [], 0
  for sums in inputs.factors:
    slots, width = sums.shape[1:]
    if inputs.norm is not None:
      sums *= tf.math.divide_no_nan(1.0, inputs.norm[:, start : start + slots])[:, :, None]
    parts.append(tf.reshape(sums, [-1, slots * width]))
    start += slots
  if inputs.dense.shape[1]:
    parts.append(inputs.dense)
  return parts


def history_places(samples: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
  """Returns where each of B = `size` samples stands in `samples` [n], [B, L], padded with −1."""
  places = tf.RaggedTensor.from_value_rowids(
    tf.range(tf.size(samples)), tf.cast(samples, tf.int64), tf.cast(size, tf.int64), validate=False
  )
  return places.to_tensor(default_value=-1)


def vector_width(shapes: LayerInputs) -> int:
  """Returns the number of columns of the joined `slot_vectors`, from the shapes of LayerInputs."""
  return sum(s[1] * s[2] for s in shapes.factors) + shapes.dense[1]
