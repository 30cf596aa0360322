"""What a trainer or publisher tells of itself while it runs: figures, on a page and as heartbeats.

A new figure is an entry of FIGURES, with the events of metrics.jsonl that set it; or else whoever
knows it calls `Status.set`.
"""

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from trainer import command_line
from trainer.errors import UserError, plain_errors
from trainer.plain_data import Json, JsonObject

SECONDS_BETWEEN_HEARTBEATS = 60.0
_SECONDS_TO_ASK = 5  # that a client has to send its request
PASS_FATES = 'trained', 'late', 'skipped', 'seen', 'refused'


class Figure(NamedTuple):
  """A figure: what it is, and which field of which events sets it; a counter adds the field up."""

  help: str
  field: str = ''
  events: tuple[str, ...] = ()
  is_counter: bool = False


_OF_BOTH = {
  'seconds_since_progress': Figure('Since the last step, look, or chunk of slow work.'),
  'stalled_after_seconds': Figure('How long without progress /healthz still answers 200.'),
}
FIGURES = {
  'trainer': {
    **_OF_BOTH,
    **{f'passes_{f}': Figure(f'Passes {f} in this run.', is_counter=True) for f in PASS_FATES},
    'passes_waiting': Figure('Passes ready behind the one in training, at its start.'),
    'seconds_behind': Figure('Since the oldest pass that is not trained was announced; 0: none.'),
    'processes': Figure('Ranks or workers of the job.', 'processes', ('start',)),
    'steps': Figure('Steps of the run.', 'step', ('start', 'window', 'train', 'save')),
    'examples': Figure('Samples trained since this start.', 'examples', ('train',), True),
    'examples_per_second': Figure(
      'Samples a second, lately; 0 while idle.', 'examples_per_second', ('window', 'train')
    ),
    'step_seconds': Figure('A step, lately.', 'seconds_per_step', ('window', 'train')),
    'save_seconds': Figure('The last checkpoint.', 'seconds', ('save',)),
    'features': Figure('Features with a row.', 'features', ('window', 'train', 'day_end')),
    'table_bytes': Figure('Memory of the rows.', 'table_bytes', ('window', 'train', 'day_end')),
    'version': Figure('The newest version exported.', 'version', ('export',)),
    'lost': Figure('Ranks or workers lost in this run.', is_counter=True),
    'disk_free_bytes': Figure('Free on the disk of run_dir.'),
    'disk_bytes': Figure('The size of that disk.'),
  },
  'publisher': {
    **_OF_BOTH,
    'version': Figure('The version that the store holds.'),
    'version_age_seconds': Figure('Since the newest export in the store was written.'),
    'seconds_behind': Figure('Since the oldest export that the store lacks was written; 0: none.'),
    'exports_applied': Figure('Times that the store was brought up to date.', is_counter=True),
    'exports_refused': Figure('Exports that could not be read.', is_counter=True),
    'apply_seconds': Figure('The last time that the store was brought up to date.'),
  },
}


