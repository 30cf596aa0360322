"""Where the rows that a process owns live: our row store (the default), or TFRA's hash tables."""

from ops.row_store import RowStore
from trainer.config import Config
from trainer.embedding.embedding import Embedding


def make_store(cfg: Config, embedding: Embedding, name: str | None = None) -> RowStore:
  """Returns the store that `sparse.store` names; both kinds have the verbs of RowStore.

  Args:
    cfg: the job's config.
    embedding: what rows are made of.
    name: by which parameter servers' graphs share it; None where it is this process's alone.
  """
  store = RowStore
  if cfg.sparse.store == 'tfra':
    # Imported where it is used: TFRA takes seconds.
    from trainer.embedding.tfra_store import TfraStore as store
  return store(
    cfg.policy(), tables=embedding.tables, slot_table=embedding.slot_table, seed=cfg.seed, name=name
  )
