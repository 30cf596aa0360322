"""What an interaction reads of a batch, and what it may ask for."""

from typing import NamedTuple

import tensorflow as tf

# What an interaction may name in `needs`. `totals` brings `squares` along, `field_factors` brings
# `field_squares`. `shared` is what `model.shared` gives. `histories` wants `factors` beside it.
NEEDS = ('linear', 'factors', 'totals', 'field_factors', 'histories', 'shared')


class HistoryVectors(NamedTuple):
  """Histories of B samples, up to L features each, from the first place on."""

  vectors: tf.Tensor
  """float32 [B, L, D]: the features' factors, in order; 0 where the mask is false."""
  mask: tf.Tensor
  """bool [B, L]: whether there is a feature that has factors."""
  candidate: tf.Tensor
  """float32 [B, D]: Σ x·v of the slot that the history shares."""


class LayerInputs(NamedTuple):
  """Slot sums of a batch of B samples with F slots; B may be 0.

  Slots stand in the order of `Config.slots`: a table's slots are neighbours, tables in the order of
  `sparse.tables`. Σ runs over the features i of a slot, or of the sample, with values x_i, linear
  weights w_i and factors v_i. What no interaction needs is None, or [] for lists.
  """

  linear: tf.Tensor | None
  """float32 [B, F]: Σ x·w."""
  factors: list[tf.Tensor]
  """One a table, float32 [B, F_t, D_t]: Σ x·v, the slot sums."""
  totals: list[tf.Tensor]
  """One a table, float32 [B, D_t]: Σ x·v over all slots of the table."""
  squares: tf.Tensor | None
  """float32 [B]: Σ x²·‖v‖² over all features."""
  field_factors: tf.Tensor | None
  """float32 [B, F, F·D]: Σ x·v; the factors for field g are the columns [g·D, (g+1)·D)."""
  field_squares: tf.Tensor | None
  """float32 [B]: Σ x²·‖v_field(i)‖² over all features i."""
  norm: tf.Tensor | None
  """float32 [B, F]: what `pooling` divides a slot sum by; None: 1 everywhere."""
  dense: tf.Tensor
  """float32 [B, Dn]: transformed, no NaN."""
  position: tf.Tensor | None = None
  """int64 [2]: the step, and the samples of this step on lower ranks; dropout draws by them."""
  shared: tf.Tensor | None = None
  """float32 [B, H]: what `model.shared` gives for the task whose layers read this."""
  histories: dict[str, HistoryVectors] | None = None
  """By slot."""


def slot_vectors(inputs: LayerInputs) -> list[tf.Tensor]:
  """Returns the pooled slot vectors and dense: what `dnn` and `cross` read.

  A slot vector is the slot sum divided by `norm` (sum, mean or sqrt-n pooling); that of an empty
  slot is 0.

  Returns:
    One float32 [B, F_t·D_t] a table, then [B, Dn] where there are dense columns;
    `tf.concat(parts, 1)` joins them.
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
  """Returns int32 [B, L], where each sample's features stand among n, −1 where it has no more.

  Args:
    samples: int32 or int64 [n], whose each feature is, ascending.
    size: int32 or int64 [], B.
  """
  places = tf.RaggedTensor.from_value_rowids(
    tf.range(tf.size(samples)), tf.cast(samples, tf.int64), tf.cast(size, tf.int64), validate=False
  )
  return places.to_tensor(default_value=-1)


def vector_width(shapes: LayerInputs) -> int:
  """Returns the columns of the joined `slot_vectors`.

  Args:
    shapes: the TensorShapes of LayerInputs, as Keras gives them to `build`.
  """
  return sum(s[1] * s[2] for s in shapes.factors) + shapes.dense[1]
