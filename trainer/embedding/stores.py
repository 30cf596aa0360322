"""Where the rows that a process owns live: our row store (the default), or TFRA's hash tables."""

from ops.row_store import RowStore
from trainer.config import Config
from trainer.embedding.embedding import Embedding
from trainer.errors import UserError


def store_class(cfg: Config) -> type[RowStore]:
  """Returns what `sparse.store` names; both kinds have the verbs of RowStore.

  Raises:
    UserError: where TFRA is wanted and not installed.
  """
  if cfg.sparse.store == 'rows':
    return RowStore
  try:
    # Imported where it is used: TFRA takes seconds.
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
  """Returns the store that `sparse.store` names.

  Args:
    cfg: the job's config.
    embedding: what rows are made of.
    name: by which parameter servers' graphs share it; None where it is this process's alone.
  Raises:
    UserError: where TFRA is wanted and not installed.
  """
  return store_class(cfg)(
    cfg.policy(), tables=embedding.tables, slot_table=embedding.slot_table, seed=cfg.seed, name=name
  )
