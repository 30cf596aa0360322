"""Serves a run over HTTP: `ctr-serve --run_dir DIR` or `--store STORE`.

The interface is TensorFlow Serving's REST API: POST /v1/models/NAME:predict, GET /v1/models/NAME;
also /metrics and /healthz. With `--grpc_port` it answers TensorFlow Serving's gRPC call
PredictionService.Predict too. A run with model.retrieval answers POST
/v1/models/NAME:recommend. With `--retrieve_run_dir`, that run finds items, and the run in
`--run_dir` ranks them. docs/serving.md has examples.
"""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from absl import flags, logging

from trainer import command_line, config, files, runtime
from trainer.data.file_system import attempt_for
from trainer.errors import UserError, nearest, plain_errors
from trainer.serving import processes
from trainer.storage.bucket import EXPORTS, await_run_dir, followed

if TYPE_CHECKING:
  from trainer.serving.service import Service

RUN_DIR = flags.DEFINE_string(
  'run_dir', None, 'A run, whose exports are followed and held in memory, without a publisher.'
)
STORE = flags.DEFINE_string(
  'store', None, 'What ctr-publish fills: a directory or redis://HOST:PORT[/DATABASE].'
)
RETRIEVE_RUN_DIR = flags.DEFINE_string(
  'retrieve_run_dir', None, 'A run with model.retrieval that finds the items for --run_dir to rank.'
)
CANDIDATES = flags.DEFINE_integer('candidates', 500, 'Items to find and rank.', lower_bound=1)
NAME = flags.DEFINE_string('name', 'ctr', 'The name of the model in paths.')
HOST = flags.DEFINE_string('host', '127.0.0.1', 'The address to listen at; 0.0.0.0 is all.')
PORT = flags.DEFINE_integer('port', 8501, '0: any free port.', lower_bound=0, upper_bound=65535)
GRPC_PORT = flags.DEFINE_integer(
  'grpc_port',
  None,
  'The port for gRPC calls, 0: any free port; by default none are answered.',
  lower_bound=0,
  upper_bound=65535,
)
MEMORY_LIMIT = flags.DEFINE_float(
  'memory_limit',
  None,
  'Bytes of memory, or up to 1 a share of the machine, for the rows of --run_dir; by default all.',
)
COLD_DIR = flags.DEFINE_string(
  'cold_dir', None, 'A directory on a local disk for the rows above --memory_limit.'
)
TOKEN_FILE = flags.DEFINE_string('token_file', None, 'Holds the bearer token of clients.')
PASSWORD_FILE = flags.DEFINE_string('password_file', None, 'Holds the password of Redis.')
MAX_BODY_BYTES = flags.DEFINE_integer('max_body_bytes', 4 << 20, 'Of a request.', lower_bound=1)
MAX_INSTANCES = flags.DEFINE_integer('max_instances', 10_000, 'Of a request.', lower_bound=1)
MAX_CONCURRENCY = flags.DEFINE_integer('max_concurrency', 64, 'Requests at a time.', lower_bound=1)
OWN_LAYERS = flags.DEFINE_list(
  'own_layers', [], 'Dotted paths of layers, not built in, that a served model may import.'
)
LOG_JSON = flags.DEFINE_bool('log_json', False, 'Prints each line as a JSON object.')
STRICT = flags.DEFINE_bool('strict', False, 'Refuses columns that the model does not read.')
THREADS = flags.DEFINE_integer(
  'threads', 1, 'That score requests; several can wait for Redis.', lower_bound=1
)
PROCESSES = flags.DEFINE_integer(
  'processes', 1, 'That serve at one port; with --run_dir, each holds all rows.', lower_bound=1
)
SECONDS_BETWEEN_LOOKS = 0.05  # between looks at the store
SECONDS_TO_END = 5  # for a look, when the server stops


