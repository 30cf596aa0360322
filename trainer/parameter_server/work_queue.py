"""The units of work of a pass, and which worker trains on which."""

from collections.abc import Iterable
from typing import NamedTuple


class Claimed(NamedTuple):
  """What a worker gets when it asks for work."""

  unit: int | None  # None: no work is left
  reason: str | None = None  # then why: 'end' of the pass, 'stop', or 'save' for a checkpoint
  batches: int = 0  # and how many batches of the pass are done


class WorkQueue:
  """Hands out the units of a pass, so that each is trained on once.

  Unit u is slice u % slices of batch u // slices. The work ends at a whole batch: at the end of the
  pass, or before it, where the workers pause for a checkpoint or were asked to stop.

  Args:
    workers: those that ask for work.
    slices: of a batch.
    first: the first unit.
    total: the number of units of the whole pass.
    pause_after: pause for a checkpoint after so many units; None: do not.
    max_ahead: how many units a worker may be ahead of the slowest; None: any number.
  Attributes:
    is_over: whether no work is left, and all of it is done.
  """

  def __init__(
    self,
    workers: Iterable[int],
    *,
    slices: int,
    first: int,
    total: int,
    pause_after: int | None = None,
    max_ahead: int | None = None,
  ):
    self._slices, self._max_ahead = slices, max_ahead
    self._next = first
    self._limit = total if pause_after is None else min(total, first + self._whole(pause_after))
    self._reason = 'end' if self._limit == total else 'save'
    self._done = dict.fromkeys(workers, 0)  # units, by worker
    self._held: dict[int, int] = {}  # units under way, by worker
    self._returned: list[int] = []  # units that lost workers held
    self._waiting: set[int] = set()  # workers that asked for work
    self.is_over = False

  @property
  def workers(self) -> list[int]:
    """The workers that share the pass, ascending."""
    return sorted(self._done)

  def enter(self, worker: int) -> None:
    """Lets a worker share the rest of the pass; it counts as even with the slowest."""
    self._done[worker] = self._slowest()

  def leave(self, worker: int) -> None:
    """Goes on without a worker that was lost; its unit is handed out again."""
    self._done.pop(worker, None)
    self._waiting.discard(worker)
    if worker in self._held:
      self._returned.append(self._held.pop(worker))

  def claim(self, worker: int, stop: bool, save: bool) -> None:
    """Notes that a worker has done its last unit and asks for another.

    Args:
      worker: which one.
      stop: whether it was asked to stop; all then stop at the next whole batch.
      save: whether it wants a checkpoint; all then pause there.
    """
    if self._held.pop(worker, None) is not None:
      self._done[worker] += 1
    if stop or (save and self._reason == 'end'):
      limit = min(self._limit, self._whole(self._next))
      if stop or limit < self._limit:
        self._limit, self._reason = limit, 'stop' if stop else 'save'
    self._waiting.add(worker)

  def hand_out(self) -> dict[int, Claimed]:
    """Returns what the workers that asked get now, by worker; the others go on waiting."""
    answers = {}
    slowest = self._slowest()
    for worker in sorted(self._waiting):
      if not self._has_work():
        break
      if self._max_ahead is not None and self._done[worker] - slowest >= self._max_ahead:
        continue
      if self._returned:
        unit = self._returned.pop()
      else:
        unit, self._next = self._next, self._next + 1
      self._held[worker] = unit
      answers[worker] = Claimed(unit)
    # A worker that finds no work waits while others hold units: these may be returned.
    if not self._has_work() and not self._held:
      self.is_over = True
      over = Claimed(None, self._reason, self._limit // self._slices)
      answers = dict.fromkeys(self._waiting, over)
    self._waiting -= answers.keys()
    return answers

  def _has_work(self) -> bool:
    return bool(self._returned) or self._next < self._limit

  def _slowest(self) -> int:
    return min(self._done.values(), default=0)

  def _whole(self, units: int) -> int:
    """Returns `units`, rounded up to whole batches."""
    return -(-units // self._slices) * self._slices
