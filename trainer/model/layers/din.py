"""Deep interest network."""

from collections.abc import Callable

import tensorflow as tf

from trainer.embedding.layer_inputs import HistoryVectors, LayerInputs, slot_vectors, vector_width
from trainer.model.layers.arguments import check_whole
from trainer.model.layers.dnn import DNN


class DIN(DNN):
  """A multilayer perceptron that also reads histories, such as the items that a user clicked.

  Each item of a history is weighted by how it relates to the candidate, the item to be scored.
  Zhou et al. 2018, "Deep Interest Network for Click-Through Rate Prediction". For a history of
  vectors v_1 … v_n, the candidate's vector c and learned K, k, q and q_0:

      a_i = relu([v_i, c, v_i − c, v_i ⊙ c] K + k) · q + q_0
      interest = Σ_i a_i v_i, [B, D]
      h_0 = slot vectors joined with dense columns and the interest of each history
      logit = the MLP of DNN on h_0

  As in the paper, the a_i are not normalised: their sum is the strength of the interest. An empty
  history has interest 0. Features without factors have weight 0.

  Args:
    attention: width of the hidden layer by which the items of a history are weighted.
    **dnn: the arguments of DNN.
  """

  kind = 'din'
  needs = {'factors', 'histories'}
  per_history = 'unit'
  axes = {'kernel_0|signs': ('joined with histories',), '(unit of .+)_kernel': (r'\1',)}

  def __init__(self, attention: int = 36, **dnn: object):
    super().__init__(**dnn)
    check_whole('attention', attention)
    self._attention = attention

  def build(self, shapes: LayerInputs) -> None:
    glorot = tf.keras.initializers.GlorotUniform
    self._units = {}
    for i, (name, history) in enumerate(sorted(shapes.histories.items())):
      width, hidden = history.vectors[2], self._attention
      seed = self._seed + 1000 * (i + 1)  # differs from the seeds of the hidden layers
      self._units[name] = (
        self.add_weight(f'unit_{i}_kernel', [4 * width, hidden], initializer=glorot(seed)),
        self.add_weight(f'unit_{i}_bias', [hidden], initializer='zeros'),
        self.add_weight(f'unit_{i}_out', [hidden, 1], initializer=glorot(seed + 1)),
        self.add_weight(f'unit_{i}_out_bias', [1], initializer='zeros'),
      )
    super().build(shapes)

  def _width(self, shapes: LayerInputs) -> int:
    return vector_width(shapes) + sum(s.vectors[2] for s in shapes.histories.values())

  def _parts(
    self, inputs: LayerInputs, multiply: Callable[..., tf.Tensor], training: bool
  ) -> list[tf.Tensor]:
    histories = sorted(inputs.histories.items())
    return slot_vectors(inputs) + [self._interest(name, history) for name, history in histories]

  def _interest(self, name: str, history: HistoryVectors) -> tf.Tensor:
    """Returns Σ_i a_i v_i of each sample's history in the slot `name`, float32 [B, D]."""
    kernel, bias, out, out_bias = self._units[name]
    vectors, candidate = history.vectors, history.candidate
    # [v, c, v − c, v ⊙ c] K. The terms of c alone are computed once for the whole history.
    of_v, of_c, of_difference, of_product = tf.split(kernel, 4)
    hidden = tf.tensordot(vectors, of_v + of_difference, 1)
    hidden += tf.tensordot(vectors * candidate[:, None], of_product, 1)
    hidden += (tf.nn.bias_add(candidate @ (of_c - of_difference), bias))[:, None]
    scores = tf.tensordot(tf.nn.relu(hidden), out, 1)[:, :, 0] + out_bias
    scores = tf.where(history.mask, scores, 0.0)
    return tf.linalg.matvec(vectors, scores, transpose_a=True)
