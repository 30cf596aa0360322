"""TensorFlow's SyncReplicasOptimizer: all workers send their sums, and the chief takes one step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

v1 = tf.compat.v1

ApplySums = Callable[[list[tf.Tensor]], tf.Operation]


class _ApplyOptimizer(v1.train.Optimizer):
  """Applies the sums of a step. SyncReplicasOptimizer runs it on the chief, once per step."""

  def __init__(self, workers: int, apply_sums: ApplySums):
    super().__init__(use_locking=False, name='mean')
    self._workers, self._apply_sums = workers, apply_sums

  def apply_gradients(
    self,
    grads_and_vars: Sequence[tuple[tf.Tensor, tf.Variable]],
    global_step: tf.Variable | None = None,
    name: str | None = None,
  ) -> tf.Operation:
    sums = [mean * self._workers for mean, _ in grads_and_vars]
    # The chief waits here for the workers' sums. Learning rates and counters are read after the
    # wait, because they may change during it.
    with tf.control_dependencies(sums):
      applied = self._apply_sums(sums)
    with tf.control_dependencies([applied]):
      return global_step.assign_add(1)


class SyncedStep(NamedTuple):
  """The ops that `synced_step` adds to a graph."""

  push: tf.Operation  # sends this worker's sums and waits until the chief has taken the step
  run_chief: tf.Operation  # takes one step once all workers have sent their sums
  start_chief: tf.Operation  # prepares the chief, before the first step
  start_worker: tf.Operation  # prepares a worker, after start_chief


def synced_step(
  sums: Sequence[tf.Tensor], variables: Sequence[tf.Variable], workers: int, apply_sums: ApplySums
) -> SyncedStep:
  """Adds to a v1 graph a step that all workers take together.

  Each worker sends `sums`, which have the shapes of `variables`. `apply_sums` makes the op that
  takes the step, from the totals of these over all workers.
  """
  global_step = tf.Variable(0, dtype=tf.int64, trainable=False, name='tokens')
  logger = tf.get_logger()
  level = logger.level
  logger.setLevel('ERROR')  # TensorFlow warns that SyncReplicasOptimizer is deprecated
  optimizer = v1.train.SyncReplicasOptimizer(
    _ApplyOptimizer(workers, apply_sums), replicas_to_aggregate=workers, total_num_replicas=workers
  )
  push = optimizer.apply_gradients(list(zip(sums, variables)), global_step=global_step)
  # Unused: the coordinator says when the first worker is ready.
  optimizer.ready_for_local_init_op.mark_used()
  logger.setLevel(level)
  with tf.control_dependencies([global_step.assign(0)]):
    start_chief = tf.group(optimizer.chief_init_op, optimizer.get_init_tokens_op(0))
  (run_chief,) = optimizer.get_chief_queue_runner().enqueue_ops
  return SyncedStep(push, run_chief, start_chief, optimizer.local_step_init_op)
