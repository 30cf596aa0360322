"""Products in bfloat16 against NumPy, and training steps that multiply so."""

import contextlib
import io
import itertools
import pathlib
import tempfile
import threading
from unittest import mock

import numpy as np
import tensorflow as tf

from ops import bfloat16, library
from tests.support import small
from tests.support.steps import make_config
from tests.support.threads import on_threads
from trainer import api
from trainer.embedding.layer_inputs import LayerInputs
from trainer.errors import UserError
from trainer.model.builder import build
from trainer.training import dense_dtype

WANTED = 'wants a processor with avx512_bf16'
# What the measurement may find.
FASTER, SLOWER = ({'float32': 1e-3, 'bfloat16': taken} for taken in (5e-4, 3e-3))


def rounded(x: np.ndarray) -> np.ndarray:
  return tf.cast(tf.cast(x, tf.bfloat16), tf.float32).numpy().astype(np.float64)


class ProductTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.random = np.random.default_rng(0)

  def matrix(self, *shape: int) -> np.ndarray:
    return self.random.normal(size=shape).astype(np.float32)

  def check(self, m: int, widths: list[int], n: int, turned: bool, bias: bool, relu: bool) -> None:
    """A product of parts of these widths, and its gradients, against NumPy in float64."""
    left = [self.matrix(m, width) for width in widths]
    right = self.matrix(*((n, sum(widths)) if turned else (sum(widths), n)))
    added, grad = self.matrix(n) if bias else None, self.matrix(m, n)
    inputs = [tf.constant(x) for x in (*left, right, *([added] if bias else []))]
    with tf.GradientTape() as tape:
      tape.watch(inputs)
      parts, (b, *biases) = inputs[: len(left)], inputs[len(left) :]
      product = bfloat16.product(parts, b, *biases, relu=relu, transpose_b=turned)
    gradients = tape.gradient(product, inputs, tf.constant(grad))
    near_a, near_b = (
      rounded(np.concatenate(left, 1)),
      rounded(right).T if turned else rounded(right),
    )
    wanted = near_a @ near_b + (added if bias else 0)
    if relu:
      wanted = np.maximum(wanted, 0)
      grad = np.where(product.numpy() > 0, grad, 0)
    of_a, of_b = rounded(grad) @ near_b.T, near_a.T @ rounded(grad)
    of_parts = np.split(of_a, np.cumsum(widths)[:-1], 1)
    of_bias = [grad.astype(np.float64).sum(0)] if bias else []
    self.assertAllClose(product, wanted, rtol=1e-5, atol=1e-4)
    for found, one in zip(gradients, [*of_parts, of_b.T if turned else of_b, *of_bias]):
      self.assertAllClose(found, one, rtol=1e-5, atol=1e-4)

  def test_product_and_gradients_round_their_factors_and_nothing_else(self):
    shapes = ((70, [101], 65), (1, [3], 1), (0, [4], 5), (5, [0], 4), (4, [3], 0))
    for here in {bfloat16.available(), False}:  # also as on a processor without the instruction
      with mock.patch.object(bfloat16, 'available', return_value=here):
        for m, widths, n in (*shapes, (130, [64, 13], 200), (33, [1, 0, 6], 3), (7, [0, 0], 2)):
          for turned, bias, relu in itertools.product((False, True), repeat=3):
            if not (turned and bias):
              self.check(m, widths, n, turned, bias, relu)

  def test_on_gpus_it_is_a_dense_layer_of_keras_mixed_policy(self):
    """To the bit, with float32 weights; `tests/single/training/placement_test.py` trains so."""
    x, grad = (tf.constant(self.matrix(*shape)) for shape in ((33, 20), (33, 7)))
    for activation in ('relu', None):
      layer = tf.keras.layers.Dense(7, activation, dtype='mixed_bfloat16')
      layer.build(x.shape)
      layer.bias.assign(self.matrix(7))
      with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        wanted = tf.cast(layer(x), tf.float32)
        with mock.patch.object(tf.config, 'get_visible_devices', return_value=['a GPU']):
          self.assertTrue(bfloat16.available())
          parts, relu = tf.split(x, [13, 7], 1), activation == 'relu'
          found = bfloat16.product(parts, layer.kernel, layer.bias, relu=relu)
      self.assertEqual((found.dtype, layer.kernel.dtype), (tf.float32, tf.float32))
      self.assertAllEqual(found, wanted)
      inputs = [x, layer.kernel, layer.bias]
      for one, other in zip(*(tape.gradient(y, inputs, grad) for y in (found, wanted))):
        self.assertAllEqual(one, other)

  def test_shapes_that_do_not_fit_are_refused(self):
    if not bfloat16.available():
      self.skipTest(WANTED)
    for a, b in (((2, 3), (4, 5)), ((2,), (2, 3)), ((2, 3), (3, 4, 5))):
      with self.assertRaises((tf.errors.InvalidArgumentError, ValueError)):
        bfloat16.product(tf.zeros(a), tf.zeros(b))
    a, b, errors = tf.zeros([2, 3]), tf.zeros([3, 4]), (tf.errors.InvalidArgumentError, ValueError)
    with self.assertRaises(errors):
      bfloat16.product([a, tf.zeros([1, 3])], tf.zeros([6, 4]))
    with self.assertRaises(errors):
      bfloat16.product(a, b, tf.zeros([5]))
    ops, wrong = library.load(), tf.zeros([2, 5])
    for product, grad in ((a @ b, wrong), (wrong, a @ b)):
      given = {'a': [a], 'b': b, 'product': product, 'grad': grad, 'relu': True}
      with self.assertRaises(errors):
        ops.ctr_bfloat16_product_grad_a(**given)
      with self.assertRaises(errors):
        ops.ctr_bfloat16_product_grad_b(**given)
    turned = {'a': [a], 'b': tf.zeros([4, 3]), 'product': a, 'grad': tf.zeros([2, 4])}
    with self.assertRaisesRegex(errors, 'bias wants'):
      ops.ctr_bfloat16_product_grad_b(**turned, bias=True, transpose_b=True)

  def test_what_is_not_finite_stays_so(self):
    product = bfloat16.product(tf.constant([[np.inf, 1], [np.nan, 1]]), tf.ones([2, 1]))
    self.assertAllEqual(np.isfinite(product), [[False], [False]])


