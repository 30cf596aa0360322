"""The parts of a campaign: kinds of units, and helpers that run processes."""

import collections
import contextlib
import dataclasses
import json
import os
import pickle
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

TRACE = 'Traceback (most recent call last)'


@dataclasses.dataclass
class Found:
  """The result of a unit.

  Attributes:
    trials: the number of faults that took place, or of inputs that were tried.
    outcomes: the number of trials that ended in each way.
    failures: what must not happen, one line each.
  """

  trials: int = 0
  outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  failures: list[str] = dataclasses.field(default_factory=list)

  def trial(self, outcome: str, failure: str | None = None) -> None:
    """Counts a trial."""
    self.trials += 1
    self.outcomes[outcome if failure is None else 'failed'] += 1
    if failure is not None:
      self.failures.append(failure)


class Kind(NamedTuple):
  """A kind of unit.

  Attributes:
    name: as in the table.
    unit: what is counted: faults or inputs.
    units: the number of units of a whole campaign.
    seconds: how long a unit may take.
    run: (random numbers, an empty folder, a folder that all units share) -> the result. Its
      docstring says what it does and what must hold.
  """

  name: str
  unit: str
  units: int
  seconds: float
  run: Callable[[random.Random, str, str], Found]

  @property
  def what(self) -> str:
    """What is done and what must hold, for the table."""
    return ' '.join(self.run.__doc__.split())


def fork(action: Callable[[], object], log: str) -> int:
  """Runs `action` in a process of its own, whose output goes to a file; returns its id.

  The calling process has imported TensorFlow and run none of its ops, so its children start fast.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  pid = os.fork()
  if pid:
    return pid
  try:
    with open(log, 'ab') as f:
      os.dup2(f.fileno(), 1)
      os.dup2(f.fileno(), 2)
    action()
    sys.stdout.flush()
    os._exit(0)
  except SystemExit as e:
    os._exit(e.code if isinstance(e.code, int) else 1)
  except BaseException as e:
    os.write(2, f'{TRACE}: {type(e).__name__}: {e}\n'.encode())
    os._exit(1)


def command(*words: str) -> Callable[[], object]:
  """Returns an action that does what `python -m words…` does."""

  def action() -> None:
    sys.argv = list(words)
    sys.orig_argv[:] = [sys.executable, '-m', *words]  # a worker may start itself again
    runpy.run_module(words[0], run_name='__main__')

  return action


def status_of(raw: int) -> int:
  """Returns a process's exit status; negative if a signal ended it, as in subprocess."""
  return -os.WTERMSIG(raw) if os.WIFSIGNALED(raw) else os.WEXITSTATUS(raw)


def wait(pid: int, seconds: float) -> int | None:
  """Waits for a child; returns its status, or None if it still runs."""
  deadline = time.monotonic() + seconds
  while True:
    found, raw = os.waitpid(pid, os.WNOHANG)
    if found:
      return status_of(raw)
    if time.monotonic() > deadline:
      return None
    time.sleep(0.01)  # between looks


def text_of(path: str) -> str:
  """Returns the content of a file; '' if there is none."""
  with contextlib.suppress(OSError), open(path, encoding='utf-8', errors='replace') as f:
    return f.read()
  return ''


def in_child(function: Callable[[], Any], folder: str) -> Any:
  """Calls `function`, which may use TensorFlow, in a process of its own; returns its result.

  Raises:
    AssertionError: if it fails.
  """
  out, log = os.path.join(folder, 'result'), os.path.join(folder, 'child.log')

  def action() -> None:
    with open(out, 'wb') as f:
      pickle.dump(function(), f)

  if status := status_of(os.waitpid(fork(action, log), 0)[1]):
    raise AssertionError(f'status {status}: {text_of(log)[-500:]}')
  with open(out, 'rb') as f:
    return pickle.load(f)


def told(text: str) -> list[str]:
  """Returns the lines of a log that give a reason for the end."""
  marks = ('error:', ' was lost', 'did not start', 'did not come', 'ends;', 'failed:')
  return [line for line in text.splitlines() if any(mark in line for mark in marks)]


@contextlib.contextmanager
def killed_in_the_end(pids: list[int]) -> Iterator[None]:
  """Kills those of the processes that still run when the block ends."""
  try:
    yield
  finally:
    for pid in pids:
      with contextlib.suppress(OSError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
          os.kill(pid, signal.SIGKILL)
          os.waitpid(pid, 0)


def append(path: str, record: dict[str, Any]) -> None:
  """Adds a line of JSON to a file, at once."""
  with open(path, 'a', encoding='utf-8') as f:
    f.write(json.dumps(record) + '\n')
