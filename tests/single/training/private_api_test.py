"""What we use of TensorFlow and Keras that is not public, and that we use nothing else of the kind.

A release of TensorFlow may take each of these away. Then its test here fails and says what is lost.
"""

import ast
import collections
import gc
import os
import pathlib

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import tensorflow as tf

from ops import library
from ops.feature_lifecycle import FeatureLifecycle
from ops.policy import Policy
from trainer.config import DenseOptimizer
from trainer.training.dense_part import dense_optimizer
from trainer.training.step import traced

ROOT = pathlib.Path(__file__).resolve().parents[3]
PRIVATE_MODULES = ('tensorflow.python', 'tensorflow.core', 'keras.src', 'tf_keras.src')
NAMED_TUPLE = {'_asdict', '_fields', '_make', '_replace'}  # public, whatever their names look like
# Where each is used; a reason stands beside the use.
ALLOWED = {
  'tensorflow.python.eager': {'tests/support/placement.py'},
  'tensorflow.python.framework': {'tests/support/placement.py'},
  'tensorflow.python.ops': {'ops/library.py'},
  '_call_flat': {'trainer/training/step.py'},
  '_create_all_weights': {'trainer/training/dense_part.py', 'trainer/parameter_server/servers.py'},
}


def private_uses() -> dict[str, set[str]]:
  """Private modules that the project imports, and attributes `_name` that it does not define."""
  defined, uses = set(NAMED_TUPLE), collections.defaultdict(set)
  for folder in ('ops', 'trainer', 'benchmarks', 'examples', 'tests'):
    for path in sorted((ROOT / folder).rglob('*.py')):
      where = str(path.relative_to(ROOT))
      if where == 'tests/single/training/private_api_test.py':
        continue
      for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        match node:
          case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            defined.add(node.name)
          case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
            defined.add(name)
          case ast.Attribute(attr=name) if name.startswith('_') and not name.startswith('__'):
            uses[name].add(where)
          case ast.Import(names=names):
            for alias in names:
              uses[alias.name].add(where)
          case ast.ImportFrom(module=str(module)):
            uses[module].add(where)
  return {
    name: where
    for name, where in uses.items()
    if (name.startswith('_') and not name.startswith('__') and name not in defined)
    or name.startswith(PRIVATE_MODULES)
  }


class PrivateApiTest(tf.test.TestCase):
  def test_nothing_else_is_used(self):
    self.assertEqual(
      private_uses(), ALLOWED, 'Use public API, or give a reason beside the use and a test here.'
    )

  def test_eager_resources_are_deleted_with_their_last_user(self):
    """tensorflow.python.ops.resource_variable_ops.EagerResourceDeleter, in ops/library.py."""
    ops = library.load()
    table = FeatureLifecycle(Policy(), name='short-lived')
    handle = table.handle
    self.assertEqual(int(ops.ctr_lifecycle_size(handle)), 0)
    with tf.Graph().as_default():  # the garbage collector may run anywhere
      del table
      gc.collect()
    with self.assertRaises(tf.errors.NotFoundError, msg='the table outlives its last user'):
      ops.ctr_lifecycle_size(handle)

  def test_a_graph_is_called_with_flat_tensors(self):
    """ConcreteFunction._call_flat, in trainer.training.step.traced."""
    variable = tf.Variable(2.0)
    spec = tf.TensorSpec([None])
    call = traced(lambda x, pair: (pair[0] * variable, x + pair[1]), spec, (spec, spec))
    a, b, c = (tf.constant([float(i), 1.0]) for i in (3, 4, 5))
    for factor in (2.0, 7.0):
      variable.assign(factor)
      first, second = call(a, (b, c))
      self.assertAllEqual(first, b * factor)
      self.assertAllEqual(second, a + c)

  def test_optimizers_make_their_variables_before_the_first_step(self):
    """Optimizer._create_all_weights of tf.keras.optimizers.legacy, in DensePart and in Servers."""
    for kind, slots in (
      ('sgd', []),
      ('adagrad', ['accumulator']),
      ('adam', ['m', 'v']),
      ('ftrl', ['accumulator', 'linear']),
      ('rmsprop', ['rms']),
    ):
      optimizer = dense_optimizer(DenseOptimizer(kind=kind))
      variable = tf.Variable(np.ones(3, np.float32), name='kernel')
      optimizer._create_all_weights([variable])
      names = [v.name for v in optimizer.weights]
      self.assertEqual(
        names, ['iter:0', *(f'kernel/{s}:0' for s in slots)], 'checkpoints have these names'
      )
      optimizer.apply_gradients([(tf.ones(3), variable)])
      self.assertEqual([v.name for v in optimizer.weights], names, 'a step adds no variables')


if __name__ == '__main__':
  tf.test.main()
