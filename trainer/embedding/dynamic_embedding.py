import tensorflow as tf

from ops.dedupe import dedupe
from ops.library import TensorLike
from ops.policy import Policy
from ops.pooling import PoolLayout, pool
from ops.row_optimizers import RowHyperparameters, hyper
from ops.row_store import FactorPart, RowStore, TableSpec
from trainer.comm.communicator import Communicator
from trainer.config import RowOptimizer
from trainer.data.features import hash_keys
from trainer.embedding.exchange import rows_of
from trainer.runtime import HOST


class DynamicEmbedding(tf.keras.layers.Layer):
  """A Keras layer with weights of features that need not be listed beforehand, on one or N ranks.

  Call it with `training=True` within a tape. When the tape computes the gradients of the model's
  `trainable_variables`, the rows of the features take one step of `optimizer`; new features get
  rows: a linear weight at once, factors as soon as `policy` admits them. Row gradients are summed
  over all ranks, so a loop divides its loss by the number of samples of all ranks, and sums dense
  gradients too. Every rank makes each of these calls, even one without samples.

  The weights are not variables of Keras. `store.export_state` and `import_state` save and load the
  rows of this rank; `store.decay`, `evict` and `age` are the end of a day.

  Args:
    slots: the number of slots, F.
    width: the number of factors of a row, D.
    policy: says when a feature gets factors, and when it is evicted.
    optimizer: the row optimizer of linear weights and of factors.
    communicator: connects the ranks of the job; trainer.comm.horovod.communicator makes it.
  """

  def __init__(
    self,
    slots: int,
    width: int,
    communicator: Communicator,
    policy: Policy | None = None,
    optimizer: RowHyperparameters = RowOptimizer(),
    seed: int = 0,
    **of_layer: str,
  ):
    super().__init__(dtype='float32', **of_layer)
    kinds = {'linear': optimizer.kind, 'factors': optimizer.kind}
    table = TableSpec('default', (FactorPart('plain', width),), **kinds)
    self._layout = PoolLayout(table_of_slot=(0,) * slots, parts=(table.parts,))
    self._slot_ids = tf.range(1, slots + 1, dtype=tf.int64)
    self.store = RowStore(policy, tables=[table], slot_table=[-1] + [0] * slots, seed=seed)
    self._rows, self._optimizer = rows_of(self.store, communicator), optimizer
    with tf.device(HOST):
      self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
    # A weight that is always 0: a tape that asks for its gradient gets to the rows.
    self._anchor = self.add_weight(name='anchor', shape=[], initializer='zeros')

  def call(
    self, features: TensorLike, clicks: TensorLike | None = None, training: bool = False
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weights of B samples' features: linear, float32 [B, F]; factors, [B, F, D].

    `features` are integers or texts [B, F]; `clicks`, float32 [B], for policies that count clicks.
    """
    with tf.device(HOST):
      size, slots = tf.shape(features)[0], self._slot_ids.shape[0]
      keys = tf.reshape(hash_keys(features, self._slot_ids), [-1])
      clicks = tf.zeros([size]) if clicks is None else clicks
      deduped = dedupe(keys, clicks=clicks, slots=slots)
      rows = self._rows.pull(deduped, self._rows.route(deduped, tf.ones([size])), training)

      @tf.custom_gradient
      def weights(anchor: tf.Tensor) -> tuple:
        def push(linear: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
          with tf.device(HOST):
            step = self._step.assign_add(1)
            rates = hyper([(self._optimizer, self._optimizer)])
            self._rows.push(deduped, rows, linear, factors, tf.ones([]), rates, step)
            if self._rows.overflowed is not None:
              tf.debugging.assert_equal(self._rows.overflowed, False, 'a gradient is not finite')
          return tf.zeros_like(anchor)

        return (tf.identity(rows.linear), tf.identity(rows.factors)), push

      linear, factors = (
        weights(tf.convert_to_tensor(self._anchor)) if training else (rows.linear, rows.factors)
      )
      pulled = rows._replace(linear=linear, factors=factors)
      pooled = pool(pulled, deduped, (), (), size, self._layout)
      return pooled.linear, pooled.slots[0][0]
