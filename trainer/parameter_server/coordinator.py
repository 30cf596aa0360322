"""The coordinator of a parameter-server job, in the process of server 0.

Every process keeps a connection to it and sends beats. Workers use it for collective operations
(sums of metrics, barriers) and, in asynchronous modes, to claim units of work. Workers say goodbye
at the end, and then the servers end too.

All waits are bounded. A process counts as lost if it is silent for `sync.lost_peer_seconds`, if its
beats report no progress for `sync.stalled_peer_seconds`, or if it does not join within
`sync.lost_peer_seconds` after the last process that joined. The coordinator names it. The mode
decides whether the job ends, goes on without it, or goes back to the last checkpoint: workers then
restart, keep their connections, and are waited for as long as they live.
"""

import dataclasses
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection

from trainer.comm import messages
from trainer.comm.heartbeat import EXIT_STATUS
from trainer.command_line import SIGNALLED
from trainer.config import Sync
from trainer.errors import one_line, short
from trainer.parameter_server.cluster import CONTINUE, Cluster
from trainer.parameter_server.collectives import replies
from trainer.parameter_server.work_queue import WorkQueue
from trainer.plain_data import Json, JsonObject, Plain

_SECONDS_BETWEEN_REMINDERS = 10
_AGAIN = 'it may be started again'  # of a lost worker


@dataclasses.dataclass(eq=False)
class _Member:
  """A process that has said hello."""

  connection: messages.MessageConnection
  kind: str  # 'ps' or 'worker'
  index: int
  name: str  # such as 'worker 1'
  process: str  # the name with the host and the process id
  idle: float = 0.0  # seconds without progress, as its last beat reported
  restarts: bool = False  # whether it goes back, and has not said hello again


