"""Opens the store that an address names."""

from trainer.errors import UserError
from trainer.serving.store import Store, plain_address


def open_store(address: str, where: str, writable: bool = False) -> Store:
  """Opens a store.

  Args:
    address: redis://HOST:PORT[/DATABASE], or a directory.
    where: the flag that says so, for messages.
    writable: whether this process publishes.
  Raises:
    UserError: where it cannot be opened, or its library is not installed.
  """
  scheme, separator, _ = address.partition('://')
  try:
    if not separator:
      from trainer.serving.embedded_store import EmbeddedStore

      return EmbeddedStore(address, writable)
    if scheme in ('redis', 'rediss', 'unix'):
      from trainer.serving.redis_store import RedisStore

      return RedisStore(address)
  except ModuleNotFoundError as e:
    raise UserError(
      f"{where} {plain_address(address)}: needs the package '{e.name}'; wanted pip install "
      "'ctr-trainer[serve]'"
    ) from None
  raise UserError(
    f'{where} {plain_address(address)}: wanted a directory or redis://HOST:PORT[/DATABASE]'
  )
