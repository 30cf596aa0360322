"""A lock that lets only one trainer at a time use a run_dir. A dead trainer's lock can be taken."""

import contextlib
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
STALE_SECONDS = 60.0  # an owner on another host that was silent for longer counts as dead
BEATS = 6  # updates of the file's time within STALE_SECONDS

_held: set[str] = set()  # ids of the locks that this process holds


class RunLock:
  """The lock of a run_dir; its owner is the process that trains into the run_dir.

  A file names the owner's host and process, and the owner updates the file's time every few
  seconds. An owner on this host is dead when its process has ended; one on another host, or in
  another container, when the file's time is older than `stale_seconds`, by the file system's clock.
  With the `id` of an acquired lock, another process of the same job can `follow`.
  """

  def __init__(self, run_dir: str, stale_seconds: float = STALE_SECONDS):
    self.id = ''
    self._run_dir, self._stale_seconds = run_dir, stale_seconds
    self._path = os.path.join(run_dir, FILE)
    self._released = threading.Event()
    self._own: JsonObject | None = None

  def acquire(self) -> None:
    """Makes this process the owner once the last owner is dead; UserError if that one lives."""
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
    """Takes over the lock of this `id` from a process of this job that died or left it."""
    self.id = lock_id
    with files.exclusive(self._path) as f:
      owner = _read(f)
      if owner is not None and owner['id'] != lock_id:
        raise self._taken_by(owner)
      self._take(f, _this_process() | {'id': lock_id})

  def leave(self) -> None:
    """Stops owning the lock but does not release it, so that another process can `follow`."""
    self._released.set()
    self._own = None

  def _take(self, f: TextIO, own: JsonObject) -> None:
    """Writes this process's name into the open lock file, and begins to update the file's time."""
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
    """Raises UserError if another process took over the run_dir while this one was suspended."""
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
    """Gives the lock up, if this process is the owner."""
    if self._own is None:
      return
    self._released.set()
    with files.exclusive(self._path) as f:
      if _read(f) == self._own:
        f.truncate(0)
    _held.discard(self._own['id'])
    self._own = None

  def _beat(self, released: threading.Event) -> None:
    while not released.wait(self._stale_seconds / BEATS):
      with contextlib.suppress(OSError):  # the storage may be back at the next beat
        os.utime(self._path)

  def _is_stale(self, modified: float) -> bool:
    """Returns whether a file's time is over `_stale_seconds` ago, by the file system's clock."""
    probe = f'{self._path}.{os.getpid()}'
    with open(probe, 'w', encoding='utf-8'):
      now = os.stat(probe).st_mtime
    os.remove(probe)
    return now - modified > self._stale_seconds


def in_words(run_dir: str) -> str:
  """Returns a text on whether a trainer is at work in a run_dir. It writes and locks nothing."""
  try:
    with open(os.path.join(run_dir, FILE), encoding='utf-8', errors='replace') as f:
      owner, silent = _read(f), time.time() - os.fstat(f.fileno()).st_mtime
  except FileNotFoundError:
    owner = None
  if owner is None:
    return 'no process trains into it'
  who = f'process {owner["process"]} on host {owner["host"]}'
  if owner['place'] == _this_process()['place']:
    return f'{who} {"was killed" if _is_dead(owner) else "is at work"}'
  if silent > STALE_SECONDS:
    return f'{who} was killed or cut off: it gave its last sign of life {silent:,.0f} s ago'
  return f'{who} is at work'


def _this_process() -> JsonObject:
  # Containers may have their host's name, so the namespace of process ids tells them apart.
  host, namespace = socket.gethostname(), os.stat('/proc/self/ns/pid').st_ino
  return {
    'host': host,
    'process': os.getpid(),
    'started': psutil.Process().create_time(),
    'place': f'{host} {namespace}',
  }


def _is_dead(owner: JsonObject) -> bool:
  """Returns whether a lock's owner on this host has ended, by process id and start time."""
  if owner['process'] == os.getpid() and owner['id'] not in _held:
    return True  # this process owned it before it restarted itself (os.execv)
  try:
    process = psutil.Process(owner['process'])
    return (
      abs(process.create_time() - owner['started']) > 1 or process.status() == psutil.STATUS_ZOMBIE
    )
  except psutil.NoSuchProcess:
    return True


def _read(f: TextIO) -> JsonObject | None:
  """Returns the owner that a lock file describes; None if it describes none."""
  f.seek(0)
  try:
    owner = json.loads(f.read())
    numbers = isinstance(owner['process'], int) and isinstance(owner['started'], (int, float))
    return owner if numbers and {'host', 'place', 'id'} <= owner.keys() else None
  except (ValueError, LookupError, TypeError):
    return None