class Coordinator:
  """Keeps track of the processes of a job and answers their messages.

  The job forms when all have joined; its workers then meet in collective operations, except within
  a pass of an asynchronous mode, whose units they claim.

  Args:
    settings: {name: value}; all processes must have the same.
    host: the address at which the others reach it; UserError if no port of sync.ports is free.
    secret: what all processes know; random by default.
  """

  def __init__(
    self, cluster: Cluster, sync: Sync, settings: Mapping[str, Json], host: str, secret: bytes = b''
  ):
    self._cluster, self._sync = cluster, sync
    # Encoded and decoded, because the settings of the other processes arrive in messages.
    self._settings = messages.decode(messages.encode(dict(settings)))
    self._handlers = {
      'beat': self._on_beat,
      'meet': lambda member, *call: self._calls.update({member.index: call}),
      'enter': lambda member: self._entering.add(member.index),
      'claim': lambda member, *state: self._queue.claim(member.index, *state),
      'give_up': lambda _, why: self._queue.give_up(str(why)),
      'bye': self._on_bye,
      'stop': lambda _, number: self._stop_workers(int(number)),
      'fail': lambda member, text, status: self._fail(member.process, str(text), int(status)),
      'refused': self._on_refused,
    }
    self._lock = threading.RLock()  # guards what follows
    self._ended = threading.Condition(self._lock)
    self._status: int | None = None  # the exit status, once it is known
    self._members: dict[str, _Member] = {}  # by name
    self._generation = 0  # how often the job has formed
    self._forming_since = time.monotonic()
    self._view: list[int] = []  # workers in collectives, ascending; empty while the job forms
    self._calls: dict[int, tuple[str, Plain]] = {}  # the collective that each worker waits in
    self._queue: WorkQueue | None = None  # within a pass of an asynchronous mode
    self._pass_state: Plain = None  # what a worker that enters the pass receives
    self._entering: set[int] = set()  # workers that wait to enter a pass
    self._statuses: dict[int, int] = {}  # exit statuses of the workers that have said goodbye
    self.secret = secret or secrets.token_bytes(32)
    listener = messages.Listener(host, sync.ports, self.secret, sync.lost_peer_seconds, self._serve)
    self.address = listener.address
    threading.Thread(target=self._watch_forming, daemon=True).start()

  def wait(self) -> int:
    """Waits until the job has ended; returns this process's exit status."""
    with self._lock:
      self._ended.wait_for(lambda: self._status is not None)
      members = list(self._members.values())
    for member in members:
      member.connection.close()
    return self._status

  def stop(self, number: int) -> None:
    """Sends all workers a signal to save the state and stop; a signal handler may call it."""
    # In another thread, because the thread that the signal interrupts may hold the lock.
    threading.Thread(target=self._stop_workers, args=[int(number)], daemon=True).start()

  def _stop_workers(self, number: int) -> None:
    with self._lock:
      workers = [m for m in self._members.values() if m.kind == 'worker']
      if not self._view:  # no worker is at work, so there is nothing to save
        self._end('asked to stop before the job has formed', SIGNALLED + number)
      for member in workers:
        member.connection.send(['stop', number])

  # Connections

  def _serve(self, accepted: Connection) -> None:
    """Answers the messages of one process; each process has a thread that runs this."""
    connection = messages.MessageConnection(
      accepted, self._sync.lost_peer_seconds, lambda: ['beat', 0.0]
    )
    member = None
    try:
      while True:
        kind, *rest = connection.receive()
        with self._lock:
          if kind == 'hello':
            member = self._on_hello(connection, *rest)
          elif kind not in self._handlers:
            raise messages.not_understood([kind, *rest])
          elif self._is_current(member) and (kind == 'beat' or not member.restarts):
            self._handlers[kind](member, *rest)
            self._advance()
    except ConnectionError as e:
      with self._lock:
        self._lose(member, str(e))
    except Exception as e:
      with self._lock:
        if member:
          self._fail(member.process, one_line(e), 1)
        else:
          self._cluster.say(f'a process that said no hello is ignored: {one_line(e)}')
    finally:
      if member is None:
        connection.close()

  def _is_current(self, member: _Member | None) -> bool:
    return member is not None and self._members.get(member.name) is member

  def _send(self, workers: Iterable[int], message: list[Plain]) -> None:
    for index in workers:
      member = self._members.get(f'worker {index}')
      if member:
        member.connection.send(message)

  # Processes that join

  def _on_hello(
    self,
    connection: messages.MessageConnection,
    kind: str,
    index: int,
    process: str,
    settings: JsonObject,
  ) -> _Member | None:
    known = {'ps': self._cluster.servers, 'worker': self._cluster.workers}
    if not isinstance(index, int) or not 0 <= index < len(known.get(kind, ())):
      raise ValueError(f"the job has no '{kind} {index}'")
    name = f'{kind} {index}'
    member = _Member(connection, kind, index, name, f'{name} ({process})')
    wrong = self._difference(member, settings)
    if wrong and self._view:  # the job goes on; only this process ends
      connection.send(['end', wrong, 2])
      return None
    if name in self._members and self._members[name].connection is not connection:
      self._lose(self._members[name], 'another process took its place')
    self._members[member.name] = member
    if wrong:
      self._end(wrong, 2)
    elif not self._view:
      self._forming_since = time.monotonic()
      self._form()
    else:
      # A late worker has rank 0 of 1 until the pass that it enters is closed.
      connection.send(['welcome', self._generation, 0, 1, True])
    return member

  def _difference(self, member: _Member, settings: JsonObject) -> str:
    """Describes the first setting in which another process differs from this one; '' if none."""
    for key in sorted(settings.keys() | self._settings.keys()):
      theirs, own = settings.get(key), self._settings.get(key)
      if theirs != own:
        return (
          f'{key}: found {short(theirs)} on {member.name} and {short(own)} on '
          f'{self._cluster.name}; wanted the same command on every process'
        )
    return ''

  def _missing(self) -> list[str]:
    """Returns who must still join before the job can begin; only mode ps waits for lost workers."""
    servers = [f'ps {i}' for i in range(1, len(self._cluster.servers))]
    workers = [f'worker {i}' for i in range(len(self._cluster.workers))]
    if self._generation and self._sync.mode != 'ps':
      workers = [name for name in workers if name in self._members] or workers
    here = {name for name, member in self._members.items() if not member.restarts}
    return [name for name in servers + workers if name not in here]

  def _form(self) -> None:
    """Starts the job if no process is missing; sends each its rank."""
    if self._missing():
      return
    self._generation += 1
    self._view = sorted(m.index for m in self._members.values() if m.kind == 'worker')
    ranks = {'worker': self._view, 'ps': range(len(self._cluster.servers))}
    for member in self._members.values():
      peers = ranks[member.kind]
      place = peers.index(member.index), len(peers)
      member.connection.send(['welcome', self._generation, *place, False])

  def _watch_forming(self) -> None:
    """While the job forms, prints which processes have not joined yet; a thread runs it.

    If a process does not join in time, the job ends, unless it waits for a worker that was lost:
    that one may take any time to restart, and its beats tell if it hangs.
    """
    reminded = time.monotonic()
    while self._status is None:
      time.sleep(min(1, self._sync.lost_peer_seconds / 10))
      with self._lock:
        if self._view or self._status is not None:
          reminded = time.monotonic()
          continue
        waited, missing = time.monotonic() - self._forming_since, self._missing()
        if time.monotonic() - reminded > _SECONDS_BETWEEN_REMINDERS:
          reminded = time.monotonic()
          self._cluster.say(f'waiting for {", ".join(missing)} ({waited:.0f} s)')
        absent = [name for name in missing if name not in self._members]
        if self._generation and self._sync.mode == 'ps' and self._sync.on_lost_worker == 'wait':
          absent = [name for name in absent if name.startswith('ps')]
        if absent and waited > self._sync.lost_peer_seconds:
          self._end_lost(f'{", ".join(absent)} did not come within {waited:.0f} s')

  # Processes that are lost or leave

  def _lose(self, member: _Member | None, why: str) -> None:
    if not self._is_current(member) or self._status is not None:
      return
    del self._members[member.name]
    is_worker = member.kind == 'worker'
    if is_worker and member.index in self._statuses:
      return  # it has said goodbye
    text = f'{member.process} was lost: {why}'
    # If it was only silent, it must not wait for answers that will not come.
    member.connection.send(['end', f'{text}. This process ends; {_AGAIN}', EXIT_STATUS])
    in_steps = self._sync.mode == 'ps'
    may_go_on = not in_steps or self._sync.on_lost_worker == 'wait'
    if not self._view:
      self._cluster.say(text)
      self._form()
    elif not is_worker or not may_go_on or self._statuses:
      self._end_lost(text)
    elif self._queue or member.index not in self._view:
      self._do_without(member.index, text)
    elif in_steps:
      self._send_back(f'{text}. All go back to the last checkpoint when it is here again')
    else:
      self._send_back(f'{text}. The others go on from the last checkpoint; {_AGAIN}')

  def _do_without(self, index: int, text: str) -> None:
    self._entering.discard(index)
    self._calls.pop(index, None)
    if self._queue:
      self._queue.leave(index)
      if not self._queue.workers:
        self._end_lost(f'{text}; no worker is left')
        return
    text += f'. The others go on; {_AGAIN}'
    self._cluster.say(text)
    self._send(self._workers(), ['note', text])
    self._advance()

  def _send_back(self, text: str) -> None:
    """Restarts all workers at the last checkpoint; the job forms again once they have joined."""
    self._cluster.say(text)
    for member in self._members.values():
      if member.kind == 'worker':
        member.connection.send(['restart', text])
        member.restarts = True
    self._view, self._forming_since = [], time.monotonic()
    self._calls, self._queue, self._entering, self._statuses = {}, None, set(), {}

  def _on_beat(self, member: _Member, idle: float) -> None:
    member.idle = idle
    # While the job forms, the others wait for those that restart.
    at_work = [m for m in self._members.values() if self._view or m.restarts]
    if idle > self._sync.stalled_peer_seconds and member in at_work:
      # All are idle because they wait for the process that has been idle for longest.
      worst = max(at_work, key=lambda m: m.idle)
      self._lose(worst, f'it beats but has made no progress for {worst.idle:.0f} s')

  def _on_bye(self, member: _Member, status: int) -> None:
    self._statuses[member.index] = int(status)
    if self._statuses.keys() >= set(self._workers()) and self._status is None:
      worst = max(self._statuses.values())
      self._finish(worst, ['finish', worst])

  def _on_refused(self, member: _Member, text: str) -> None:
    if self._statuses:
      self._fail(member.process, text, 1)
    elif self._view:  # else all workers are going back already
      self._send_back(f'{member.process} failed: {text}. All go back to the last checkpoint')

  def _fail(self, who: str, text: str, status: int) -> None:
    is_plain = status == 2 or status > SIGNALLED  # a user's mistake or wish
    self._end(text if is_plain else f'{who} failed: {text}. The job ends; {CONTINUE}.', status)

  def _end_lost(self, text: str) -> None:
    self._end(f'{text}. The job ends; {CONTINUE}.', EXIT_STATUS)

  def _end(self, text: str, status: int) -> None:
    """Prints the text and ends all processes; only the first call has an effect."""
    if self._status is None:
      self._cluster.say(text, status)
      self._finish(status, ['end', text, status])

  def _finish(self, status: int, message: list[Plain]) -> None:
    for member in self._members.values():
      member.connection.send(message)
    self._status = status
    self._ended.notify_all()

  # Collectives and work

  def _workers(self) -> list[int]:
    """Returns the numbers of the workers that take part in collectives now."""
    return self._queue.workers if self._queue else self._view

  def _advance(self) -> None:
    """Sends the replies that are due now, to collectives, to `enter` and to claims of units."""
    workers = self._workers()
    if workers and self._calls.keys() >= set(workers):
      calls = {worker: self._calls.pop(worker) for worker in workers}
      answers = replies(calls)
      kind, value = calls[workers[0]]
      if kind == 'open_pass':
        work, self._pass_state = value
        self._queue = WorkQueue(self._view, **work, max_ahead=self._sync.max_staleness)
      elif kind == 'close_pass':
        answers = {index: [*place, self._queue.given_up] for index, place in answers.items()}
        self._view, self._queue = self._queue.workers, None
      for index, answer in answers.items():
        self._send([index], ['reply', answer])
    if self._queue:
      entering = [] if self._queue.is_over else sorted(self._entering)
      for index in entering:
        self._queue.enter(index)
        self._send([index], ['reply', self._pass_state])
        self._cluster.say(f'worker {index} is here again')
      self._entering.difference_update(entering)
      for index, claimed in self._queue.hand_out().items():
        self._send([index], ['reply', list(claimed)])
