"""The model of a run with model.retrieval: a tower for queries, and one for items."""

import zlib

import tensorflow as tf

from trainer.config import Config
from trainer.config.retrieval import Retrieval
from trainer.embedding.layer_inputs import LayerInputs
from trainer.errors import UserError, one_line
from trainer.model.builder import empty_inputs
from trainer.model.layers.dnn import dropout
from trainer.retrieval.sasrec import SASRec
from trainer.retrieval.vector_tower import SlotPlace, VectorTower


class RetrievalModel(tf.keras.Model):
  """Computes vectors of queries and of items; the score of a pair is their inner product.

  With similarity cosine, vectors have length 1. The losses divide scores by the temperature.
  """

  def __init__(self, towers: dict[str, VectorTower], retrieval: Retrieval, seed: int):
    super().__init__(name='model')
    self.query_tower, self.item_tower = towers['query'], towers['item']
    # `position` seeds dropout; the loss reads from it how many samples are on lower ranks.
    self.needs = self.query_tower.needs | self.item_tower.needs | {'position'}
    self._has_unit_length = retrieval.similarity == 'cosine'
    self._dropout = retrieval.query.dropout
    self._dropout_seed = zlib.crc32(f'{seed}/dropout'.encode()) % 2**31

  def call(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns the vectors of queries, float32 [B, d], the only ones that a SavedModel computes."""
    vectors = self.query_tower(inputs, training=training)
    if training and self._dropout:
      vectors = dropout(vectors, self._dropout, self._dropout_seed, inputs.position)
    return self._scaled(vectors)

  def predictions(self, vectors: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns what serving outputs: {'vector': float32 [B, d]}."""
    return {'vector': vectors}

  def items(self, inputs: LayerInputs, training: bool = False) -> tf.Tensor:
    """Returns the vectors of items, float32 [B, d].

    If none of an item's features has factors, only dense columns and biases contribute to its
    vector. A tower has biases only if it has two or more layers. With neither, the vector is 0.
    """
    return self._scaled(self.item_tower(inputs, training=training))

  def _scaled(self, vectors: tf.Tensor) -> tf.Tensor:
    return tf.math.l2_normalize(vectors, 1, 1e-12) if self._has_unit_length else vectors


def _tower(cfg: Config, side: str) -> VectorTower:
  tower, slots = cfg.model.towers[side], cfg.ordered_slots
  seed = zlib.crc32(f'{cfg.seed}/{side}'.encode()) % 2**31
  history, encoder = None, None
  if side == 'query' and tower.encoder is not None:
    of_history = next(s for s in slots if s.name in tower.slots and s.sequence)
    history, settings = of_history.name, tower.encoder.sasrec
    encoder = SASRec(
      of_history.sequence.max_length, settings.layers, settings.heads, settings.dropout, seed
    )
  tables = list(cfg.sparse.tables)
  places = []
  for name in tower.slots:
    if name != history:
      field = next(f for f, s in enumerate(slots) if s.name == name)
      table = slots[field].table
      first = next(f for f, s in enumerate(slots) if s.table == table)
      places.append(SlotPlace(field, tables.index(table), field - first))
  dense = [c.name for c in cfg.data.dense]
  columns = [dense.index(name) for name in tower.dense]
  return VectorTower(places, columns, tower.hidden, history, encoder, seed, name=side)


def build_retrieval(cfg: Config) -> RetrievalModel:
  """Builds the model of a config with model.retrieval; UserError if a tower fails."""
  towers = {side: _tower(cfg, side) for side in cfg.model.towers}
  model = RetrievalModel(towers, cfg.model.retrieval, cfg.seed)
  example = empty_inputs(cfg, {'factors', 'histories'})
  shapes = tf.nest.map_structure(lambda t: None if t is None else t.shape, example)
  for tower in towers.values():
    try:
      with tf.name_scope(tower.name):
        tower.build(shapes)
      tower(example)
    except Exception as e:
      raise UserError(f'model.retrieval.{tower.name}: {one_line(e)}') from e
  return model


def split(inputs: LayerInputs, size: tf.Tensor) -> tuple[LayerInputs, LayerInputs]:
  """Splits layer inputs, without `linear`, into those of the first `size` samples and the rest."""

  def cut(t: tf.Tensor | None) -> list[tf.Tensor | None]:
    # The gradient of tf.split joins both parts; slices would each pad theirs with zeros.
    return [None, None] if t is None else tf.split(t, [size, tf.shape(t)[0] - size])

  read = inputs.factors, inputs.norm, inputs.dense, inputs.histories
  packed = (tf.nest.pack_sequence_as(read, part) for part in zip(*map(cut, tf.nest.flatten(read))))
  first, others = (
    inputs._replace(linear=None, factors=factors, norm=norm, dense=dense, histories=histories)
    for factors, norm, dense, histories in packed
  )
  return first, others
