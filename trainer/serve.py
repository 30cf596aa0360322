"""Serves a run over HTTP: `python -m trainer.serve --run_dir DIR` or `--store STORE`.

The interface is TensorFlow Serving's REST form: POST /v1/models/NAME:predict, GET /v1/models/NAME;
also /metrics and /healthz. docs/serving.md has examples.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags, logging

from trainer import command_line, config, runtime
from trainer.data.log_files import is_directory
from trainer.errors import UserError, plain_errors

if TYPE_CHECKING:
  from trainer.serving.service import Service

RUN_DIR = flags.DEFINE_string(
  'run_dir',
  None,
  'A run of trainer.run, whose exports are followed and held in memory; no publisher is needed.',
)
STORE = flags.DEFINE_string(
  'store', None, 'A store that trainer.publish fills: a directory, or redis://HOST:PORT[/DATABASE].'
)
NAME = flags.DEFINE_string('name', 'ctr', 'The name of the model in paths.')
HOST = flags.DEFINE_string('host', '127.0.0.1', 'The address to listen at; 0.0.0.0 is all.')
PORT = flags.DEFINE_integer(
  'port', 8501, 'The port to listen at; 0: any.', lower_bound=0, upper_bound=65535
)
TOKEN_FILE = flags.DEFINE_string(
  'token_file', None, 'A file with the bearer token that clients must send.'
)
MAX_BODY_BYTES = flags.DEFINE_integer('max_body_bytes', 4 << 20, 'Of a request.', lower_bound=1)
MAX_INSTANCES = flags.DEFINE_integer('max_instances', 10_000, 'Of a request.', lower_bound=1)
MAX_CONCURRENCY = flags.DEFINE_integer(
  'max_concurrency', 64, 'Requests at a time; others are refused.', lower_bound=1
)
OWN_LAYERS = flags.DEFINE_list(
  'own_layers',
  [],
  'Dotted paths of layers that are not built in and that a served model may import.',
)
STRICT = flags.DEFINE_bool('strict', False, 'Refuses columns that the model does not read.')
THREADS = flags.DEFINE_integer('threads', 2, 'That score requests.', lower_bound=1)
SECONDS_BETWEEN_LOOKS = 0.05  # between looks at the store


@command_line.command
def main() -> int:
  if (RUN_DIR.value is None) == (STORE.value is None):
    raise UserError('--run_dir, --store: wanted one of them')
  if RUN_DIR.value and not is_directory(RUN_DIR.value):
    raise UserError(f'--run_dir {RUN_DIR.value}: no such directory; wanted a run of trainer.run')
  if STORE.value:
    return _serve(None, lambda: None)
  from trainer.storage.bucket import followed

  with followed(RUN_DIR.value) as (run_dir, look):
    look()
    if os.path.exists(os.path.join(run_dir, 'config.yaml')):
      cfg = config.load_of_run(run_dir)
      config.refuse_retrieval(cfg.model.retrieval, f'--run_dir {RUN_DIR.value}')
    return _serve(run_dir, look)


def _serve(run_dir: str | None, look: Callable[[], None]) -> int:
  """Serves a run or, if `run_dir` is None, a store until asked to end; `look` refreshes run_dir."""
  try:
    from trainer.serving import http
  except ModuleNotFoundError as e:
    raise UserError(
      f"the package '{e.name}' is not installed; wanted pip install 'ctr-trainer[serve]'"
    ) from None
  command_line.need_no_output()
  logging.get_absl_handler().setFormatter(command_line.LogLines(sys.maxsize))  # a line each
  runtime.start_serving()
  _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(
    resource.RLIMIT_NOFILE, (most_files, most_files)
  )  # each connection needs a file descriptor
  limits = http.Limits(
    body_bytes=MAX_BODY_BYTES.value,
    instances=MAX_INSTANCES.value,
    concurrency=MAX_CONCURRENCY.value,
    threads=THREADS.value,
    strict=STRICT.value,
  )
  service = _service(run_dir, look)
  app = http.App(service, NAME.value, limits, _token())
  with plain_errors(f'--host {HOST.value}, --port {PORT.value}'):
    server, listener = http.server(app, HOST.value, PORT.value)
  stop = threading.Event()
  follower = threading.Thread(target=service.follow, args=(stop, SECONDS_BETWEEN_LOOKS))
  follower.start()
  asked: list[int] = []
  for number in (signal.SIGTERM, signal.SIGINT):
    # The server ends, then raises the signal again.
    signal.signal(number, lambda number, _: asked.append(number))
  host, port, *_ = listener.getsockname()
  host = f'[{host}]' if ':' in host else host
  print(f'serving http://{host}:{port}/v1/models/{NAME.value}:predict', flush=True)
  server.run(sockets=[listener])
  stop.set()
  follower.join()
  return command_line.status_of_server(asked)


def _service(run_dir: str | None, look: Callable[[], None]) -> 'Service':
  from trainer.serving.memory_store import MemoryStore
  from trainer.serving.publisher import Publisher
  from trainer.serving.service import Service
  from trainer.serving.versioned_store import open_store

  if run_dir is None:
    return Service(open_store(STORE.value, '--store'), None, OWN_LAYERS.value)
  store = MemoryStore()
  publisher = Publisher(os.path.join(run_dir, 'exports'), store, look)
  return Service(store, publisher.advance, OWN_LAYERS.value)


def _token() -> str | None:
  if TOKEN_FILE.value is None:
    return None
  with plain_errors('--token_file'), open(TOKEN_FILE.value, encoding='utf-8') as f:
    token = f.read().strip()
  if not token:
    raise UserError(f'--token_file {TOKEN_FILE.value}: is empty; wanted a token')
  return token


if __name__ == '__main__':
  main()
