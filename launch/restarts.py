"""Runs the ranks of a job, and starts them again when one is lost.

`python launch/restarts.py RESTARTS MIN_RANKS HOST:SLOTS,… INTERFACE COMMAND…`

The job continues from its last checkpoint on the hosts that then answer, those that have come back
included, if they have slots for MIN_RANKS ranks. The first restart comes after CTR_RESTART_SECONDS
(5), each next one after twice as long, 300 seconds at most. If a rank ends with SIGTERM's status
though nobody has asked this process to stop, its host is being taken away: the rank counts as lost.
Every other status, such as that of a user's mistake, ends the job.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import ranks

_LONGEST_PAUSE = 300.0
_LOST = 3  # the status of a rank that has lost another one


class Job:
  """A job whose ranks may be started several times.

  Args:
    restarts: the most times that they are started again.
    min_ranks: they are not started again with fewer ranks than this.
    hosts: as in `a:2,b:2`, each with its number of ranks.
    interface: the network interface between the hosts; '' finds it.
    command: what each rank runs.
  Raises:
    ValueError: if CTR_RESTART_SECONDS is not a time.
  """

  def __init__(
    self, restarts: int, min_ranks: int, hosts: str, interface: str, command: Sequence[str]
  ):
    self._restarts, self._min_ranks = restarts, min_ranks
    self._interface, self._command = interface, command
    entries = (entry.rpartition(':') for entry in hosts.split(','))
    self._slots = {host: int(n) for host, _, n in entries}
    self._pause = float(os.environ.get('CTR_RESTART_SECONDS', 5))
    if not 0 <= self._pause < math.inf:
      raise ValueError
    self._ranks: ranks.Ranks | None = None
    self._stopped = False

  def stop(self, number: int, *_: object) -> None:
    """Passes a signal on to the ranks; without ranks there is nothing to save."""
    self._stopped = True
    if self._ranks is None:
      sys.exit(128 + number)
    self._ranks.stop(number)

  def run(self) -> int:
    """Runs the job, with restarts; returns the exit status of the ranks that were started last."""
    status = self._start(self._slots)
    pause = self._pause
    for restart in range(1, self._restarts + 1):
      if self._stopped or not (status == _LOST or status > 128):
        break
      time.sleep(pause)
      pause = min(2 * pause, _LONGEST_PAUSE)
      answering = set(ranks.answering(self._slots))
      slots = {host: n for host, n in self._slots.items() if host in answering}
      silent = ', '.join(host for host in self._slots if host not in answering)
      size, hosts = sum(slots.values()), ', '.join(slots) or 'no host'
      line = f'restart {restart} of {self._restarts}: {size} ranks on {hosts}'
      line += f'; no answer from {silent}' if silent else ''
      if size < self._min_ranks:
        line += f'; wanted at least {self._min_ranks} ranks'
      ranks.say(line)
      if size >= self._min_ranks:
        status = self._start(slots)
    return status

  def _start(self, slots: Mapping[str, int]) -> int:
    self._ranks = ranks.Ranks(slots, self._interface, self._command)
    try:
      return self._ranks.wait()
    finally:
      self._ranks = None


if __name__ == '__main__':
  restarts, min_ranks, hosts, interface, *command = sys.argv[1:]
  try:
    job = Job(int(restarts), int(min_ranks), hosts, interface, command)
  except ValueError:
    found = os.environ['CTR_RESTART_SECONDS']
    sys.stderr.write(f"CTR_RESTART_SECONDS: found '{found}'; wanted a number of seconds >= 0\n")
    sys.exit(2)
  for number in signal.SIGTERM, signal.SIGINT:
    signal.signal(number, job.stop)
  sys.exit(job.run())
