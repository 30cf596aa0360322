"""Model assembly:

what a config names is built, on every rank the same; what it names wrongly is said in one line.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap

import numpy as np
import pytest
import tensorflow as tf

from tests.support import small
from trainer import config, errors
from trainer.config import rules
from trainer.embedding.layer_inputs import LayerInputs
from trainer.model.builder import build, check_layers, empty_inputs, layer_class

ROOT = pathlib.Path(__file__).resolve().parents[3]


def make_config(interactions, **model):
  return small.config(
    seed=model.pop('seed', 0),
    data={'slots': [{'name': n} for n in 'abc'], 'dense': [{'name': 'u'}]},
    sparse={'tables': {'default': {'width': 4}}},
    model={'interactions': interactions, **model},
  )


ALL = [
  'linear',
  'fm',
  'ffm',
  'fwfm',
  {'cross': {'layers': 2, 'low_rank': 2}},
  {'dnn': {'hidden': [8, 4], 'batch_norm': 'local'}},
  {'dlrm': {'bottom': [4], 'hidden': [8]}},
]


def batch(size, seed=0):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return tf.constant(rng.normal(size=(size, *shape)), tf.float32)

  return LayerInputs(
    normal(3), [normal(3, 4)], [normal(4)], normal(), normal(3, 12), normal(), None, normal(1)
  )


def present(embedded):
  return [t for t in tf.nest.flatten(embedded) if t is not None]


# An interaction, and how the one line about it begins.
MISTAKES = [
  (
    {'dnn': {'hiden': [4]}},
    "model.interactions.0: unknown argument 'hiden' of 'dnn'; the nearest valid name is 'hidden'",
  ),
  ({'dnn': {'seed': 3}}, "model.interactions.0: unknown argument 'seed' of 'dnn'"),
  (
    {'fm': {'width': 3}},
    "model.interactions.0: unknown argument 'width' of 'fm'; it takes none",
  ),
  (
    {'dnn': {'hidden': 4}},
    "model.interactions.0: 'dnn': hidden: found 4; wanted a list of whole numbers >= 1",
  ),
  (
    {'dnn': {'dropout': 1.5}},
    "model.interactions.0: 'dnn': dropout: found 1.5; wanted a number in [0, 1)",
  ),
  (
    {'dnn': {'batch_norm': True}},
    "model.interactions.0: 'dnn': batch_norm: found true; wanted none, local or sync",
  ),
  ({'dnn': {'activation': 'relux'}}, "model.interactions.0: 'dnn': activation: found 'relux'"),
  (
    {'cross': {'layers': 0}},
    "model.interactions.0: 'cross': layers: found 0; wanted a whole number >= 1",
  ),
  (
    {'cross': {'low_rank': 0}},
    "model.interactions.0: 'cross': low_rank: found 0; wanted a whole number >= 1 or null",
  ),
  (
    'no_such_module.Layer',
    "model.interactions.0: cannot import 'no_such_module.Layer': ModuleNotFoundError",
  ),
  (
    'my_broken_layers.Layer',
    "model.interactions.0: cannot import 'my_broken_layers.Layer': ZeroDivisionError: "
    'division by zero',
  ),
  (
    'my_layers.Unseded',
    "model.interactions.0: 'my_layers' has no 'Unseded'; the nearest valid name is 'Unseeded'",
  ),
  (
    'my_layers.something',
    "model.interactions.0: 'my_layers.something' is a int; wanted a subclass of "
    'tf.keras.layers.Layer',
  ),
  (
    'my_layers.OfKeras3',
    "model.interactions.0: 'my_layers.OfKeras3' is a layer of Keras 3 (import keras); wanted",
  ),
  (
    'my_layers.NoNeeds',
    "model.interactions.0: 'my_layers.NoNeeds' has no class attribute `needs`",
  ),
  (
    'my_layers.WrongNeeds',
    "model.interactions.0: 'my_layers.WrongNeeds' needs 'factor'; the nearest valid name is "
    "'factors'",
  ),
  (
    'my_layers.WrongShape',
    "model.interactions.0: 'my_layers.WrongShape' fails on an empty batch: ValueError: gave "
    'shape (0, 3)',
  ),
  (
    {'my_layers.Unseeded': {'units': 11}},
    "model.interactions.0: 'my_layers.Unseeded': ValueError: units: found 11; wanted fewer",
  ),
  ({'my_layers.Unseeded': {'unit': 1}}, "model.interactions.0: 'my_layers.Unseeded': "),
]


class ModelTest(tf.test.TestCase):
  def test_logit_is_the_sum_of_interactions_and_bias(self):
    model, embedded = build(make_config(ALL)), batch(5)
    model.bias.assign([0.25])
    self.assertAllClose(
      model(embedded), sum(layer(embedded) for layer in model.interactions) + 0.25
    )
    self.assertEqual(model.needs, {'linear', 'factors', 'totals', 'field_factors'})

  def test_every_variable_exists_at_once_and_follows_the_seed(self):
    tf.random.set_seed(1)
    one = build(make_config(ALL))
    tf.random.set_seed(2)  # and what the process drew before does not matter
    same, other = build(make_config(ALL)), build(make_config(ALL, seed=1))
    self.assertNotEmpty(one.variables)
    self.assertEqual([v.name for v in one.variables], [v.name for v in same.variables])
    for a, b in zip(one.variables, same.variables):
      self.assertAllEqual(a, b)
    matrices = [(a, b) for a, b in zip(one.variables, other.variables) if 'kernel' in a.name]
    self.assertLen(matrices, 7)
    for a, b in matrices:
      self.assertNotAllEqual(a, b)
    before = len(one.variables)
    one(batch(3), training=True)
    self.assertLen(one.variables, before)

  @pytest.mark.long
  def test_trains_in_a_function_with_batches_of_any_size(self):
    model = build(make_config(ALL))

    @tf.function(input_signature=[[tf.TensorSpec([None, *t.shape[1:]]) for t in present(batch(1))]])
    def gradients(tensors):
      linear, factors, totals, squares, field_factors, field_squares, dense = tensors
      with tf.GradientTape() as tape:
        loss = tf.reduce_sum(
          model(
            LayerInputs(
              linear, [factors], [totals], squares, field_factors, field_squares, None, dense
            ),
            training=True,
          )
        )
      return tape.gradient(loss, model.trainable_variables)

    for size in (5, 1, 0):
      for g in gradients(present(batch(size))):
        self.assertAllInRange(g, -1e6, 1e6)
    for g in gradients(present(batch(0))):
      self.assertAllEqual(g, tf.zeros_like(g))

  def test_only_what_is_needed_is_read(self):
    self.assertEqual(build(make_config(['linear'])).needs, {'linear'})
    self.assertEqual(build(make_config(['fm'])).needs, {'totals'})
    self.assertEqual(build(make_config(['linear', 'ffm'])).needs, {'linear', 'field_factors'})
    self.assertEqual(build(make_config(['dnn'])).needs, {'factors'})
    embedded = empty_inputs(make_config(['fm']), {'totals'})
    self.assertIsNone(embedded.linear)
    self.assertIsNone(embedded.field_factors)

  def test_layers_have_one_number_of_members(self):
    interactions = [{'dnn': {'hidden': [4], 'members': m}} for m in (3, 1, 3)]
    model = build(make_config(interactions))
    inputs = empty_inputs(make_config(interactions), model.needs)
    self.assertEqual(model(inputs, training=True).shape, [0, 3])
    self.assertEqual(model(inputs).shape, [0, 1])
    interactions[1]['dnn']['members'] = 2
    with self.assertRaisesRegex(errors.UserError, r'found layers of \[2, 3\] members'):
      build(make_config(interactions))

  def test_negative_sampling_is_corrected(self):
    """Keep a share of the negatives, fit the odds by counting, and find the true rate again."""
    rng = np.random.default_rng(0)
    clicked = rng.random(400_000) < 0.05
    kept = clicked | (rng.random(clicked.size) < 0.1)
    sampled_rate = clicked[kept].mean()
    logit = np.log(sampled_rate / (1 - sampled_rate))
    model = build(make_config(['linear'], negative_sampling_rate=0.1))
    corrected = model.probability(tf.constant([[logit]], tf.float32))
    self.assertAllClose(corrected, [0.05], atol=0.002)
    self.assertAllClose(
      corrected, [sampled_rate / (sampled_rate + (1 - sampled_rate) / 0.1)], rtol=1e-5
    )
    self.assertAllClose(
      build(make_config(['linear'])).probability(tf.constant([[logit]], tf.float32)), [sampled_rate]
    )

  def test_squared_error_predicts_the_logit(self):
    model = build(make_config(['linear'], loss='squared_error'))
    self.assertAllEqual(model.probability(tf.constant([[3.0], [-2.0]])), [3, -2])


MODULE = """
import keras
import tensorflow as tf
something = 3
class OfKeras3(keras.layers.Layer):
  needs = {'linear'}
