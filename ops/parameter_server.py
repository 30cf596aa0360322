"""What only parameter servers and their workers need of a row store."""
from ops import library


def erase(store, keys):
  """Forgets features of a `RowStore` and their rows; absent ones are passed over. keys: int64 [n]."""
  return library.load().ctr_row_store_erase(store.handle, keys)
