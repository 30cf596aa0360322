"""What several tasks share: experts with a gate for each task, or one bottom for all."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from ops.float32 import product
from trainer.embedding.layer_inputs import LayerInputs, slot_vectors, vector_width
from trainer.model.layers.dnn import dropout as drop


class MMoE(tf.keras.layers.Layer):
  """Multi-gate mixture of experts.

  Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate
  Mixture-of-Experts":

      x_0 = slot vectors joined with dense, [B, W]
      expert_e = a multilayer perceptron on x_0, [B, H], with H = hidden[-1]
      gate_t = softmax(x_0 G_t), [B, E]
      shared_t = Σ_e gate_te · expert_e, [B, H]

  Args:
    experts: E.
    hidden: widths of each expert's layers.
    activation: name of a Keras activation.
    dropout: share of each layer's outputs that a training step sets to 0.
    tasks: T; the model passes it.
    multiply: how a training step multiplies x_0 by the experts' first kernels, as `product` or
      `ops.bfloat16.product` (`train.dense_dtype`). Predictions, gates and the layers above are
      float32.
    seed: of the initial weights (Glorot uniform; biases 0; gates 0, so that all experts count alike
      at first) and of dropout.
    name: of the layer.
  """

  needs = frozenset({'factors'})

  def __init__(
    self,
    experts: int = 4,
    hidden: Sequence[int] = (64,),
    activation: str = 'relu',
    dropout: float = 0.0,
    tasks: int = 2,
    seed: int = 0,
    multiply: Callable[..., tf.Tensor] = product,
    name: str | None = None,
  ):
    super().__init__(name=name)
    if type(experts) is not int or experts < 1:
      raise ValueError(f'experts: found {experts!r}; wanted a whole number >= 1')
    if (
      not isinstance(hidden, (list, tuple))
      or not hidden
      or not all(type(h) is int and h > 0 for h in hidden)
    ):
      raise ValueError(f'hidden: found {hidden!r}; wanted a list of whole numbers >= 1')
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
      raise ValueError(f'dropout: found {dropout!r}; wanted a number in [0, 1)')
    if not isinstance(activation, str) or not callable(
      getattr(tf.keras.activations, activation, None)
    ):
      raise ValueError(
        f"activation: found {activation!r}; wanted the name of a Keras activation, as 'relu'"
      )
    self._experts, self._hidden, self._dropout = experts, tuple(hidden), dropout
    self._tasks, self._seed, self._multiply = tasks, seed, multiply
    self._activation = tf.keras.activations.get(activation)

  def build(self, shapes: LayerInputs) -> None:
    width, experts = vector_width(shapes), self._experts
    self._kernels, self._biases = [], []
    for l, (rows, columns) in enumerate(zip([width, *self._hidden], self._hidden)):
      limit = math.sqrt(6 / (rows + columns))
      # The first layer reads one x_0 for all experts: its kernels lie side by side.
      shape = [experts, rows, columns] if l else [rows, experts * columns]
      initial = tf.keras.initializers.RandomUniform(-limit, limit, self._seed + l)
      self._kernels.append(self.add_weight(f'kernel_{l}', shape, initializer=initial))
      bias = self.add_weight(f'bias_{l}', [experts * columns], initializer='zeros')
      self._biases.append(bias)
    self._gates = None
    if experts > 1:
      self._gates = self.add_weight('gates', [width, self._tasks * experts], initializer='zeros')
    self.built = True

  def call(self, inputs: LayerInputs, training: bool = False) -> list[tf.Tensor]:
    """Returns T of float32 [B, H]."""
    x = tf.concat(slot_vectors(inputs), 1)
    rectified = self._activation is tf.keras.activations.relu
    multiply = self._multiply if training else product
    h = multiply(x, self._kernels[0], self._biases[0], relu=rectified)
    for l, bias in enumerate(self._biases):
      if l:
        by_expert = tf.reshape(h, [-1, self._experts, self._hidden[l - 1]])
        h = tf.einsum('beh,ehk->bek', by_expert, self._kernels[l])
        h = tf.nn.bias_add(tf.reshape(h, [-1, self._experts * self._hidden[l]]), bias)
      if l or not rectified:
        h = self._activation(h)
      if training and self._dropout:
        h = drop(h, self._dropout, self._seed + l, inputs.position)
    if self._gates is None:
      return [h] * self._tasks
    gates = tf.nn.softmax(tf.reshape(x @ self._gates, [-1, self._tasks, self._experts]))
    experts = tf.reshape(h, [-1, self._experts, self._hidden[-1]])
    return tf.unstack(gates @ experts, self._tasks, 1)


class SharedBottom(MMoE):
  """One multilayer perceptron on x_0 that all tasks read: an MMoE of a single expert.

  Caruana 1997, "Multitask Learning". The arguments are those of MMoE.
  """

  def __init__(
    self,
    hidden: Sequence[int] = (64,),
    activation: str = 'relu',
    dropout: float = 0.0,
    tasks: int = 2,
    seed: int = 0,
    multiply: Callable[..., tf.Tensor] = product,
    name: str | None = None,
  ):
    super().__init__(1, hidden, activation, dropout, tasks, seed, multiply, name)