class ModelTest(tf.test.TestCase):
  """Layers whose training steps multiply in bfloat16."""

  layers = (
    {'dnn': {'hidden': [16, 8]}},
    {'dlrm': {'bottom': [8], 'hidden': [16]}},
    {'cross': {'layers': 2}},
    {'cross': {'layers': 2, 'low_rank': 4}},
  )

  def logits(self, layer: dict, dtype: str, training: bool) -> np.ndarray:
    cfg = make_config({'model.interactions': [layer], 'train.dense_dtype': dtype})
    random = np.random.default_rng(1)
    count = len(cfg.data.slots)
    width = next(iter(cfg.sparse.tables.values())).width
    normal = random.normal(size=(50, count, width)).astype(np.float32)
    inputs = LayerInputs(
      linear=None,
      factors=[tf.constant(normal)],
      totals=[],
      squares=None,
      field_factors=None,
      field_squares=None,
      norm=None,
      dense=tf.constant(random.normal(size=(50, len(cfg.data.dense))).astype(np.float32)),
    )
    return build(cfg)(inputs, training=training).numpy()

  def test_training_is_near_float32_and_predictions_are_float32(self):
    if not bfloat16.available():
      self.skipTest(WANTED)
    for layer in self.layers:
      exact = self.logits(layer, 'float32', training=True)
      near = self.logits(layer, 'bfloat16', training=True)
      self.assertAllClose(near, exact, rtol=0.02, atol=0.02 * np.abs(exact).max())
      self.assertNotAllEqual(near, exact)
      for training_dtype in ('float32', 'bfloat16'):
        given = self.logits(layer, training_dtype, training=False)
        self.assertAllClose(given, exact, rtol=1e-5, atol=1e-5)

  def test_a_model_without_such_layers_is_refused(self):
    with self.assertRaisesRegex(UserError, 'train.dense_dtype.*no layer of this model'):
      build(make_config({'model.interactions': ['linear', 'fm'], 'train.dense_dtype': 'bfloat16'}))


