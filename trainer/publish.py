"""Publishes a run for serving: `python -m trainer.publish --run_dir DIR --to DIRECTORY|redis://…`.

It follows the run's exports and applies them to a store that scorers read (`ctr-serve`,
docs/serving.md). It may be killed and restarted at any moment.
"""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from absl import flags

from trainer import command_line
from trainer.data.log_files import attempt_for, is_directory
from trainer.errors import UserError

if TYPE_CHECKING:
  from trainer.serving.publisher import Applied, Publisher
  from trainer.serving.versioned_store import VersionedStore

RUN_DIR = flags.DEFINE_string('run_dir', None, 'The run_dir of a run.', required=True)
TO = flags.DEFINE_string('to', None, 'A directory or redis://HOST:PORT[/DATABASE].', required=True)
ONCE = flags.DEFINE_bool('once', False, 'Ends when the newest version is there.')
ROLLBACK = flags.DEFINE_integer(
  'rollback', None, 'Brings the store to this earlier version until the next base is written.'
)
SECONDS_BETWEEN_LOOKS = 0.1  # between looks at the exports
SECONDS_BETWEEN_TRIES = 2  # between attempts to reach the store


@command_line.command
def main() -> int:
  from trainer.serving.publisher import Publisher
  from trainer.serving.versioned_store import open_store
  from trainer.storage.bucket import EXPORTS, followed

  if not is_directory(RUN_DIR.value):
    raise UserError(f'--run_dir {RUN_DIR.value}: no such directory; wanted the run_dir of a run')
  with followed(RUN_DIR.value, EXPORTS) as (run_dir, look):
    exports = os.path.join(run_dir, 'exports')
    if ONCE.value and ROLLBACK.value is None:
      look()
      _check_can_publish(exports)
    store = open_store(TO.value, '--to', writable=True)
    return _publish(Publisher(exports, store, look), store)


def _check_can_publish(exports: str) -> None:
  """Refuses a run without an export, unless the store has a version. It makes no store."""
  from trainer.serving.versioned_store import open_store
  from trainer.storage import chain

  if any(export.kind in chain.ROW_KINDS for export in chain.exports(exports)):
    return
  with contextlib.closing(open_store(TO.value, '--to')) as store:
    if not store.version():
      wanted = 'one of export.base: true, or of ctr-export --kind base'
      raise UserError(f'--run_dir {RUN_DIR.value}: has no export yet; wanted {wanted}')


def _publish(publisher: 'Publisher', store: 'VersionedStore') -> int:
  from trainer.serving.versioned_store import plain_address

  is_told = is_filter_told = False

  def tell(applied: 'Applied') -> None:
    nonlocal is_told, is_filter_told
    is_told = True
    if replaced := applied.replaced:
      print(
        f'{plain_address(TO.value)}: held version {replaced.sequence} ({replaced.export}), which '
        f'is no export that {RUN_DIR.value} has now; replaced. Runs that are all to be served need '
        'a --to each',
        flush=True,
      )
    print(
      f'version {applied.version.sequence}: {applied.version.export}, {applied.rows:,} rows and '
      f'{applied.tombstones:,} tombstones in {applied.seconds:.2f} s',
      flush=True,
    )
    if applied.version.left_out and not is_filter_told:
      print(applied.version.left_out, flush=True)
      is_filter_told = True

  if ROLLBACK.value is not None:
    tell(publisher.roll_back(ROLLBACK.value))
    return 0
  stop, asked = threading.Event(), []

  def ask(number: int, _: FrameType | None) -> None:
    asked.append(number)
    attempt_for(0)
    stop.set()

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, ask)
  told = ''
  while not stop.is_set():
    try:
      applied = publisher.advance()
    except UserError as e:
      if ONCE.value:
        raise
      if str(e) != told:
        told = str(e)
        print(f'waiting: {told}', flush=True)
      stop.wait(SECONDS_BETWEEN_TRIES)
      continue
    told = ''
    if applied:
      tell(applied)
    elif ONCE.value:
      if publisher.refused:
        raise UserError(f'an export was not applied: {publisher.refused}')
      if not is_told and (version := store.version()):
        told = f'nothing new; the store stays at version {version.sequence}'
        print(f'{RUN_DIR.value}: {told}', flush=True)
      return 0
    else:
      stop.wait(SECONDS_BETWEEN_LOOKS)
  return command_line.status_of_server(asked)


if __name__ == '__main__':
  main()
