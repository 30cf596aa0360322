"""Builds the model of a config: a CTRModel or, with model.retrieval, the model of that wing."""

import importlib
import inspect
import zlib
from collections.abc import Callable, Collection, Mapping

import tensorflow as tf

from ops import bfloat16, float32
from trainer.config import BUILT_IN, Config, Interaction, Model
from trainer.embedding.layer_inputs import NEEDS, HistoryVectors, LayerInputs, with_fields
from trainer.errors import UserError, nearest, one_line
from trainer.model.click_model import CTRModel
from trainer.wings import wing

# Constructor arguments of layers that the builder passes; the config cannot set them.
PASSED = ('name', 'seed', 'sum_across_ranks', 'tasks', 'multiply', 'table_width')


def layer_class(kind: str, key: str) -> type[tf.keras.layers.Layer]:
  """Returns the class of a layer, whose `kind` is built in or the dotted path of a user's class.

  Raises a UserError with `key` if it cannot be imported, is no Keras layer, or lacks valid `needs`.
  """
  module_name, _, name = (BUILT_IN[kind].path if kind in BUILT_IN else kind).rpartition('.')
  try:
    module = importlib.import_module(module_name)
  except Exception as e:  # the module is the user's: anything may go wrong in it
    raise UserError(
      f"{key}: cannot import '{kind}': {one_line(e)}; is its directory on PYTHONPATH?"
    ) from e
  layer = getattr(module, name, None)
  if layer is None and module_name == '__main__':
    raise UserError(
      f"{key}: found '{kind}', a class of the notebook or script that trained, which this process "
      f'lacks; wanted it in a file on PYTHONPATH, as my_layers.py, and my_layers.{name} in training'
    )
  if layer is None:
    public = [n for n in vars(module) if not n.startswith('_')]
    raise UserError(f"{key}: '{module_name}' has no '{name}'{nearest(name, public)}")
  if not (inspect.isclass(layer) and issubclass(layer, tf.keras.layers.Layer)):
    bases = layer.__mro__ if inspect.isclass(layer) else ()
    is_keras_3 = any(base.__module__.startswith('keras.') for base in bases)
    found = 'a layer of Keras 3 (import keras)' if is_keras_3 else f'a {type(layer).__name__}'
    raise UserError(
      f"{key}: '{kind}' is {found}; wanted a subclass of tf.keras.layers.Layer "
      '(import tensorflow as tf)'
    )
  needs = getattr(layer, 'needs', None)
  if not isinstance(needs, (set, frozenset, tuple, list)):
    raise UserError(
      f"{key}: '{kind}' has no class attribute `needs`; wanted a set of names out of "
      f'{", ".join(NEEDS)}'
    )
  for need in needs:
    if need not in NEEDS:
      raise UserError(f"{key}: '{kind}' needs {need!r}{nearest(need, NEEDS)}")
  return layer


def layer_name(key: str, kind: str) -> str:
  """Returns the name that the builder gives to the layer at a key of the config."""
  return f'{kind.rpartition(".")[2].lower()}_{_place(key).replace("/", "_")}'


def _place(key: str) -> str:
  """Returns a layer's key in short: '0' for model.interactions.0, 'buy/1' for one of task buy."""
  place = key.removeprefix('model.').removeprefix('interactions.').removeprefix('tasks.')
  return place.replace('.interactions.', '/')


def check_layers(model: Model) -> None:
  """Raises the errors of `layer_class` for the layers that a model names; ignores arguments."""
  for key, interaction in model.all_interactions().items():
    layer_class(interaction.kind, key)