class NoNeeds(tf.keras.layers.Layer):
  pass
class WrongNeeds(tf.keras.layers.Layer):
  needs = {'factor'}
class WrongShape(tf.keras.layers.Layer):
  needs = {'linear'}
  def call(self, embedded, training=False):
    return embedded.linear
class Unseeded(tf.keras.layers.Layer):
  needs = {'linear'}
  def __init__(self, units=2, **kwargs):
    super().__init__(**kwargs)
    if units > 9:
      raise ValueError('units: found %d; wanted fewer' % units)
    self.hidden, self.head = tf.keras.layers.Dense(units), tf.keras.layers.Dense(1)
  def call(self, embedded, training=False):
    return self.head(self.hidden(embedded.linear))


class Failing(tf.keras.layers.Layer):
  needs = {'linear'}

  def __init__(self, what, stage, **kwargs):
    super().__init__(**kwargs)
    self.what, self.stage = what, stage
    self.inner = Failing(what, 'call') if stage == 'inner call' else None
    self.fail('init')

  def build(self, shapes):
    self.fail('build')

  def call(self, inputs, training=False):
    self.fail('call')
    if self.stage == 'function':
      tf.function(lambda: self.fail('function'))()
    return self.inner(inputs)

  def fail(self, stage):
    if stage == self.stage:
      exec(self.what, {'self': self, 'tf': tf})
