"""Stops a job that runs in this process once it waits for a pass."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from unittest import mock

from trainer.job import job


@contextlib.contextmanager
def stopped_when_it_waits(one: job.Job) -> Iterator[None]:
  """Sends a job SIGTERM, so to speak, in place of its first pause in this thread."""
  sleep, own = time.sleep, threading.current_thread()

  def stop(seconds: float) -> None:
    if threading.current_thread() is own:
      one.stop_request.signal = signal.SIGTERM
    else:
      sleep(seconds)

  with mock.patch.object(job.time, 'sleep', stop):
    yield
