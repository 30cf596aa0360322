"""One owner of a run_dir: a second trainer is refused, a dead one's lock is taken over."""

import json
import os
import secrets
import socket
import threading
import time
from typing import TextIO

import psutil
from absl import logging

from trainer import files
from trainer.errors import UserError
from trainer.plain_data import JsonObject

FILE = 'owner.json'
STALE_SECONDS = 60.0  # an owner on another host that has not beaten for so long is dead
BEATS = 6  # in that time

_held: set[str] = set()  # ids of the locks that this process holds


class RunLock:
  """Held by the process that trains into a run_dir.

  The file names host and process. A process of this host is dead when it does not run; one of
  another host, or in another container, when the file's time has stood still for `stale_seconds`,
  by the clock of the file system.

  Args:
    run_dir: an existing directory, which all hosts may see.
    stale_seconds: as above.
  Attributes:
    id: of the lock, once it was acquired; another process of the job may follow its owner by it.
  """

  def __init__(self, run_dir: str, stale_seconds: float = STALE_SECONDS):
    self.id = ''
    self._run_dir, self._stale_seconds = run_dir, stale_seconds
    self._path = os.path.join(run_dir, FILE)
    self._released = threading.Event()
    self._own: JsonObject | None = None

  def acquire(self) -> None:
    """Makes this process the owner; waits where only time can tell whether another one lives.

    Raises:
      UserError: naming the owner, where it lives.
    """
    own = _this_process() | {'id': secrets.token_hex(8)}
    seen: tuple[str, int] | None = None  # the owner and the time of its file
    while True:
      with files.exclusive(self._path) as f:
        owner, stat = _read(f), os.fstat(f.fileno())
        is_here = owner is not None and owner['place'] == own['place']
        if owner is None or (_is_dead(owner) if is_here else self._is_stale(stat.st_mtime)):
          self._take(f, own)
          return
      now = owner['id'], stat.st_mtime_ns
      if is_here or (seen is not None and now != seen):
        raise UserError(
          f'run_dir {self._run_dir}: process {owner["process"]} on host {owner["host"]} trains '
          'into it; wanted that process to end first, or another --run_dir'
        )
      if seen is None:
        logging.warning(
          'run_dir %s: process %s on host %s trained into it last; waiting up to %.0f s to see '
          'whether it still does',
          self._run_dir,
          owner['process'],
          owner['host'],
          self._stale_seconds,
        )
      seen = now
      time.sleep(self._stale_seconds / BEATS / 10)  # between looks

  def follow(self, lock_id: str) -> None:
    """Makes this process the owner after another one of its own job, which was lost or gives way.

    Args:
      lock_id: of the job's lock.
    Raises:
      UserError: where another job has taken the run_dir meanwhile.
    """
    self.id = lock_id
    with files.exclusive(self._path) as f:
      owner = _read(f)
      if owner is not None and owner['id'] != lock_id:
        raise self._taken_by(owner)
      self._take(f, _this_process() | {'id': lock_id})

  def leave(self) -> None:
    """Lets another process of the job follow."""
    self._released.set()
    self._own = None

  def _take(self, f: TextIO, own: JsonObject) -> None:
    """Writes this process into the lock's file, which it holds."""
    f.seek(0)
    f.truncate()
    f.write(json.dumps(own))
    f.flush()
    os.fsync(f.fileno())
    self._own, self.id = own, own['id']
    _held.add(own['id'])
    self._released = threading.Event()
    beat = threading.Thread(target=self._beat, args=[self._released], name='run lock', daemon=True)
    beat.start()

  def check(self) -> None:
    """Checks that the run_dir is still this process's, where it ever was.

    Raises:
      UserError: where another process has taken it, because this one stood still.
    """
    if self._own is None:
      return
    with files.exclusive(self._path) as f:
      owner = _read(f)
    if owner is not None and owner['id'] != self._own['id']:
      raise self._taken_by(owner)

  def _taken_by(self, owner: JsonObject) -> UserError:
    return UserError(
      f'run_dir {self._run_dir}: process {owner["process"]} on host {owner["host"]} has taken it '
      'over while this one stood still; this one ends'
    )

  def release(self) -> None:
    """Gives the run_dir up, where this process owns it."""
    if self._own is None:
      return
    self._released.set()
    with files.exclusive(self._path) as f:
      owner = _read(f)
      if owner == self._own:
        f.truncate(0)
    _held.discard(self._own['id'])
    self._own = None

  def _beat(self, released: threading.Event) -> None:
    while not released.wait(self._stale_seconds / BEATS):
      try:
        os.utime(self._path)
      except OSError:
        pass  # the next beat may find the storage again

  def _is_stale(self, modified: float) -> bool:
    """Whether a file's time lies further back than that of a file written now."""
    probe = f'{self._path}.{os.getpid()}'
    with open(probe, 'w', encoding='utf-8'):
      now = os.stat(probe).st_mtime
    os.remove(probe)
    return now - modified > self._stale_seconds


def _this_process() -> JsonObject:
  # Containers share a host's name or not; their processes are told by their namespace.
  host, namespace = socket.gethostname(), os.stat('/proc/self/ns/pid').st_ino
  return {
    'host': host,
    'process': os.getpid(),
    'started': psutil.Process().create_time(),
    'place': f'{host} {namespace}',
  }


def _is_dead(owner: JsonObject) -> bool:
  """Whether an owner of this host has ended; a later process may have its number."""
  if owner['process'] == os.getpid() and owner['id'] not in _held:
    return True  # it was this process, which has since started itself again (os.execv)
  try:
    process = psutil.Process(owner['process'])
    return (
      abs(process.create_time() - owner['started']) > 1 or process.status() == psutil.STATUS_ZOMBIE
    )
  except psutil.NoSuchProcess:
    return True


def _read(f: TextIO) -> JsonObject | None:
  """The owner that the file names; None where it names none."""
  f.seek(0)
  try:
    owner = json.loads(f.read())
    return owner if {'host', 'process', 'started', 'place', 'id'} <= owner.keys() else None
  except (ValueError, AttributeError):
    return None
