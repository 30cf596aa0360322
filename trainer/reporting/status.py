"""What a trainer or publisher tells of itself while it runs: figures, on a page and as heartbeats.

A new figure needs an entry in FIGURES, with the events of metrics.jsonl that set it or, if none
does, a caller of `Status.set`.
"""

import contextlib
import http.server
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import prometheus_client
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from trainer import command_line
from trainer.comm.door import Door
from trainer.errors import plain_errors
from trainer.plain_data import Json, JsonObject

SECONDS_BETWEEN_HEARTBEATS = 60.0
_SECONDS_TO_ASK = 5.0  # for a client's request and its answer
NEXT = 'auc', 'logloss', 'rmse', 'calibration'
PASS_FATES = 'trained', 'late', 'skipped', 'seen', 'refused'


class Figure(NamedTuple):
  """A figure: what it is, and which field of which events sets it.

  A counter adds the field up; without a field, it counts the events.
  """

  help: str
  field: str = ''
  events: tuple[str, ...] = ()
  is_counter: bool = False


_PASS = 'window', 'train'
_OF_BOTH = {
  'seconds_since_progress': Figure('Since the last step, look, or chunk of slow work.'),
  'stalled_after_seconds': Figure('How long without progress /healthz still answers 200.'),
}
FIGURES = {
  'trainer': {
    **_OF_BOTH,
    **{f'passes_{f}': Figure(f'Passes {f} in this run.', is_counter=True) for f in PASS_FATES},
    'passes_waiting': Figure('Passes ready behind the one in training, at its start.'),
    'seconds_behind': Figure('Since the oldest pass or message came that is not trained; 0: none.'),
    'messages_waiting': Figure('Messages of data.topic that are not trained, as last seen.'),
    'seconds_since_arrival': Figure('Since the newest pass or message came.'),
    **{
      f'next_{f}': Figure(f'The {f} of the next pass, before training.', f, ('next',)) for f in NEXT
    },
    'exports_withheld': Figure(
      'Passes after which export.gate withheld it.', '', ('withheld',), True
    ),
    'processes': Figure('Ranks or workers of the job.', 'processes', ('start',)),
    'steps': Figure('Steps of the run.', 'step', ('start', 'window', 'train', 'save')),
    'examples': Figure('Samples trained since this start.', 'samples', ('train',), True),
    'examples_per_second': Figure('Lately; 0 while idle.', 'examples_per_second', _PASS),
    'step_seconds': Figure('A step, lately.'),
    'save_seconds': Figure('The last checkpoint.', 'seconds', ('save',)),
    'features': Figure('Features with a row.', 'features', (*_PASS, 'day_end')),
    'table_bytes': Figure('Memory of the rows.', 'table_bytes', (*_PASS, 'day_end')),
    'version': Figure('The newest version exported.'),
    'lost': Figure('Ranks or workers lost in this run.', '', ('lost',), True),
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
  """The figures of a running command, a key of FIGURES, and whether it is well. Thread-safe."""

  def __init__(self, command: str, stalled_after_seconds: float):
    self._command, self._figures = command, FIGURES[command]
    self._stalled, self._stop = stalled_after_seconds, threading.Event()
    self._progress = time.monotonic()
    # Why the command does not do its work yet, or cannot now; None if it does.
    self.not_ready: str | None = 'it starts'
    self.also: Callable[[], None] = lambda: None  # called when there is progress
    self._values = {name: 0 for name, figure in self._figures.items() if figure.is_counter}
    self.set(stalled_after_seconds=stalled_after_seconds, seconds_since_progress=self._idle)

  def _idle(self) -> float:
    return time.monotonic() - self._progress

  def progress(self) -> None:
    self._progress = time.monotonic()
    self.also()

  def set(self, **values: float | Callable[[], float | None] | None) -> None:
    """Sets figures: a number, a function that gives it at each reading, or None for unknown."""
    self._values |= values

  def add(self, name: str, value: float = 1) -> None:
    self._values[name] += value

  def note(self, record: Mapping[str, Json]) -> None:
    """Takes the figures from an event of metrics.jsonl."""
    event = record.get('split', record['event'])
    if fate := 'trained' if event == 'train' else record.get('fate'):
      self.add(f'passes_{fate}')
    if event == 'export':  # such as exports/000012-delta
      self.set(version=int(os.path.basename(record['path']).partition('-')[0]))
    for name, figure in self._figures.items():
      value = record.get(figure.field) if figure.field else 1
      if event in figure.events and value is not None:
        self._values[name] = value + (self._values[name] if figure.is_counter else 0)

  def read(self) -> dict[str, float]:
    """Returns the figures that are known now."""
    found = {}
    for name in self._figures:
      value = self._values.get(name)
      with contextlib.suppress(OSError):  # of the disk
        if (value := value() if callable(value) else value) is not None:
          found[name] = round(value, 6)
    return found

  def beat(self, tell: Callable[[JsonObject], None]) -> None:
    """Gives the figures to `tell` each minute, in a thread, until `end` is called."""

    def tell_often() -> None:
      while not self._stop.wait(SECONDS_BETWEEN_HEARTBEATS):
        tell(self.read())

    threading.Thread(target=tell_often, daemon=True).start()

  def end(self) -> None:
    self._stop.set()

  def serve(self, host: str, port: int) -> None:
    """Answers GET /metrics, /healthz and /readyz over HTTP, in threads, until the process ends."""
    answer = self._answer

    class Handler(http.server.BaseHTTPRequestHandler):
      log_message = lambda *_: None

      def do_GET(self) -> None:
        code, text = answer(self.path.partition('?')[0])
        self.send_response(code)
        self.send_header('Content-Type', prometheus_client.CONTENT_TYPE_LATEST)
        self.end_headers()
        self.wfile.write(text)

    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    with plain_errors(f'--metrics_host {host}, --metrics_port {port}'):
      server = socket.create_server((host, port), family=family)
    Door(server, _SECONDS_TO_ASK, lambda one: Handler(one, None, None) and None)
    shown = f'[{host}]' if ':' in host else host
    command_line.say(f'metrics http://{shown}:{server.getsockname()[1]}/metrics', 'metrics')

  def _answer(self, path: str) -> tuple[int, bytes]:
    if path == '/metrics':
      return 200, prometheus_client.generate_latest(self)
    if path not in ('/healthz', '/readyz'):
      return 404, b'wanted /metrics, /healthz or /readyz\n'
    hangs = f'no progress for {self._idle():.0f} s' if self._idle() > self._stalled else None
    why = hangs if path == '/healthz' else self.not_ready
    return (503, f'{why}\n'.encode()) if why else (200, b'ok\n')

  def collect(self) -> Iterator[Metric]:
    """Yields the figures that are known now, for Prometheus."""
    for name, value in self.read().items():
      text, *_, is_counter = self._figures[name]
      family = CounterMetricFamily if is_counter else GaugeMetricFamily
      yield family(f'ctr_{self._command}_{name}', text, value)