@command_line.command
def main() -> int:
  if (RUN_DIR.value is None) == (STORE.value is None):
    found = 'neither' if STORE.value is None else 'both'
    raise UserError(f'--run_dir, --store: found {found}; wanted one of them')
  if RETRIEVE_RUN_DIR.value and STORE.value:
    raise UserError('--retrieve_run_dir: found with --store; wanted it with --run_dir')
  if flags.FLAGS['candidates'].present and not RETRIEVE_RUN_DIR.value:
    raise UserError('--candidates: wanted --retrieve_run_dir with it')
  limit = _limit()
  if limit and STORE.value:
    raise UserError(f'--{min(limit)}: found with --store; wanted it with --run_dir')
  if len(limit) == 1:
    raise UserError('--memory_limit, --cold_dir: found one of them; wanted both')
  if limit and not 0 < MEMORY_LIMIT.value <= 1e18:
    raise UserError(f'--memory_limit: found {MEMORY_LIMIT.value}; wanted a number > 0 and <= 1e18')
  run_dirs = {'--run_dir': RUN_DIR.value, '--retrieve_run_dir': RETRIEVE_RUN_DIR.value}
  run_dirs = {flag: run_dir for flag, run_dir in run_dirs.items() if run_dir}
  if run_dirs:
    _listener().close()  # a port that is taken is told before a run_dir is waited for
  for flag, run_dir in run_dirs.items():
    await_run_dir(flag, run_dir)
  member = None
  if PROCESSES.value > 1:
    if GRPC_PORT.value == 0:
      raise UserError('--grpc_port: found 0 with --processes; wanted a port, which they share')
    member = processes.fork(PROCESSES.value, _listener())
  if STORE.value:
    if '://' not in STORE.value:  # files that are mapped
      processes.crash_alone(STORE.value, member and member.turns)
    return _serve([], member)
  with contextlib.ExitStack() as stack:
    runs = [_opened(stack, run_dir, len(run_dirs) == 2) for run_dir in run_dirs.values()]
    if len(runs) == 2:
      ranker, finder = (run.cfg for run in runs)
      finder.model.want('retrieval', '--retrieve_run_dir')
      ranker.model.want('interactions', '--run_dir')
      column = finder.item_slot.column or finder.item_slot.name
      if column not in (columns := ranker.data.log_columns()):
        found = f"does not read '{column}', the column of the items to rank"
        raise UserError(f'--run_dir: {found}{nearest(column, columns)}')
    return _serve(runs, member)


def _limit() -> dict[str, float | str]:
  """Returns those of --memory_limit and --cold_dir that are given."""
  given = {'memory_limit': MEMORY_LIMIT.value, 'cold_dir': COLD_DIR.value}
  return {name: value for name, value in given.items() if value is not None}


def _listener() -> socket.socket:
  """Returns a socket that listens at --port, once it has seen that --grpc_port is free too."""
  if GRPC_PORT.value:
    with plain_errors(f'--host {HOST.value}, --grpc_port {GRPC_PORT.value}'):
      processes.listener(HOST.value, GRPC_PORT.value).close()
  with plain_errors(f'--host {HOST.value}, --port {PORT.value}'):
    return processes.listener(HOST.value, PORT.value)


class _Run(NamedTuple):
  run_dir: str
  look: Callable[[], None]  # brings run_dir up to date, where it is a copy
  cfg: config.Config | None  # None: the run has not begun yet


def _opened(stack: contextlib.ExitStack, run_dir: str, is_of_two: bool) -> _Run:
  here, look = stack.enter_context(followed(run_dir, EXPORTS))
  look()
  path = os.path.join(here, 'config.yaml')
  while is_of_two and not os.path.exists(path):  # only this shows whether they go together
    time.sleep(SECONDS_BETWEEN_LOOKS)
    look()
  return _Run(here, look, config.load_of_run(here) if os.path.exists(path) else None)


