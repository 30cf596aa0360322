"""The model: the interactions that a config names, their logits summed."""

import importlib
import inspect
import math
import zlib

import tensorflow as tf

from trainer.embedding.layer_inputs import NEEDS, LayerInputs
from trainer.errors import UserError, nearest, one_line
from trainer.model.layers.cross import Cross
from trainer.model.layers.dnn import DNN
from trainer.model.layers.ffm import FFM
from trainer.model.layers.fm import FM
from trainer.model.layers.fwfm import FwFM
from trainer.model.layers.linear import Linear

BUILT_IN = {'linear': Linear, 'fm': FM, 'ffm': FFM, 'fwfm': FwFM, 'cross': Cross, 'dnn': DNN}
# What the model, not the config, passes to a layer whose constructor takes it.
PASSED = ('name', 'seed', 'sum_across_ranks', 'dense_linear')


class CTRModel(tf.keras.Model):
  """logit = bias + Σ over the interactions of their logits.

  Every variable exists once `build` returns and is a function of the config alone, so that all
  ranks start from the same values.

  Attributes:
    interactions: list of Keras layers.
    needs: frozenset, what the interactions read of a batch (trainer.embedding.layer_inputs.NEEDS).
  """

  def __init__(self, interactions, dense_columns, loss, negative_sampling_rate):
    super().__init__(name='model')
    self.interactions = interactions
    self._dense_columns = dense_columns
    self.needs = frozenset().union(*(layer.needs for layer in interactions))
    self._clicks = loss != 'squared_error'
    self._shift = math.log(negative_sampling_rate)
    self._bias = self.add_weight('bias', [1], initializer='zeros')

  def call(self, inputs, training=False):
    """LayerInputs -> logits float32 [B, 1]."""
    # Layers read widths off static shapes, and readers of files may leave this one open.
    inputs = inputs._replace(dense=tf.ensure_shape(inputs.dense, [None, self._dense_columns]))
    return tf.add_n([layer(inputs, training=training) for layer in self.interactions]) + self._bias

  def probability(self, logits):
    """float32 [B, 1] -> float32 [B]: probability of a click; for squared error what the model
    predicts, the logit itself.

    Where the log kept a share r of the negatives, odds of P(1)/P(0) stand in it as P(1)/(r·P(0)).
    So the true odds are r times
    what the model says, p' = p / (p + (1 − p)/r), or ln r added to the logit (He et al. 2014,
    "Practical Lessons from Predicting
    Clicks on Ads at Facebook").
    """
    logits = logits[:, 0]
    return tf.sigmoid(logits + self._shift) if self._clicks else logits


def _layer_class(path, where):
  """The class that `path` names: a built-in kind, or a dotted path of a Keras layer."""
  if path in BUILT_IN:
    return BUILT_IN[path]
  module_name, _, name = path.rpartition('.')
  try:
    module = importlib.import_module(module_name)
  except Exception as e:  # the module is the user's: anything may go wrong in it
    raise UserError(
      f"{where}: cannot import '{path}': {one_line(e)}; is its directory on PYTHONPATH?"
    ) from e
  layer = getattr(module, name, None)
  if layer is None:
    raise UserError(
      f"{where}: '{module_name}' has no "
      f"'{name}'{nearest(name, [n for n in vars(module) if not n.startswith('_')])}"
    )
  if not (inspect.isclass(layer) and issubclass(layer, tf.keras.layers.Layer)):
    raise UserError(
      f"{where}: '{path}' is a {type(layer).__name__}; wanted a subclass of tf.keras.layers.Layer"
    )
  needs = getattr(layer, 'needs', None)
  if not isinstance(needs, (set, frozenset, tuple, list)):
    raise UserError(
      f"{where}: '{path}' has no class attribute `needs`; wanted a set of names out of "
      f'{", ".join(NEEDS)}'
    )
  for need in needs:
    if need not in NEEDS:
      raise UserError(f"{where}: '{path}' needs {need!r}{nearest(need, NEEDS)}")
  return layer


def _make(interaction, where, passed):
  """One layer of the config, built-in or a user's."""
  layer = _layer_class(interaction.kind, where)
  parameters = inspect.signature(layer.__init__).parameters
  inherits = layer.__init__ is tf.keras.layers.Layer.__init__
  takes_any = not inherits and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  own = (
    []
    if inherits
    else [
      name
      for name, p in parameters.items()
      if name not in ('self', *PASSED) and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
  )
  for arg in interaction.args:
    if arg in PASSED or (arg not in own and not takes_any):
      raise UserError(
        f"{where}: unknown argument '{arg}' of '{interaction.kind}'"
        + (nearest(arg, own) if own else '; it takes none')
      )
  passed = {
    name: value
    for name, value in passed.items()
    if name in parameters or (takes_any and name == 'name')
  }
  try:
    return layer(**interaction.args, **passed)
  except Exception as e:
    text = str(e) if interaction.kind in BUILT_IN else one_line(e)
    raise UserError(f"{where}: '{interaction.kind}': {text}") from e


def empty_batch(cfg, needs):
  """A `LayerInputs` of no samples, with the widths that the config gives."""
  slots = len(cfg.slots)
  tables = [
    (sum(s.table == name for s in cfg.slots), table.width)
    for name, table in cfg.sparse.tables.items()
  ]
  squares = tf.zeros([0])
  return LayerInputs(
    linear=tf.zeros([0, slots]) if 'linear' in needs else None,
    factors=[tf.zeros([0, count, width]) for count, width in tables] if 'factors' in needs else [],
    totals=[tf.zeros([0, width]) for _, width in tables] if 'totals' in needs else [],
    squares=squares if 'totals' in needs else None,
    field_factors=tf.zeros([0, slots, slots * tables[0][1]]) if 'field_factors' in needs else None,
    field_squares=squares if 'field_factors' in needs else None,
    norm=None,
    dense=tf.zeros([0, len(cfg.data.dense)]),
  )


def build(cfg, sum_across_ranks=None):
  """Builds the model of a config, with all its variables.

  Args:
    sum_across_ranks: float32 [k] -> its sum over ranks, differentiable; None in one process. For
      batch_norm 'sync'.
  Returns: CTRModel.
  Raises: UserError naming the interaction and the argument.
  """
  interactions = []
  for i, interaction in enumerate(cfg.model.interactions):
    where = f'model.interactions.{i}'
    seed = zlib.crc32(f'{cfg.seed}/{i}'.encode()) % 2**31
    # A user's layer may leave its initialisers unseeded: they follow this one.
    tf.keras.utils.set_random_seed(seed)
    layer = _make(
      interaction,
      where,
      {
        'name': f'{interaction.kind.rpartition(".")[2].lower()}_{i}',
        'seed': seed,
        'sum_across_ranks': sum_across_ranks,
        'dense_linear': cfg.model.dense_linear,
      },
    )
    example = empty_batch(cfg, layer.needs)
    try:
      with tf.name_scope(layer.name):
        layer.build(tf.nest.map_structure(lambda t: None if t is None else t.shape, example))
      logits = layer(example, training=False)
      if logits.shape != [0, 1]:
        raise ValueError(f'gave shape {logits.shape} for a batch of 0 samples; wanted (0, 1)')
    except Exception as e:
      raise UserError(
        f"{where}: '{interaction.kind}' fails on an empty batch: {one_line(e)}"
      ) from e
    interactions.append(layer)
  return CTRModel(
    interactions, len(cfg.data.dense), cfg.model.loss, cfg.model.negative_sampling_rate
  )
