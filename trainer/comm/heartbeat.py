"""The heartbeat of a job of ranks: ends the job if a rank dies, freezes or hangs, and names it.

Without it, all ranks would wait forever for a frozen one: Horovod's stall check does nothing under
Gloo. Every rank exchanges beats with rank 0. If a rank is silent, gone or without progress, rank 0
prints the reason and ends all ranks with the same exit status. If rank 0 itself is lost, every
other rank prints that and ends. Beats begin before TensorFlow and Horovod are imported, so they
also limit the time of a start.

Ranks find rank 0 through horovodrun's key-value store, which anyone may read: it holds the address
but no secret. The scripts of launch/ pass one; else it is a hash of the config, which others lack.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from ops.build import NotBuilt
from trainer.comm import messages
from trainer.command_line import timed
from trainer.config import Config
from trainer.errors import UserError, is_exhausted, one_line
from trainer.plain_data import JsonObject
from trainer.runtime import Runtime

EXIT_STATUS = 3  # the exit status of every process of a job that lost one
_STATUSES = 1, 2, EXIT_STATUS  # the exit statuses with which a rank may end the job
_CONTINUE = 'The job ends; run the same command again to continue from the last checkpoint'
_RENDEZVOUS_KEY = 'ctr_trainer/heartbeat'
_ATTEMPT_SECONDS = 3  # the time limit of one request to the key-value store


class Heartbeat(contextlib.AbstractContextManager):
  """Sends beats until the `with` block ends; an error in the block ends the job on every rank.

  An error or the loss of a rank ends all processes, whatever their main threads do. A UserError on
  any rank is printed once, and the exit status is 2; rank 0 raises one if it finds no free port.
  `tell_lost` is called on rank 0, with the reason, before the loss of a rank ends the job.
  """

  def __init__(self, runtime: Runtime, cfg: Config):
    self.tell_lost: Callable[[str], None] = lambda text: None
    self._rank, self._size, self._sync = runtime.rank, runtime.size, cfg.sync
    self._name = f'rank {runtime.rank} (process {os.getpid()} on {os.uname().nodename})'
    self._progress = time.monotonic()
    self._lock = threading.Lock()  # guards what follows
    self._members: dict[int, _Peer] = {}  # on rank 0 all other ranks, else rank 0 alone
    self._closing = self._ending = False
    self._secret = runtime.secret or hashlib.sha256(cfg.model_dump_json().encode()).digest()
    if self._rank == 0:
      listener = messages.Listener(
        runtime.host, cfg.sync.ports, self._secret, cfg.sync.lost_peer_seconds, self._accept
      )
      record = {'address': listener.address, 'name': self._name}
      self._request(runtime.rendezvous, json.dumps(record).encode())
      threading.Thread(target=self._expect_all, daemon=True).start()
    else:
      self._join(json.loads(self._request(runtime.rendezvous)))

  def progress(self) -> None:
    """Records that this rank made progress; called after each step and each chunk of slow work."""
    self._progress = time.monotonic()

  def _idle(self) -> float:
    return time.monotonic() - self._progress

  def end(self, text: str, status: int) -> NoReturn:
    """Ends all ranks with `status`; rank 0 prints the text or, if it does not answer, this rank."""
    if self._rank == 0:
      self._end_all(text, status)
    self._members[0].connection.send(['end', text, status])
    time.sleep(min(10, self._sync.lost_peer_seconds))  # rank 0's answer ends this process
    _exit(text, status)

  def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
    if error is None:
      with self._lock:
        self._closing = True
        members = list(self._members.values())
      for member in members:
        member.connection.send(['bye'])  # else the other side would report this end as a loss
      for member in members:
        member.connection.close()
    elif isinstance(error, (UserError, NotBuilt)):
      self.end(f'error: {error}', EXIT_STATUS if is_exhausted(error) else 2)
    elif isinstance(error, Exception):
      # This rank may have failed because another rank was lost. If so, rank 0 reports that loss and
      # ends this process while it waits.
      time.sleep(min(5, self._sync.lost_peer_seconds))
      import tensorflow as tf  # here, because the error may come before its import

      goes_on = isinstance(error, (ConnectionError, tf.errors.AbortedError)) or is_exhausted(error)
      if not goes_on:
        traceback.print_exception(error)
      status = EXIT_STATUS if goes_on else 1
      self.end(f'{self._name} failed: {one_line(error)}. {_CONTINUE}.', status)

  # Meeting

  def _request(self, rendezvous: str, data: bytes | None = None) -> bytes:
    """Publishes rank 0's address and name, `data`, in horovodrun's store, or waits for them there.

    After `sync.lost_peer_seconds` without success, it prints why and ends the process.
    """
    method = 'GET' if data is None else 'PUT'
    request = urllib.request.Request(f'{rendezvous}/{_RENDEZVOUS_KEY}', data, method=method)
    waited, why = 0.0, ''
    while waited < self._sync.lost_peer_seconds:
      began = time.monotonic()
      try:
        with urllib.request.urlopen(request, timeout=_ATTEMPT_SECONDS) as response:
          return response.read()
      except urllib.error.HTTPError as e:
        why = '' if e.code == 404 else str(e)
      except OSError as e:
        why = str(e)
      time.sleep(0.05)
      # If this process itself was paused, the pause counts as one attempt.
      waited += min(time.monotonic() - began, 2 * _ATTEMPT_SECONDS)
    seconds = f'within {self._sync.lost_peer_seconds:.0f} s'
    if why:
      _exit(f'{self._name} cannot reach horovodrun at {rendezvous} {seconds}: {why}', EXIT_STATUS)
    _exit(f'rank 0 was lost: it did not start {seconds}. {_CONTINUE}.', EXIT_STATUS)

  def _join(self, record: JsonObject) -> None:
    try:
      connection = messages.connect(record['address'], self._secret, self._sync.lost_peer_seconds)
    except ConnectionError as e:
      why = f'{self._name} cannot reach it at {messages.address_text(record["address"])}: {e}'
      _exit(f'{record["name"]} was lost: {why}. {_CONTINUE}.', EXIT_STATUS)
    member = _Peer(record['name'], self._connection(connection))
    member.connection.send(['hello', self._rank, self._name])
    self._members[0] = member
    threading.Thread(target=self._listen, args=(member,), daemon=True).start()

  def _accept(self, accepted: Connection) -> None:
    """Listens to a rank that has connected to rank 0; a thread of rank 0 runs it."""
    connection = self._connection(accepted)
    try:
      while (message := connection.receive())[0] == 'beat':
        pass
      match message:
        case ['hello', int(rank), str(name)] if 0 < rank < self._size:
          member = _Peer(name, connection)
        case _:
          raise messages.not_understood(message)
    except ConnectionError:
      connection.close()
      return  # `_expect_all` reports a rank that never came
    with self._lock:
      self._members[rank] = member
    self._listen(member)

  def _connection(self, connection: Connection) -> messages.MessageConnection:
    seconds = self._sync.lost_peer_seconds
    return messages.MessageConnection(connection, seconds, lambda: ['beat', self._idle()])

  def _expect_all(self) -> None:
    """Ends the job if a rank does not connect to rank 0 within `sync.lost_peer_seconds`."""
    for _ in range(10):  # short waits, so that a pause of this process counts as one of them
      time.sleep(self._sync.lost_peer_seconds / 10)
      with self._lock:
        missing = set(range(1, self._size)) - set(self._members)
      if not missing:
        return
    self._end_all(
      f'rank {min(missing)} was lost: it did not start within '
      f'{self._sync.lost_peer_seconds:.0f} s. {_CONTINUE}.',
      EXIT_STATUS,
    )

  # Listening

  def _listen(self, member: '_Peer') -> None:
    """Listens to a rank until its goodbye; if it is lost, rank 0 ends all ranks, another itself."""
    while True:
      try:
        match message := member.connection.receive():
          case ['beat', float(idle)]:
            member.idle = idle
            if idle > self._sync.stalled_peer_seconds:
              # All are idle because they wait for the rank that has been idle for longest.
              idles = {m.name: m.idle for m in self._members.values()} | {self._name: self._idle()}
              name = max(idles, key=idles.get)
              self._lose(name, f'it beats but has made no progress for {idles[name]:.0f} s')
          case ['bye']:
            return
          case ['end', str(text), int(status)] if status in _STATUSES:
            if self._rank == 0:
              self._end_all(text, status)
            os._exit(status)  # rank 0 has said why
          case _:
            raise messages.not_understood(message)
      except ConnectionError as e:
        if not self._closing:
          self._lose(member.name, str(e))
        return

  def _lose(self, name: str, why: str) -> None:
    text = f'{name} was lost: {why}. {_CONTINUE}.'
    if self._rank == 0:
      self._end_all(text, EXIT_STATUS)
    _exit(text, EXIT_STATUS)  # only rank 0 can be lost here

  def _end_all(self, text: str, status: int) -> NoReturn:
    """Prints the text and ends all ranks; only rank 0 calls it, and only the first call counts."""
    with self._lock:
      first, self._ending = not self._ending, True
      members = list(self._members.values())
    if not first:
      threading.Event().wait()  # the thread that came first ends this process
    _tell(text, status)
    for member in members:
      member.connection.send(['end', text, status])
    if status == EXIT_STATUS:
      with contextlib.suppress(Exception):  # the job ends, even if its report fails
        self.tell_lost(text)
    for member in members:
      member.connection.close()
    os._exit(status)


@dataclasses.dataclass
class _Peer:
  """What this rank knows of another rank."""

  name: str
  connection: messages.MessageConnection
  idle: float = 0.0  # seconds without progress, from its last beat


def _exit(text: str, status: int) -> NoReturn:
  _tell(text, status)
  os._exit(status)


def _tell(text: str, status: int) -> None:
  sys.stderr.write(f'{text if status == 2 else timed(text)}\n')  # status 2: a user's mistake
