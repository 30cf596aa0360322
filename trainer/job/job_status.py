"""Keeps the figures of a job up to date; process 0 reports them for all processes."""

import shutil
import time

from trainer.data.file_system import modified
from trainer.job.stream import Action, EndDay, Stream, TrainPass, Wait
from trainer.reporting.status import PASS_FATES, Status
from trainer.storage import chain
from trainer.training.run_log import RunLog


class JobStatus:
  """Tells a Status what its job does; the events of the job's log tell it the rest."""

  def __init__(self, run_dir: str, follows: bool, stream: Stream, log: RunLog, status: Status):
    self._run_dir, self._follows, self._stream, self._log = run_dir, follows, stream, log
    self._status, self._since = status, None  # monotonic, when the oldest pass or message came

  def begin(self, fates: dict[str, int]) -> None:
    """Called once a checkpoint is restored; `fates` is {fate: number of passes} of its ledger."""
    status, events, run_dir = self._status, self._log.events, self._run_dir
    status.set(**{f'passes_{fate}': fates.get(fate, 0) for fate in PASS_FATES})
    status.set(
      version=max((e.sequence for e in chain.exports(f'{run_dir}/exports')), default=None),
      disk_free_bytes=lambda: shutil.disk_usage(run_dir).free,
      disk_bytes=lambda: shutil.disk_usage(run_dir).total,
    )
    status.not_ready = None
    if self._follows and events.active:
      source = self._stream.source
      status.set(
        lost=events.count('lost'),
        seconds_behind=self._seconds_behind,
        seconds_since_arrival=lambda: max(0.0, time.time() - source.arrived),
        messages_waiting=source.messages,
      )
      status.beat(
        lambda found: events.append({'event': 'heartbeat', 'step': found['steps'], **found})
      )

  def next(self, action: Action) -> None:
    """Notes what the job does next: `action`, which `Stream.next` has just returned."""
    self._status.progress()
    if not (self._follows and self._log.events.active):
      return
    match action:
      case Wait(seconds_behind=behind):
        self._since = None if behind is None else time.monotonic() - behind
        self._status.set(passes_waiting=0, examples_per_second=0)
      case TrainPass(seconds_behind=behind, waiting=waiting):
        if behind is None:  # the pass was begun before a restart: those behind it are known
          waiting, behind = map(self._stream.lag().get, ('waiting', 'seconds_behind'))
        self._since = time.monotonic() - (behind or 0)
        self._status.set(passes_waiting=waiting)
      case EndDay(data_pass=following) if following is not None and following.marker:
        self._since = self._since or time.monotonic() - time.time() + modified(following.marker)

  def _seconds_behind(self) -> float:
    return 0 if self._since is None else time.monotonic() - self._since
