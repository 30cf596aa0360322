"""Where the rows that a process owns live:

the fused row store (the default on CPU) or TFRA's tables; the same verbs on both.
"""

from ops import row_store


def make_store(cfg, embedding, name=None):
  """The store that `sparse.store` names;

  pull, push, the lifecycle's verbs and its state (ops.row_store.RowStore, which has `name` too).
  """
  if cfg.sparse.store == 'tfra':
    from trainer.embedding.tfra_store import (
      TfraStore as Store,  # late: TFRA takes seconds to import
    )
  else:
    Store = row_store.RowStore
  return Store(
    cfg.policy(), tables=embedding.tables, slot_table=embedding.slot_table, seed=cfg.seed, name=name
  )
