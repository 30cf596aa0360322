"""Multilayer perceptrons, and dropout that does not depend on the number of ranks."""

import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from ops.float32 import product
from trainer.embedding.layer_inputs import LayerInputs, slot_vectors, vector_width
from trainer.errors import short
from trainer.model.layers.arguments import check_perceptron, check_whole
from trainer.model.layers.batch_norm import BatchNorm

SCALE = 10.0  # rows begin small, for `fm`; members read them that much larger


class DNN(tf.keras.layers.Layer):
  """A multilayer perceptron, the deep part of Wide&Deep and DeepFM.

  Cheng et al. 2016, "Wide & Deep Learning for Recommender Systems"; Guo et al. 2017, "DeepFM".

      h_0 = slot vectors joined with dense columns, [B, W]
      h_{l+1} = dropout(activation(batch_norm(h_l K_l + c_l))), [B, hidden[l]]
      logit = h_L · head

  K_l, c_l and head are learned. Several members are as many perceptrons that share the kernels K_l:
  member m reads h_0 ⊙ s_m, where s_m are fixed random numbers ±10, and has its own c_0 and head. In
  training each has its own logit and loss; the prediction is the mean of their logits. Gorishniy et
  al. 2025, "TabM: Advancing Tabular Deep Learning with Parameter-Efficient Ensembling".

  Args:
    hidden: widths of the hidden layers. Without it, beside at most linear and fm, the defaults
      are those of model.recipe (docs/tuning.md).
    activation: name of a Keras activation.
    dropout: share of each hidden layer's outputs that a training step sets to 0; the others are
      scaled up.
    members: the number of perceptrons.
    batch_norm: 'none'; 'local': over the samples of each rank alone; 'sync': over the samples of
      all ranks (or workers) in a step, so that the result is that of one process.
    sum_across_ranks: sums float32 [k] over ranks, for 'sync'.
    multiply: multiplies matrices of hidden layers in training steps, as `train.dense_dtype` says.
      Predictions and the head use float32.
  """

  kind = 'dnn'
  needs = {'factors'}
  axes = {'kernel_0|signs': ('joined',)}
  _outputs = 1

  def __init__(
    self,
    hidden: Sequence[int] = (400, 400, 400),
    activation: str = 'relu',
    dropout: float = 0.0,
    members: int = 1,
    batch_norm: str = 'none',
    seed: int = 0,
    sum_across_ranks: Callable[[tf.Tensor], tf.Tensor] | None = None,
    multiply: Callable[..., tf.Tensor] = product,
    name: str | None = None,
  ):
    super().__init__(name=name)
    check_perceptron(hidden, activation, dropout)
    check_whole('members', members)
    if members > 1 and not hidden:
      raise ValueError(f'members: found {members} without hidden layers; wanted 1')
    if dropout:
      self.needs = {*self.needs, 'position'}
    if batch_norm not in ('none', 'local', 'sync'):
      raise ValueError(f'batch_norm: found {short(batch_norm)}; wanted none, local or sync')
    self._hidden, self._dropout, self._seed = tuple(hidden), dropout, seed
    self._multiply, self.members = multiply, members
    self._activation = tf.keras.activations.get(activation)
    self._norms = []
    if batch_norm != 'none':
      self._norms = [
        BatchNorm(sum_across_ranks if batch_norm == 'sync' else None, name=f'norm_{l}')
        for l in range(len(hidden))
      ]

  def build(self, shapes: LayerInputs) -> None:
    members = self.members
    widths = [self._width(shapes), *self._hidden, self._outputs * members]
    self._kernels = [
      self.add_weight(
        f'kernel_{l}', list(shape), initializer=tf.keras.initializers.GlorotUniform(self._seed + l)
      )
      for l, shape in enumerate(itertools.pairwise(widths))
    ]
    self._biases = []
    if not self._norms:  # batch norm has its own bias; the head needs none, as the model has one
      self._biases = [
        self.add_weight(f'bias_{l}', [h if l else h * members], initializer='zeros')
        for l, h in enumerate(self._hidden)
      ]
    if members > 1:
      uniform = tf.keras.initializers.RandomUniform(-1, 1, self._seed + len(widths))

      def signs(*shape: object, **dtype: object) -> tf.Tensor:
        return SCALE * tf.sign(uniform(*shape, **dtype))

      self._signs = self.add_weight(
        'signs', [widths[0], members], initializer=signs, trainable=False
      )
    self.built = True

  def _width(self, shapes: LayerInputs) -> int:
    """Returns W, the number of columns of h_0."""
    return vector_width(shapes)

  def _parts(
    self, inputs: LayerInputs, multiply: Callable[..., tf.Tensor], training: bool
  ) -> list[tf.Tensor]:
    """Returns h_0 as a list of matrices that join to [B, W], computed with `multiply`."""
    return slot_vectors(inputs)

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns logits, float32 [B, 1]; those of each member, [B, members], in training."""
    multiply, members = self._multiply if training else product, self.members
    h = self._parts(inputs, multiply, training)
    rectified = not self._norms and self._activation is tf.keras.activations.relu
    kernels = list(self._kernels)
    if members > 1:
      of_members = self._signs[:, :, None] * kernels[0][:, None]  # [W, members, hidden[0]]
      kernels[0] = tf.reshape(of_members, [-1, members * self._hidden[0]])
    for l, kernel in enumerate(kernels[:-1]):
      bias = None if self._norms else self._biases[l]
      if l and members > 1:
        h = tf.reshape(h, [-1, kernel.shape[0]])  # [B · members, hidden[l - 1]]
      h = multiply(h, kernel, bias, relu=rectified)
      if l and members > 1:
        h = tf.reshape(h, [-1, members * kernel.shape[1]])
      if self._norms:
        h = self._norms[l](h, training=training)
      if not rectified:
        h = self._activation(h)
      if training and self._dropout:
        h = dropout(h, self._dropout, self._seed + l, inputs.position)
    if members == 1:
      return product(h, kernels[-1])
    logits = tf.einsum('bmh,hm->bm', tf.reshape(h, [-1, members, self._hidden[-1]]), kernels[-1])
    return logits if training else tf.reduce_mean(logits, 1, keepdims=True)


def dropout(x: tf.Tensor, rate: float, seed: int, position: tf.Tensor | None) -> tf.Tensor:
  """Sets a share of the elements to 0 and scales the others by 1/(1 − rate).

  Which become 0 depends only on the seed, the step, the column, and the sample's place in the
  step's global batch: they are the same for any number of ranks, and if the step is repeated.
  `position`, int64 [2], is the number of the step, and how many of its samples are on ranks below
  this one.
  """
  if position is None:
    raise ValueError(
      'dropout needs LayerInputs.position, (step, samples on lower ranks), in a training step: '
      "`needs` of the layer must hold 'position'"
    )
  columns = x.shape[1]
  groups = -(-columns // 4)  # Philox gives 4 numbers for a counter; every row starts a new one
  step, before = tf.unstack(position)
  counter = tf.cast(tf.stack([before * groups, step]), tf.uint64)
  numbers = tf.raw_ops.StatelessRandomUniformV2(
    shape=[tf.shape(x)[0], 4 * groups], key=tf.constant([seed], tf.uint64), counter=counter, alg=1
  )
  return tf.where(numbers[:, :columns] < rate, 0.0, x * (1 / (1 - rate)))