def _serve(runs: Sequence[_Run], member: processes.Member | None) -> int:
  """Serves runs, a ranker's first, or --store until a signal ends it; returns the status."""
  try:
    from trainer.retrieval.recommend import Recommender
    from trainer.serving import http, http_server
    from trainer.serving.limits import Limits

    if GRPC_PORT.value is not None:
      from trainer.serving import rpc
  except ModuleNotFoundError as e:
    wanted = "pip install 'ctr-trainer[serve]'"
    raise UserError(f"the package '{e.name}' is not installed; wanted {wanted}") from None
  command_line.need_no_output()
  logging.get_absl_handler().setFormatter(command_line.LogLines(sys.maxsize))  # a line each
  runtime.start_serving()
  _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
  # Each connection needs a file descriptor.
  resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
  limits = Limits(
    body_bytes=MAX_BODY_BYTES.value,
    instances=MAX_INSTANCES.value,
    concurrency=MAX_CONCURRENCY.value,
    threads=THREADS.value,
    strict=STRICT.value,
  )
  services = [_service(run) for run in runs or [None]]
  is_pair = len(services) == 2
  recommender = Recommender(*reversed(services), CANDIDATES.value) if is_pair else None
  app = http.App(
    services[0],
    NAME.value,
    limits,
    files.secret(TOKEN_FILE.value, '--token_file'),
    recommender,
    member,
  )
  server = http_server.server(app, member and member.turns)
  listener = member.listener if member else _listener()
  asked: list[int] = []

  def ask(number: int, _: FrameType | None) -> None:
    asked.append(number)
    attempt_for(0)

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, ask)  # the server ends, then raises the signal again
  host, port, *_ = listener.getsockname()
  host = f'[{host}]' if ':' in host else host
  finds = recommender or (runs and runs[0].cfg and runs[0].cfg.item_slot)
  method = 'recommend' if finds else 'predict'

  async def loaded() -> None:
    while any(service.not_ready for service in services) and not asked:
      await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    if member and not asked:
      member.starts()

  async def serve() -> None:
    # Only the first process says that there is no version yet; the others start once it has one.
    loading = asyncio.create_task(loaded())
    if member and member.number:
      await loading
      if asked:
        return
    async with contextlib.AsyncExitStack() as stack:
      if GRPC_PORT.value is not None:
        calls = rpc.listening(app.batcher, HOST.value, GRPC_PORT.value, PROCESSES.value > 1)
        grpc_port = await stack.enter_async_context(calls)
      if member:
        await stack.enter_async_context(member.telling(app.figures.text))
      if not member or member.number == 0:
        command_line.say(f'serving http://{host}:{port}/v1/models/{NAME.value}:{method}', 'serving')
        if GRPC_PORT.value is not None:
          command_line.say(f'serving grpc://{host}:{grpc_port}', 'serving')
      await server.serve(sockets=[listener])

  stop = threading.Event()
  follow = [threading.Thread(target=s.follow, args=(stop, SECONDS_BETWEEN_LOOKS)) for s in services]
  for follower in follow:
    follower.start()
  try:
    asyncio.run(serve())
  finally:
    stop.set()
    for follower in follow:
      follower.join(SECONDS_TO_END)  # a store may not answer
  return command_line.status_of_server(asked)


def _service(run: _Run | None) -> 'Service':
  from trainer.serving.memory_store import MemoryStore
  from trainer.serving.publisher import Publisher
  from trainer.serving.service import Service
  from trainer.serving.stores import open_store

  if run is None:
    password = files.secret(PASSWORD_FILE.value, '--password_file')
    store = open_store(STORE.value, '--store', password=password)
    return Service(store, None, OWN_LAYERS.value)
  store = MemoryStore(**_limit())
  publisher = Publisher(os.path.join(run.run_dir, 'exports'), store, run.look)
  return Service(store, publisher.advance, OWN_LAYERS.value)


if __name__ == '__main__':
  main()
