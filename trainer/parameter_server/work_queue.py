"""Hands out the units of work of a pass to the workers that train on them."""

from collections.abc import Iterable
from typing import NamedTuple


class Claimed(NamedTuple):
  """The answer to a worker that asks for work."""

  unit: int | None  # None: no work is left
  # Why no work is left: the pass ends ('end'), or workers stop ('stop') or save a checkpoint
  # ('save'). Or 'merge': the worker must merge, and ask again.
  reason: str | None = None
  batches: int = 0  # if no work is left: the number of batches of the pass that are done


_MERGE = Claimed(None, 'merge')


class WorkQueue:
  """Hands out each unit of a pass once, and again if the worker that held it was lost.

  Unit u is slice u % slices of batch u // slices. A worker holds the units whose changes the
  servers do not have yet: the one that it works on and, in mode ps_geo, those since its last merge.
  The work ends after a whole batch: at the end of the pass, or earlier for a checkpoint or a stop.

  Args:
    workers: the numbers of the workers that begin the pass.
    first, total: the first unit to hand out, and the number of units in the whole pass.
    pause_after: after how many units to pause for a checkpoint; None: do not pause.
    max_ahead: how many more units a worker may have done than the slowest one; None: any number.
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
    self._done = dict.fromkeys(workers, 0)  # worker -> how many units it has done
    self._held: dict[int, list[int]] = {}  # worker -> units
    self._working: set[int] = set()  # workers that work on the last unit that they hold
    self._returned: list[int] = []  # units that lost workers held
    self._waiting: set[int] = set()  # workers that asked for work
    self.is_over = False
    self.given_up: str | None = None  # why a worker has ended the work, though some is left

  @property
  def workers(self) -> list[int]:
    return sorted(self._done)

  def enter(self, worker: int) -> None:
    """Adds a worker, and counts it as having done as many units as the slowest worker."""
    self._done[worker] = self._slowest()

  def leave(self, worker: int) -> None:
    """Removes a lost worker; the units that it held will be handed out again."""
    self._done.pop(worker, None)
    self._waiting.discard(worker)
    self._working.discard(worker)
    self._returned += self._held.pop(worker, [])

  def claim(self, worker: int, stop: bool, save: bool, is_merged: bool = True) -> None:
    """Records that a worker has done its last unit and asks for another one, a stop or a save.

    `is_merged` says whether the servers have the changes of all units that it has done.
    """
    if worker in self._working:
      self._working.remove(worker)
      self._done[worker] += 1
    if is_merged:
      self._held.pop(worker, None)
    if stop or (save and self._reason == 'end'):
      limit = min(self._limit, self._whole(self._next))
      if stop or limit < self._limit:
        self._limit, self._reason = limit, 'stop' if stop else 'save'
    self._waiting.add(worker)

  def give_up(self, why: str) -> None:
    """Ends the work at once. What workers have not merged yet is not handed out again."""
    self.given_up = self.given_up or why
    self._limit, self._returned, self._held = self._next, [], {}

  def hand_out(self) -> dict[int, Claimed]:
    """Answers the claims that can be answered now; returns {worker: answer}."""
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
      self._held.setdefault(worker, []).append(unit)
      self._working.add(worker)
      answers[worker] = Claimed(unit)
    # While others hold units, a worker waits: if one of them is lost, its units come back.
    if not self._has_work():
      answers |= dict.fromkeys(self._waiting & self._held.keys() - answers.keys(), _MERGE)
      if not self._held:
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
