"""Histories read against the candidate."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from ops.float32 import product
from trainer.embedding.layer_inputs import HistoryVectors, LayerInputs, slot_vectors, vector_width
from trainer.model.layers.dnn import DNN


class DIN(DNN):
  """Deep interest network: an MLP that also reads what of a history bears on the candidate.

  Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction". For a history of
  vectors v_1 … v_n and the candidate's vector c:

      a_i = relu([v_i, c, v_i − c, v_i ⊙ c] K + k) · q + q_0
      interest = Σ_i a_i v_i, [B, D]
      h_0 = slot vectors joined with dense, and the interest of each history
      logit = the MLP of DNN on h_0

  As in the paper the a_i are not normalised: their sum says how strong the interest is. An empty
  history has interest 0. Features without factors do not attend.

  Args:
    attention: width of the activation unit's hidden layer.
    hidden: as of DNN, like the rest.
  """

  needs = frozenset({'factors', 'histories'})

  def __init__(
    self,
    attention: int = 36,
    hidden: Sequence[int] = (400, 400, 400),
    activation: str = 'relu',
    dropout: float = 0.0,
    batch_norm: str = 'none',
    seed: int = 0,
    sum_across_ranks: Callable[[tf.Tensor], tf.Tensor] | None = None,
    multiply: Callable[..., tf.Tensor] = product,
    name: str | None = None,
  ):
    super().__init__(
      hidden, activation, dropout, batch_norm, seed, sum_across_ranks, multiply, name
    )
    if type(attention) is not int or attention < 1:
      raise ValueError(f'attention: found {attention!r}; wanted a whole number >= 1')
    self._attention = attention

  def build(self, shapes: LayerInputs) -> None:
    glorot = tf.keras.initializers.GlorotUniform
    self._units = {}
    for i, (name, history) in enumerate(sorted(shapes.histories.items())):
      width, hidden = history.vectors[2], self._attention
      seed = self._seed + 1000 * (i + 1)  # apart from those of the hidden layers
      self._units[name] = (
        self.add_weight(f'unit_{i}_kernel', [4 * width, hidden], initializer=glorot(seed)),
        self.add_weight(f'unit_{i}_bias', [hidden], initializer='zeros'),
        self.add_weight(f'unit_{i}_out', [hidden, 1], initializer=glorot(seed + 1)),
        self.add_weight(f'unit_{i}_out_bias', [1], initializer='zeros'),
      )
    super().build(shapes)

  def _width(self, shapes: LayerInputs) -> int:
    return vector_width(shapes) + sum(s.vectors[2] for s in shapes.histories.values())

  def _parts(self, inputs: LayerInputs, multiply: Callable[..., tf.Tensor]) -> list[tf.Tensor]:
    histories = sorted(inputs.histories.items())
    return slot_vectors(inputs) + [self._interest(name, one) for name, one in histories]

  def _interest(self, name: str, history: HistoryVectors) -> tf.Tensor:
    """Returns Σ_i a_i v_i, float32 [B, D]."""
    kernel, bias, out, out_bias = self._units[name]
    vectors, candidate = history.vectors, history.candidate
    # [v, c, v − c, v ⊙ c] K, where c's share is the same for all of a history.
    of_v, of_c, of_difference, of_product = tf.split(kernel, 4)
    hidden = tf.tensordot(vectors, of_v + of_difference, 1)
    hidden += tf.tensordot(vectors * candidate[:, None], of_product, 1)
    hidden += (tf.nn.bias_add(candidate @ (of_c - of_difference), bias))[:, None]
    scores = tf.tensordot(tf.nn.relu(hidden), out, 1)[:, :, 0] + out_bias
    scores = tf.where(history.mask, scores, 0.0)
    return tf.linalg.matvec(vectors, scores, transpose_a=True)
