"""Publishes a run for serving: `ctr-publish --run_dir DIR --to STORE`.

It follows the run's exports and applies them to a store that scorers read (`ctr-serve`,
docs/serving.md). It may be killed and restarted at any moment.
"""

import contextlib
import os
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

from absl import flags

from trainer import command_line, files
from trainer.config.yaml_text import read_yaml
from trainer.errors import UserError
from trainer.plain_data import JsonObject
from trainer.reporting.status import Status
from trainer.serving import processes
from trainer.storage.bucket import EXPORTS, await_run_dir, followed

if TYPE_CHECKING:
  from trainer.serving.publisher import Applied, Publisher
  from trainer.serving.versioned_store import VersionedStore

RUN_DIR = flags.DEFINE_string('run_dir', None, 'The run_dir of a run.', required=True)
TO = flags.DEFINE_string(
  'to',
  None,
  'A directory, redis://HOST:PORT[/DATABASE] or a topic, kafka://BROKERS/TOPIC.',
  required=True,
)
ONCE = flags.DEFINE_bool('once', False, 'Ends when the newest version is there.')
ROLLBACK = flags.DEFINE_integer(
  'rollback', None, 'Brings the store to this earlier version until the next base is written.'
)
PASSWORD_FILE = flags.DEFINE_string('password_file', None, 'Holds the password of Redis.')
METRICS_PORT = flags.DEFINE_integer(
  'metrics_port', None, 'Of /metrics, /healthz and /readyz; 0: any free port.', 0, 65535
)
METRICS_HOST = flags.DEFINE_string('metrics_host', '127.0.0.1', '0.0.0.0 is all.')
STALLED_SECONDS = flags.DEFINE_integer(
  'stalled_seconds', 1800, 'To bring the store up to date; /healthz fails after it.', lower_bound=1
)
LOG_JSON = flags.DEFINE_bool('log_json', False, 'Prints each line as a JSON object.')
KAFKA_CONFIG = flags.DEFINE_string(
  'kafka_config', None, "A YAML file of settings of Kafka's client, as data.topic.config has them."
)
SECONDS_BETWEEN_LOOKS = 0.1  # between looks at the exports
SECONDS_BETWEEN_TRIES = 2  # between attempts to reach the store


@command_line.command
def main() -> int:
  waits = not ONCE.value and ROLLBACK.value is None

  def stop(number: int, _: FrameType | None) -> None:
    """Ends the command, at any moment: that is as safe as a kill."""
    for one in (signal.SIGTERM, signal.SIGINT):
      signal.signal(one, signal.SIG_IGN)
    # Where something was asked for once, it is not done.
    sys.exit(command_line.status_of_server([number]) if waits else command_line.SIGNALLED + number)

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
  if '://' not in TO.value and waits:
    processes.crash_alone(TO.value)
  status = Status('publisher', STALLED_SECONDS.value)
  if METRICS_PORT.value is not None:
    status.serve(METRICS_HOST.value, METRICS_PORT.value)
  await_run_dir('--run_dir', RUN_DIR.value, status.progress, waits)
  from trainer.serving.publisher import Publisher  # slow to import
  from trainer.serving.stores import open_store

  password = files.secret(PASSWORD_FILE.value, '--password_file')
  text = files.secret(KAFKA_CONFIG.value, '--kafka_config') or '{}'
  if not isinstance(settings := read_yaml(text, KAFKA_CONFIG.value), dict):
    raise UserError(f'--kafka_config {KAFKA_CONFIG.value}: wanted settings, as KEY: VALUE')
  with followed(RUN_DIR.value, EXPORTS) as (run_dir, look):
    exports = os.path.join(run_dir, 'exports')
    if ONCE.value and ROLLBACK.value is None:
      look()
      _check_can_publish(exports, password, settings)
    store = open_store(TO.value, '--to', True, password, settings)
    return _publish(Publisher(exports, store, look), store, status)


def _check_can_publish(exports: str, password: str | None, settings: JsonObject) -> None:
  """Refuses a run without an export, unless the store has a version. It makes no store."""
  from trainer.serving.stores import open_store
  from trainer.storage import chain

  if any(export.kind in chain.ROW_KINDS for export in chain.exports(exports)):
    return
  with contextlib.closing(open_store(TO.value, '--to', False, password, settings)) as store:
    if not store.version():
      wanted = 'one of export.base: true, or of ctr-export --kind base'
      raise UserError(f'--run_dir {RUN_DIR.value}: has no export yet; wanted {wanted}')


def _publish(publisher: 'Publisher', store: 'VersionedStore', status: Status) -> int:
  is_told = is_filter_told = False

  def tell(applied: 'Applied') -> None:
    nonlocal is_told, is_filter_told
    is_told = True
    status.add('exports_applied')
    status.set(apply_seconds=applied.seconds)
    if replaced := applied.replaced:
      command_line.say(
        f'{TO.value}: held version {replaced.sequence} ({replaced.export}), which '
        f'is no export that {RUN_DIR.value} has now; replaced. Runs that are all to be served need '
        'a --to each'
      )
    command_line.say(
      f'version {applied.version.sequence}: {applied.version.export}, {applied.rows:,} rows and '
      f'{applied.tombstones:,} tombstones in {applied.seconds:.2f} s',
      'published',
      version=applied.version.sequence,
      seconds=round(applied.seconds, 3),
    )
    if applied.version.left_out and not is_filter_told:
      command_line.say(applied.version.left_out)
      is_filter_told = True

  if ROLLBACK.value is not None:
    tell(publisher.roll_back(ROLLBACK.value))
    return 0
  status.set(**publisher.figures())
  told = refused = ''
  while True:
    status.progress()
    try:
      applied = publisher.advance()
    except UserError as e:
      if ONCE.value:
        raise
      status.not_ready = str(e)
      if str(e) != told:
        told = str(e)
        command_line.say(f'waiting: {told}')
      time.sleep(SECONDS_BETWEEN_TRIES)
      continue
    told = ''
    if publisher.refused and publisher.refused != refused:
      status.add('exports_refused')
    refused = publisher.refused
    status.not_ready = refused or (None if publisher.held else 'no version is published yet')
    if applied:
      tell(applied)
    elif ONCE.value:
      if publisher.refused:
        raise UserError(f'an export was not applied: {publisher.refused}')
      if not is_told and (version := store.version()):
        told = f'nothing new; the store stays at version {version.sequence}'
        command_line.say(f'{RUN_DIR.value}: {told}')
      return 0
    else:
      time.sleep(SECONDS_BETWEEN_LOOKS)


if __name__ == '__main__':
  main()
