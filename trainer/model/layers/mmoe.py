"""Layers that several tasks share: one perceptron for all, or experts with a gate for each task."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from ops.float32 import product
from trainer.embedding.layer_inputs import LayerInputs, slot_vectors, vector_width
from trainer.errors import short
from trainer.model.layers.arguments import check_perceptron, check_whole
from trainer.model.layers.dnn import dropout as drop


class SharedBottom(tf.keras.layers.Layer):
  """One multilayer perceptron that all tasks read (Caruana 1997, "Multitask Learning").

      x_0 = slot vectors joined with dense columns, [B, W]
      shared_t = the multilayer perceptron on x_0, [B, H], with H = hidden[-1], for each task t

  Args:
    hidden: widths of the layers.
    activation: name of a Keras activation.
    dropout: share of each layer's outputs that a training step sets to 0.
    tasks: T, the number of tasks.
    multiply: multiplies x_0 by the first layer's kernel in training steps, as `train.dense_dtype`
      says. Predictions, gates and later layers use float32.
    seed: of dropout and of the initial weights. Biases and gates begin at 0, so that at first all
      experts of MMoE have equal weight.
  """

  kind = 'shared_bottom'
  needs = {'factors'}
  part = 'shared'
  axes = {'kernel_0|gates': ('joined',)}
  _experts = 1

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
    super().__init__(name=name)
    check_perceptron(hidden, activation, dropout)
    if dropout:
      self.needs = {*self.needs, 'position'}
    if not hidden:
      raise ValueError(f'hidden: found {short(hidden)}; wanted a list of whole numbers >= 1')
    self._hidden, self._dropout = tuple(hidden), dropout
    self._tasks, self._seed, self._multiply = tasks, seed, multiply
    self._activation = tf.keras.activations.get(activation)

  def build(self, shapes: LayerInputs) -> None:
    width, experts = vector_width(shapes), self._experts
    self._kernels, self._biases = [], []
    for l, (rows, columns) in enumerate(zip([width, *self._hidden], self._hidden)):
      limit = math.sqrt(6 / (rows + columns))
      # All experts read the same x_0, so the kernels of their first layers are joined to one.
      shape = [experts, rows, columns] if l else [rows, experts * columns]
      initial = tf.keras.initializers.RandomUniform(-limit, limit, self._seed + l)
      self._kernels.append(self.add_weight(f'kernel_{l}', shape, initializer=initial))
      self._biases.append(self.add_weight(f'bias_{l}', [experts * columns], initializer='zeros'))
    self._gates = None
    if experts > 1:
      self._gates = self.add_weight('gates', [width, self._tasks * experts], initializer='zeros')
    self.built = True

  def call(self, inputs: LayerInputs, training: bool = False) -> list[tf.Tensor]:
    """Returns what each of the T tasks reads, a list of float32 [B, H]."""
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
    return tf.unstack(gates @ tf.reshape(h, [-1, self._experts, self._hidden[-1]]), self._tasks, 1)


class MMoE(SharedBottom):
  """Multi-gate mixture of experts.

  Ma et al. 2018, "Modeling Task Relationships in Multi-task Learning with Multi-gate
  Mixture-of-Experts":

      x_0 = slot vectors joined with dense columns, [B, W]
      expert_e = a multilayer perceptron on x_0, [B, H], with H = hidden[-1]
      gate_t = softmax(x_0 G_t), [B, E], for each task t
      shared_t = Σ_e gate_te · expert_e, [B, H]

  Args:
    experts: E, the number of experts.
    hidden: widths of each expert's layers.
    **shared_bottom: the other arguments of SharedBottom.
  """

  kind = 'mmoe'
  needs = {'factors'}
  part = 'shared'

  def __init__(self, experts: int = 4, hidden: Sequence[int] = (64,), **shared_bottom: object):
    super().__init__(hidden, **shared_bottom)
    check_whole('experts', experts)
    self._experts = experts