"""


class UserLayerTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    directory = self.enter_context(tempfile.TemporaryDirectory())
    with open(os.path.join(directory, 'my_layers.py'), 'w', encoding='utf-8') as f:
      f.write(MODULE)
    with open(os.path.join(directory, 'my_broken_layers.py'), 'w', encoding='utf-8') as f:
      f.write('1 / 0')
    sys.path.insert(0, directory)
    self.addCleanup(sys.path.remove, directory)
    self.addCleanup(sys.modules.pop, 'my_layers', None)

  def test_is_built_from_its_path_the_same_on_every_rank(self):
    one, same = (
      build(make_config(['linear', {'my_layers.Unseeded': {'units': 4}}])) for _ in range(2)
    )
    self.assertLen(one.variables, 6)
    for a, b in zip(one.variables, same.variables):
      self.assertAllEqual(a, b)
    self.assertEqual(one(batch(5)).shape, [5, 1])

  def test_the_config_knows_what_built_in_layers_say_of_themselves(self):
    for kind, known in config.BUILT_IN.items():
      layer = layer_class(kind, kind)
      self.assertEqual((vars(layer)['kind'], layer.needs), (kind, known.needs))
      for name in ('part', 'reads_dense', 'one_width'):
        if hasattr(layer, name):
          self.assertEqual(getattr(layer, name), getattr(known, name), f'{name} of {kind}')

  def test_a_built_in_interaction_is_one_file(self):
    folder = pathlib.Path(self.get_temp_dir(), 'one_more')
    shutil.copytree(ROOT / 'trainer', folder / 'trainer')
    source = (ROOT / 'trainer/model/layers/fm.py').read_text('utf-8')
    source = source.replace("kind = 'fm'", "kind = 'fm2'")
    (folder / 'trainer' / 'model' / 'layers' / 'another.py').write_text(source, 'utf-8')
    code = """
      from trainer.config import BUILT_IN, parse
      data = '{train: [x], label: y, slots: [{name: a}]}'
      parse('{data: %s, model: {interactions: [fm2]}}' % data, 'a test')
      print(BUILT_IN['fm2'].path, BUILT_IN['fm2'].reads_dense)
    """
    command = [sys.executable, '-c', textwrap.dedent(code)]
    env = {'PYTHONPATH': str(ROOT)}  # for ops; the folder comes first
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    self.assertEqual(done.stdout, 'trainer.model.layers.another.FM False\n', done.stderr)

  def test_example_outside_the_package(self):
    example = os.path.join(
      os.path.dirname(__file__), '..', '..', '..', 'examples', 'own_interaction'
    )
    sys.path.insert(0, example)
    self.addCleanup(sys.path.remove, example)
    cfg = config.load(os.path.join(example, 'config.yaml'))
    model = build(cfg)
    self.assertEqual(model.needs, {'linear', 'factors'})
    self.assertEqual(model(empty_inputs(cfg, model.needs), training=True).shape, [0, 1])

  def test_example_of_a_tower(self):
    example = os.path.join(os.path.dirname(__file__), '..', '..', '..', 'examples', 'own_tower')
    sys.path.insert(0, example)
    self.addCleanup(sys.path.remove, example)
    cfg = config.load(os.path.join(example, 'config.yaml'))
    model = build(cfg)
    self.assertEqual(model(empty_inputs(cfg, model.needs), training=True).shape, [0, 2])

  def test_what_a_layer_raises_is_told_wherever_it_raises_it(self):
    for stage in ('init', 'build', 'call', 'inner call', 'function'):
      for what, text in (
        ("raise ValueError('units: wanted 4')", 'ValueError: units: wanted 4'),
        ("raise ValueError('units:\\nwanted 4')", 'ValueError: units:'),
        ("raise KeyError('user')", "KeyError: 'user'"),
        (
          "raise UnicodeDecodeError('ascii', b'x', 0, 1, 'odd')",
          "UnicodeDecodeError: 'ascii' codec",
        ),
        ('self.nothing', "AttributeError: 'Failing' object has no attribute 'nothing'"),
        ('1 / 0', 'ZeroDivisionError: division by zero'),
        ('assert False', 'AssertionError: at <string>:1'),
        ('tf.reshape(tf.zeros([3]), [2, 2])', r'\w+Error: (Input to|Cannot) reshape'),
      ):
        with self.subTest(stage=stage, what=what):
          layer = {'my_layers.Failing': {'what': what, 'stage': stage}}
          with self.assertRaisesRegex(errors.UserError, f"^[^\n]*0: 'my_[^\n]*: {text}[^\n]*$"):
            build(make_config([layer]))

  def test_a_class_of_a_notebook_or_script_is_told_with_the_way_out(self):
    cfg = make_config(['linear', '__main__.Hadamard'])
    told = [line for line in rules.warnings(cfg) if '__main__' in line]
    self.assertLen(told, 1)
    self.assertRegex(
      told[0], r"^model.interactions.1: found '__main__.Hadamard', a class of this .*"
    )
    self.assertRegex(
      told[0], r'wanted it in a file on PYTHONPATH, as my_layers.py, and my_layers.H'
    )
    wanted = r"model.interactions.1: .*'__main__.Hadamard', a class of the notebook or script that"
    with self.assertRaisesRegex(errors.UserError, wanted):  # in another process
      check_layers(cfg.model)

  def test_mistakes_are_one_line_each(self):
    for interaction, text in MISTAKES:
      with self.subTest(text):
        with self.assertRaises(errors.UserError) as caught:
          build(make_config([interaction]))
        self.assertStartsWith(str(caught.exception), text)
        self.assertNotIn('\n', str(caught.exception))
