"""Reports on a running job: events, a live line, and the time that each part of the work takes."""

from collections.abc import Mapping, Sequence

from trainer import command_line, runtime
from trainer.plain_data import Json, JsonObject
from trainer.reporting.events import EventLog
from trainer.reporting.listener import Listener
from trainer.reporting.live_line import LiveLine
from trainer.reporting.metric_text import metric_text
from trainer.reporting.status import Status
from trainer.training.step import Step
from trainer.training.stopwatch import Stopwatch


class RunLog:
  """The log of a run. Every process has one, but only process 0 writes anything.

  Attributes:
    events: writes metrics.jsonl.
    listeners: are told what happens in the run.
    clock: measures the seconds that each part of the work takes.
    status: the figures of the run, which others may ask for.
  """

  def __init__(self, run_dir: str, step: Step, status: Status, most_bytes: int | None = None):
    self._run_dir, self._step, self.status, self._most = run_dir, step, status, most_bytes
    self.clock = Stopwatch()
    self.listeners: Sequence[Listener] = ()
    self.open(active=False)

  def open(self, active: bool, keep_bytes: int | None = None) -> None:
    """Opens the files, if this process writes them.

    `keep_bytes` is the size of metrics.jsonl at the checkpoint from which the run continues; later
    events are removed.
    """
    self.events = EventLog(self._run_dir, active, keep_bytes, self._most)
    self.events.note = self._note
    self.events.tell(self.listeners)
    self._live = LiveLine(active, runtime.is_terminal())

  def write(self, event: str, **fields: Json) -> None:
    self.events.write(event, self._step.steps, **fields)

  def _note(self, record: Mapping[str, Json]) -> None:
    self.status.note(record)
    if record['event'] != 'window':
      command_line.say_event(**record)

  def show(self, text: str, keep: bool = False) -> None:
    """Shows a text as the live line; if `keep`, the text stays on the screen."""
    self._live.show(text, keep)


def quality_text(values: JsonObject) -> str:
  """Returns the main metrics, of each task if there are several, as text for the live line."""
  if 'tasks' in values:
    return ' · '.join(
      f'{name} {quality_text(of_task)}' for name, of_task in values['tasks'].items()
    )
  shown = {'rmse': 'rmse'} if 'rmse' in values else {'logloss': 'logloss', 'auc': 'AUC'}
  if 'loss' in values:
    shown = {'loss': 'loss'}
  elif ranked := [name for name in values if name.startswith(('recall@', 'ndcg@'))]:
    shown = dict(zip(ranked, ranked))
  return ' · '.join(
    f'{title} {"-" if values[name] is None else metric_text(name, values[name])}'
    for name, title in shown.items()
  )