class Status:
  """The figures of a running command, and whether it is well. Any thread may read them.

  Args:
    command: a key of FIGURES, and part of the figures' names on the page.
    stalled_after_seconds: without progress for this time, the command counts as hanging.
  Attributes:
    not_ready: why the command does not do its work yet, or cannot now; None if it does.
    also: called when there is progress.
    has_page: whether `serve` was called.
  """

  def __init__(self, command: str, stalled_after_seconds: float):
    self._command, self._figures = command, FIGURES[command]
    self._progress = time.monotonic()
    self._values: dict[str, float | Callable[[], float | None] | None] = {
      name: 0 for name, figure in self._figures.items() if figure.is_counter
    }
    self.set(
      stalled_after_seconds=stalled_after_seconds,
      seconds_since_progress=lambda: time.monotonic() - self._progress,
    )
    self._stop = threading.Event()
    self.not_ready: str | None = 'it starts'
    self.also: Callable[[], None] = lambda: None
    self.has_page = False

  def progress(self) -> None:
    self._progress = time.monotonic()
    self.also()

  def set(self, **values: float | Callable[[], float | None] | None) -> None:
    """Sets figures; a function is called whenever they are read, and None is no figure."""
    assert values.keys() <= self._figures.keys(), values
    self._values |= values

  def add(self, name: str, value: float = 1) -> None:
    self.set(**{name: self._values[name] + value})

  def note(self, record: Mapping[str, Json]) -> None:
    """Takes the figures from an event of metrics.jsonl."""
    event = record['event']
    if fate := 'trained' if event == 'train' else record.get('fate'):
      self.add(f'passes_{fate}')
    if event == 'lost':
      self.add('lost')
    for name, figure in self._figures.items():
      if event in figure.events and (value := record.get(figure.field)) is not None:
        self.add(name, value) if figure.is_counter else self.set(**{name: value})

  def read(self) -> dict[str, float]:
    """Returns the figures that are known now."""
    found = {}
    for name in self._figures:
      value = self._values.get(name)
      with contextlib.suppress(OSError):  # of the disk
        value = value() if callable(value) else value
        if value is not None:
          found[name] = round(value, 6)
    return found

  @property
  def hanging(self) -> str | None:
    """A text if the command has made no progress for too long; else None."""
    idle = time.monotonic() - self._progress
    return f'no progress for {idle:.0f} s' if idle > self._values['stalled_after_seconds'] else None

  def beat(self, tell: Callable[[JsonObject], None]) -> None:
    """Gives the figures to `tell` each minute, in a thread, until `end` is called."""

    def tell_often() -> None:
      while not self._stop.wait(SECONDS_BETWEEN_HEARTBEATS):
        tell(self.read())

    threading.Thread(target=tell_often, name='heartbeat', daemon=True).start()

  def end(self) -> None:
    self._stop.set()

  def serve(self, host: str, port: int) -> None:
    """Answers GET /metrics, /healthz and /readyz over HTTP, in threads, until the process ends."""
    try:
      import prometheus_client
      from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ModuleNotFoundError as e:
      wanted = "pip install 'ctr-trainer[serve]'"
      raise UserError(f"the package '{e.name}' is not installed; wanted {wanted}") from None
    status = self

    class Collector:
      def collect(self) -> list:
        families = []
        for name, value in status.read().items():
          figure = status._figures[name]
          family = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
          families.append(family(f'ctr_{status._command}_{name}', figure.help, value))
        return families

    class Handler(http.server.BaseHTTPRequestHandler):
      timeout = _SECONDS_TO_ASK

      def do_GET(self) -> None:
        kind, why = 'text/plain; charset=utf-8', None
        if self.path == '/metrics':
          kind, body = (
            prometheus_client.CONTENT_TYPE_LATEST,
            prometheus_client.generate_latest(all_),
          )
        elif self.path in ('/healthz', '/readyz'):
          why = status.hanging if self.path == '/healthz' else status.not_ready
          body = f'{why or "ok"}\n'.encode()
        else:
          self.send_error(404, 'wanted /metrics, /healthz or /readyz')
          return
        self.send_response(503 if why else 200)
        self.send_header('Content-Type', kind)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

      def log_message(self, *_: object) -> None: ...

    class Server(http.server.ThreadingHTTPServer):
      address_family = socket.AF_INET6 if ':' in host else socket.AF_INET
      daemon_threads = True

      def handle_error(self, *_: object) -> None: ...  # a client is gone

    all_ = prometheus_client.CollectorRegistry()
    all_.register(Collector())
    with plain_errors(f'--metrics_host {host}, --metrics_port {port}'):
      server = Server((host, port), Handler)
    threading.Thread(target=server.serve_forever, name='metrics', daemon=True).start()
    self.has_page = True
    shown = f'[{host}]' if ':' in host else host
    command_line.say(f'metrics http://{shown}:{server.server_port}/metrics', 'metrics')
