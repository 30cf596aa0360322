"""What an interaction reads of a batch, and what it may ask for."""

from typing import NamedTuple

import tensorflow as tf

# What an interaction may name in `needs`; `totals` brings `squares` along, `field_factors`
# `field_squares`.
NEEDS = ('linear', 'factors', 'totals', 'field_factors')


class LayerInputs(NamedTuple):
  """Slot sums of a batch of B samples with F slots (B may be 0). What no interaction needs is None,
  or [] for lists.

  Slots stand in the order of `Config.slots`: a table's slots are neighbours, tables in the order of
  `sparse.tables`.
  Σ runs over the features i of a slot (or of the sample), with values x_i, linear weights w_i and
  factors v_i.
  """

  linear: tf.Tensor | None  # float32 [B, F]: Σ x·w
  factors: list[tf.Tensor]  # one a table: float32 [B, F_t, D_t]: Σ x·v, the slot sums
  totals: list[tf.Tensor]  # one a table: float32 [B, D_t]: Σ x·v over all slots of the table
  squares: tf.Tensor | None  # float32 [B]: Σ over all features x²·‖v‖²
  field_factors: (
    tf.Tensor | None
  )  # float32 [B, F, F*D]: Σ x·v_{i,·}; v_{i,g} at columns [g*D, (g+1)*D)
  field_squares: tf.Tensor | None  # float32 [B]: Σ over all features x²·‖v_{i,field(i)}‖²
  norm: tf.Tensor | None  # float32 [B, F]: what `pooling` divides a slot sum by; None: all 1
  dense: tf.Tensor  # float32 [B, Dn], transformed, no NaN
  position: tf.Tensor | None = (
    None  # int64 [2]: (step, samples of the step on lower ranks); dropout draws by it
  )


def slot_vectors(inputs):
  """Pooled slot vectors joined with dense, as parts that stand side by side: what `dnn` and `cross`
  read.

  The slot vector is the slot sum divided by `norm` (sum, mean or sqrt-n pooling); that of an empty
  slot is 0.
  Returns: list of float32 [B, F_t·D_t], one a table, then [B, Dn] where there are dense columns.
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


def vector_width(shapes):
  """Columns of the joined `slot_vectors`, from a `LayerInputs` of TensorShapes (`build`'s)."""
  return sum(s[1] * s[2] for s in shapes.factors) + shapes.dense[1]
