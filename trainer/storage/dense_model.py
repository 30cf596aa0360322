"""Writes the dense part of a model as a SavedModel, for consumers that keep the rows elsewhere.

Its signature `serving_default` takes the following inputs, as far as the model reads them. The
first dimension of each is the number of samples B, or 1 if one row is for all samples. F is the
number of slots; x is a feature's value, w its linear weight, and v its factors. With
`sparse.shared_lists: mean`, x is 1/n for each of the n features in a slot with `shares`.

- `linear` float32 [B, F]: Σ x·w over the features of each slot;
- `factors_TABLE` float32 [B, slots of the table, width]: Σ x·v over the features of each slot;
- `squares` float32 [B]: Σ x²·‖v‖² over all features of the sample (for the layer fm);
- `field_factors` float32 [B, F, F·D], `field_squares` float32 [B]: the same sums for ffm, where v
  has D factors for each slot;
- `norm` float32 [B, F]: the divisors of mean and sqrt-n pooling, if a slot has such pooling;
- `show_click` float32 [B, Fc, 2]: each slot with `counts`' shows and clicks, summed over features;
- `dense` float32 [B, Dn]: dense columns as in the log, NaN where a number is missing.
"""

import tensorflow as tf

from trainer import config
from trainer.config.export import input_name
from trainer.errors import UserError
from trainer.storage.served_model import ServedModel, common_size, graph, write

# The inputs beside the factors and the dense columns.
_SUMS = ('linear', 'squares', 'field_factors', 'field_squares', 'norm', 'show_click')


class DenseServing(ServedModel):
  """The dense part of a trained model, and its graph from slot sums to outputs."""

  def __init__(self, cfg: config.Config, model: tf.keras.Model, dense_stats: tf.Variable):
    super().__init__(cfg, model, dense_stats)
    slots, self._tables = len(cfg.data.slots), list(cfg.sparse.tables)
    shapes: dict[str, list[int]] = {}
    if 'linear' in model.needs:
      shapes['linear'] = [slots]
    if {'factors', 'totals'} & model.needs:
      for name, table in cfg.sparse.tables.items():
        shapes[f'factors_{name}'] = [sum(s.table == name for s in cfg.data.slots), table.width]
    if 'totals' in model.needs:
      shapes['squares'] = []
    if 'field_factors' in model.needs:
      shapes['field_factors'] = [slots, slots * cfg.sparse.tables[self._tables[0]].width]
      shapes['field_squares'] = []
    if 'factors' in model.needs and any(p != 'sum' for p in cfg.poolings()):
      shapes['norm'] = [slots]
    if cfg.counted_fields():
      shapes['show_click'] = [len(cfg.counted_fields()), 2]
    if self._dense_columns:
      shapes['dense'] = [len(self._dense_columns)]
    self._shapes = shapes

  def specs(self) -> dict[str, tf.TensorSpec]:
    """Returns {name: spec} of the signature's inputs."""
    specs = [
      tf.TensorSpec([None, *shape], tf.float32, input_name(name))
      for name, shape in self._shapes.items()
    ]
    return {spec.name: spec for spec in specs}

  def from_sums(self, **inputs: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the outputs (see `_outputs`) of a tensor for each name in `specs`."""
    size = common_size({name: tf.shape(t, tf.int64)[0] for name, t in inputs.items()})

    def tensor(name: str) -> tf.Tensor | None:
      shape = self._shapes.get(name)
      if shape is None:
        return None
      return tf.broadcast_to(
        inputs[input_name(name)], tf.concat([size[None], tf.constant(shape, tf.int64)], 0)
      )

    factors = [tensor(f'factors_{name}') for name in self._tables]
    return self._outputs(
      dense=tensor('dense') if self._dense_columns else tf.zeros([size, 0]),
      factors=[f for f in factors if f is not None],
      **{name: tensor(name) for name in _SUMS},
    )


def save(cfg: config.Config, model: tf.keras.Model, dense_stats: tf.Variable, path: str) -> None:
  """Writes the dense part of a model into the directory `path`; UserError if it has histories."""
  if 'histories' in model.needs:
    raise UserError(
      'a dense_model: found an interaction that reads histories, feature by feature; wanted kind '
      "'saved_model'"
    )
  serving = DenseServing(cfg, model, dense_stats)
  specs = serving.specs()
  write(serving, {'serving_default': graph(serving.from_sums, specs)}, specs, path)