def constructor_parameters(
  layer: type[tf.keras.layers.Layer],
) -> tuple[dict[str, inspect.Parameter], bool]:
  """Returns the parameters of a layer's constructor, and whether it takes other keywords too.

  If a constructor takes **kwargs, the parameters of its base class's constructor are included.
  """
  parameters, takes_any = {}, True
  for base in layer.__mro__[: layer.__mro__.index(tf.keras.layers.Layer)]:
    if takes_any and '__init__' in vars(base):
      own = inspect.signature(base.__init__).parameters.values()
      takes_any = any(p.kind is p.VAR_KEYWORD for p in own)
      named = {p.name: p for p in own if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
      parameters |= {name: p for name, p in named.items() if name not in parameters}
  # A layer without a constructor of its own takes no arguments.
  return parameters, takes_any and bool(parameters)


def _make_layer(
  interaction: Interaction, key: str, passed: Mapping[str, object]
) -> tf.keras.layers.Layer:
  """Makes one layer of the config, built-in or a user's.

  `passed` has values for names in PASSED, which a config cannot set; a layer gets those it takes.
  """
  layer = layer_class(interaction.kind, key)
  parameters, takes_any = constructor_parameters(layer)
  own = [n for n in parameters if n not in ('self', *PASSED)]
  for argument in interaction.args:
    if argument in PASSED or (argument not in own and not takes_any):
      raise UserError(
        f"{key}: unknown argument '{argument}' of '{interaction.kind}'"
        + (nearest(argument, own) if own else '; it takes none')
      )
  takes_name = takes_any or not parameters
  also_passed = {n: v for n, v in passed.items() if n in parameters or (n == 'name' and takes_name)}
  try:
    return layer(**interaction.args, **also_passed)
  except Exception as e:
    text = str(e) if interaction.kind in BUILT_IN else one_line(e)
    raise UserError(f"{key}: '{interaction.kind}': {text}") from e


def empty_inputs(cfg: Config, needs: Collection[str]) -> LayerInputs:
  """Returns the LayerInputs of 0 samples; inputs that are not in `needs` are None or []."""
  slots = len(cfg.data.slots)
  tables = [
    (sum(s.table == name for s in cfg.data.slots), table.width)
    for name, table in cfg.sparse.tables.items()
  ]
  squares = tf.zeros([0])
  histories = {}
  for s in cfg.ordered_slots:
    if s.sequence:
      width = cfg.sparse.tables[s.table].width
      vectors, mask = tf.zeros([0, 0, width]), tf.zeros([0, 0], tf.bool)
      histories[s.name] = HistoryVectors(vectors, mask, tf.zeros([0, width]))
  return LayerInputs(
    linear=tf.zeros([0, slots]) if 'linear' in needs else None,
    factors=[tf.zeros([0, count, width]) for count, width in tables] if 'factors' in needs else [],
    totals=[tf.zeros([0, width]) for _, width in tables] if 'totals' in needs else [],
    squares=squares if 'totals' in needs else None,
    field_factors=tf.zeros([0, slots, slots * tables[0][1]]) if 'field_factors' in needs else None,
    field_squares=squares if 'field_factors' in needs else None,
    norm=None,
    dense=tf.zeros([0, len(cfg.dense_inputs())]),
    histories=histories if 'histories' in needs else None,
  )


class _Builder:
  """Makes the layers of a config and calls each once, on a batch of 0 samples."""

  def __init__(
    self,
    cfg: Config,
    sum_across_ranks: Callable[[tf.Tensor], tf.Tensor] | None,
    dense_dtype: str | None,
  ):
    self._cfg = cfg
    in_bfloat16 = (dense_dtype or cfg.train.dense_dtype) == 'bfloat16'
    self._passed = {
      'sum_across_ranks': sum_across_ranks,
      'tasks': len(cfg.labels),
      'multiply': bfloat16.product if in_bfloat16 else float32.product,
      'table_width': next(iter(cfg.sparse.tables.values())).width,
    }
    self.fields: tf.Tensor | None = None  # [0, Dn, D], the output of model.dense_embedding
    self.multiplies = False  # whether a layer took `multiply`

  def layer(
    self, interaction: Interaction, key: str, shared: tf.Tensor | None = None
  ) -> tuple[tf.keras.layers.Layer, tf.Tensor | list[tf.Tensor]]:
    """Makes a layer and its variables; returns it, and its output for a batch of 0 samples.

    Its seed and name are made of `key`. `shared` is the output of `model.shared`, [0, H], if any.
    """
    cfg = self._cfg
    seed = zlib.crc32(f'{cfg.seed}/{_place(key)}'.encode()) % 2**31
    # This also seeds initialisers that a user's layer leaves unseeded.
    tf.keras.utils.set_random_seed(seed)
    passed = self._passed | {'name': layer_name(key, interaction.kind), 'seed': seed}
    layer = _make_layer(interaction, key, passed)
    self.multiplies |= 'multiply' in constructor_parameters(type(layer))[0]
    if 'shared' in layer.needs and shared is None:
      raise UserError(
        f"{key}: '{interaction.kind}' needs 'shared'; wanted it in model.tasks, with model.shared"
      )
    example = empty_inputs(cfg, layer.needs)._replace(shared=shared)
    if self.fields is not None:
      example = with_fields(example, self.fields)
    try:
      with tf.name_scope(layer.name):
        layer.build(tf.nest.map_structure(lambda t: None if t is None else t.shape, example))
      output = layer(example, training=False)
    except Exception as e:
      raise _fails_on_empty(key, interaction, one_line(e)) from e
    return layer, output

  def interaction(
    self, interaction: Interaction, key: str, shared: tf.Tensor | None = None
  ) -> tf.keras.layers.Layer:
    """Makes a layer as `layer` does; its output must be logits, [B, 1]."""
    layer, logits = self.layer(interaction, key, shared)
    if logits.shape != [0, 1]:
      text = f'ValueError: gave shape {logits.shape} for a batch of 0 samples; wanted (0, 1)'
      raise _fails_on_empty(key, interaction, text)
    return layer


def _fails_on_empty(key: str, interaction: Interaction, text: str) -> UserError:
  return UserError(f"{key}: '{interaction.kind}' fails on an empty batch: {text}")


def build(
  cfg: Config,
  sum_across_ranks: Callable[[tf.Tensor], tf.Tensor] | None = None,
  dense_dtype: str | None = None,
) -> tf.keras.Model:
  """Builds the model of a config, with all its variables; UserError if a layer fails.

  The arguments are those of trainer.training.dense_part.DensePart; without `sum_across_ranks` there
  is a single process.
  """
  if cfg.model.retrieval is not None:
    return wing('retrieval.model')(cfg)
  model, builder, embedding = cfg.model, _Builder(cfg, sum_across_ranks, dense_dtype), None
  if (kind := model.dense_embedding) is not None:
    embedding, fields = builder.layer(kind, 'model.dense_embedding')
    if getattr(fields, 'shape', [])[:2] != [0, len(cfg.dense_inputs())]:
      raise _fails_on_empty('model.dense_embedding', kind, f'gave {fields}; wanted [0, Dn, D]')
    builder.fields = fields
  interactions = [
    builder.interaction(interaction, f'model.interactions.{i}')
    for i, interaction in enumerate(model.interactions)
  ]
  shared, shared_inputs = None, [None] * len(cfg.labels)
  if model.shared is not None:
    shared, shared_inputs = builder.layer(model.shared, 'model.shared')
    outputs = shared_inputs if isinstance(shared_inputs, list) else []
    widths = [getattr(t, 'shape', None) for t in outputs]
    if len(widths) != len(cfg.labels) or any(w is None or w.rank != 2 for w in widths):
      raise _fails_on_empty(
        'model.shared',
        model.shared,
        f'gave {shared_inputs}; wanted a list of {len(cfg.labels)} [B, H]',
      )
  of_tasks = []
  for label, shared_input in zip(cfg.labels, shared_inputs):
    own = model.tasks[label.name].interactions if model.tasks else []
    of_tasks.append(
      [
        builder.interaction(interaction, f'model.tasks.{label.name}.interactions.{i}', shared_input)
        for i, interaction in enumerate(own)
      ]
    )
  if cfg.train.dense_dtype != 'float32' and not builder.multiplies:
    raise UserError(
      f"train.dense_dtype: found '{cfg.train.dense_dtype}', in which no layer of this model "
      "multiplies; wanted 'float32', or a layer such as dnn, cross or mmoe"
    )
  layers = [*interactions, *(layer for own in of_tasks for layer in own)]
  if len(members := sorted({getattr(layer, 'members', 1) for layer in layers} - {1})) > 1:
    raise UserError(f'model: found layers of {members} members; wanted one number of members')
  return CTRModel(model, cfg.labels, interactions, shared, of_tasks, embedding)