class ChoiceTest(tf.test.TestCase):
  """What a run multiplies in is measured once, and kept."""

  def setUp(self):
    super().setUp()
    self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())

  def chosen(self, seconds: dict[str, float], lacking: int | None = None) -> tuple[set, str]:
    """Asks on 2 ranks.

    Args:
      seconds: what is measured.
      lacking: the rank whose processor lacks the instruction.
    Returns:
      The answers, and what was told.
    """
    cfg = make_config({'train.dense_dtype': 'bfloat16', 'run_dir': self.folder})
    rank, told = threading.local(), io.StringIO()

    def choose(communicator):
      rank.number = communicator.rank
      return dense_dtype.chosen(cfg.train.dense_dtype, cfg.run_dir, communicator)

    with (
      mock.patch.object(bfloat16, 'seconds', return_value=seconds),
      mock.patch.object(bfloat16, 'available', lambda: rank.number != lacking),
      mock.patch.object(dense_dtype.logging, 'warning', told.write),
      contextlib.redirect_stdout(told),
    ):
      return set(on_threads(2, choose)), told.getvalue()

  def test_what_is_faster_is_chosen_and_kept(self):
    for seconds, wanted in ((FASTER, 'bfloat16'), (SLOWER, 'float32')):
      self.folder = tempfile.mkdtemp(dir=self.get_temp_dir())
      answers, told = self.chosen(seconds)
      self.assertEqual(answers, {wanted})
      milliseconds = f'{1000 * seconds["bfloat16"]:.2f} ms in bfloat16'
      self.assertRegex(
        told, f'^train.dense_dtype: .*1.00 ms in float32, {milliseconds}.* {wanted}$'
      )
      other = SLOWER if seconds is FASTER else FASTER
      answers, told = self.chosen(other)
      self.assertEqual(answers, {wanted})
      self.assertRegex(told, f'^train.dense_dtype: the run goes on in {wanted}, as it began$')

  def test_a_rank_without_the_instruction_decides_for_all_of_a_new_run(self):
    answers, told = self.chosen(FASTER, lacking=1)
    self.assertEqual(answers, {'float32'})
    self.assertRegex(told, 'in float32, because .* cannot multiply in bfloat16 .no avx512_bf16.$')
    self.assertEqual(self.chosen(FASTER)[0], {'float32'})

  def test_a_run_that_began_in_bfloat16_goes_on_so_without_the_instruction(self):
    self.chosen(FASTER)
    answers, told = self.chosen(FASTER, lacking=1)
    self.assertEqual(answers, {'bfloat16'})
    self.assertRegex(told, 'multiplies rounded factors in float32, which is slower')

  def test_a_choice_that_is_damaged_is_refused(self):
    pathlib.Path(self.folder, dense_dtype.FILE).write_text('float16')
    answers, _ = self.chosen(FASTER)
    for error in answers:
      self.assertRegex(str(error), "dense_dtype: found 'float16'; wanted 'float32', 'bfloat16'")

  def test_a_run_multiplies_in_what_was_chosen(self):
    log = pathlib.Path(self.folder, 'log.csv')
    log.write_text('user,click\n' + '1,0\n2,1\n' * 20)
    tree = small.tree(
      run_dir=f'{self.folder}/run',
      data={'train': [str(log)], 'label': 'click', 'slots': [{'name': 'user'}]},
      model={'interactions': ['linear', {'dnn': {'hidden': [4]}}]},
      train={'dense_dtype': 'bfloat16', 'batch_size': 10},
    )
    with mock.patch.object(bfloat16, 'available', return_value=True):
      with mock.patch.object(bfloat16, 'seconds', return_value=SLOWER):
        with mock.patch.object(bfloat16, 'product', side_effect=AssertionError):
          api.fit(tree)

  def test_the_measurement_takes_little_and_finds_both(self):
    if not bfloat16.available():
      self.skipTest(WANTED)
    found = bfloat16.seconds()
    self.assertEqual(found.keys(), {'float32', 'bfloat16'})
    self.assertAllGreater(list(found.values()), 0)

  def test_the_measurement_leaves_out_disturbed_rounds(self):
    if not bfloat16.available():
      self.skipTest(WANTED)
    seconds = [1, 2] * 4 + [9, 2] * 4  # float32 is faster; another process disturbs its last rounds
    clock = iter(np.cumsum([[0, s] for s in seconds]).tolist())
    with mock.patch.object(bfloat16, 'time', mock.Mock(perf_counter=clock.__next__)):
      self.assertEqual(bfloat16.seconds(), {'float32': 1, 'bfloat16': 2})


if __name__ == '__main__':
  tf.test.main()
