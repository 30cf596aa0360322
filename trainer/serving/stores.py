"""Opens the store of an address: a directory, Redis or, to write it, a topic of Kafka."""

import os
from collections.abc import Mapping
from typing import Any

from trainer.errors import UserError, fit_to_print
from trainer.serving.versioned_store import VersionedStore
from trainer.wings import wing


def open_store(
  address: str,
  where: str,
  writable: bool = False,
  password: str | None = None,
  settings: Mapping[str, Any] = {},
) -> VersionedStore:
  """Opens the store at an address; messages name `where`, the flag that gave it.

  `password` is Redis's, if it wants one; `settings` are those of Kafka's client.
  """
  scheme, separator, _ = address.partition('://')
  try:
    if not separator:
      if os.path.exists(address) and not os.path.isdir(address):
        raise UserError(f'{where} {address}: is a file; wanted a directory, or a new name for one')
      if os.path.exists(os.path.join(address, 'config.yaml')):
        raise UserError(
          f"{where} {address}: is the run_dir of a run; wanted the store's own directory"
        )
      from trainer.serving.embedded_store import EmbeddedStore

      return EmbeddedStore(address, writable)
    if scheme in ('redis', 'rediss', 'unix'):
      from trainer.serving.redis_store import RedisStore

      return RedisStore(address, password)
    if scheme == 'kafka':
      return wing('topic_store')(address, settings)
  except ModuleNotFoundError as e:
    wanted = f"pip install 'ctr-trainer[{'kafka' if scheme == 'kafka' else 'serve'}]'"
    raise UserError(
      f"{where} {fit_to_print(address)}: needs the package '{e.name}'; wanted {wanted}"
    ) from None
  raise UserError(
    f'{where} {fit_to_print(address)}: wanted a directory, redis://HOST:PORT[/DATABASE] or, to '
    'write it, kafka://BROKERS/TOPIC'
  )
