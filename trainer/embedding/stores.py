import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from ops.row_store import RowStore
from trainer.config import Config
from trainer.embedding.embedding import Embedding
from trainer.errors import UserError


def store_class(name: str) -> type[RowStore]:
  """Returns the class for a value of `sparse.store`; UserError if TFRA is not installed for it."""
  if name == 'rows':
    return RowStore
  try:
    # The import of TFRA takes seconds, so only its users pay for it.
    from trainer.embedding.tfra_store import TfraStore
  except ModuleNotFoundError as e:
    if e.name != 'tensorflow_recommenders_addons':
      raise
    raise UserError(
      "sparse.store: found 'tfra', but tensorflow-recommenders-addons is not installed; wanted "
      "'rows', or the packages of requirements.txt (it has no build for a newer TensorFlow)"
    ) from None
  return TfraStore


def make_store(cfg: Config, embedding: Embedding, name: str | None = None) -> RowStore:
  """Makes the store that `sparse.store` names; v1 graphs that pass the same `name` share it."""
  limit = {'memory_limit': cfg.sparse.memory_limit, 'cold_dir': cfg.sparse.cold_dir}
  return store_class(cfg.sparse.store)(
    cfg.policy(),
    tables=embedding.tables,
    slot_table=embedding.slot_table,
    seed=cfg.seed,
    name=name,
    **(limit if cfg.sparse.memory_limit else {}),
  )


@contextlib.contextmanager
def plain_disk_errors(section: str = 'sparse.') -> Iterator[None]:
  """Turns what a store says of its cold_dir or memory_limit, in `section`, into a UserError."""
  try:
    yield
  except tf.errors.OpError as e:
    if said := re.search(r'\b(?:cold_dir|memory_limit): .*?(?= \[Op:|$)', e.message, re.MULTILINE):
      raise UserError(section + said[0]) from e
    raise
