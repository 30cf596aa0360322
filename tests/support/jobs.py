"""Small jobs of several ranks, for tests that stop them, freeze them or disturb them."""

import contextlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import psutil
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

from tests.support import commands, small
from tests.support.commands import ROOT  # noqa: F401


def write_config(folder: str, samples: int = 5000, **sections: Mapping[str, Any]) -> str:
  """Writes a log of one pass and the config of a job that trains on it for ever.

  Args:
    folder: where both go.
    samples: of the pass.
    **sections: keys of the config that differ, by section.
  Returns:
    The config's path.
  """
  lines = [f'{i % 97},{i % 89},{i % 3 == 0:d}\n' for i in range(samples)]
  pathlib.Path(f'{folder}/day_0.csv').write_text('user,item,click\n' + ''.join(lines))
  tree = small.tree(
    data={'train': [f'{folder}/day_*.csv'], 'label': 'click'},
    model={'interactions': ['linear', 'fm']},
    train={'batch_size': 64, 'epochs': 100_000, 'log_every_steps': 5},
    checkpoint={'every_passes': None},
  )
  return small.write(f'{folder}/config.yaml', tree, **sections)


class Ranks(contextlib.AbstractContextManager):
  """The ranks of one job on this machine, started one by one, as horovodrun would start all.

  When the `with` block ends, so does all that still runs.

  Args:
    size: the number of ranks.
    flags: of trainer.run.
  Attributes:
    processes: by rank, those that were started.
    rendezvous: the URL of the key-value store that horovodrun would run.
  """

  def __init__(self, size: int, flags: Sequence[str]):
    self._flags, self._slots = flags, get_host_assignments(parse_hosts(f'localhost:{size}'), size)
    self._store = RendezvousServer()
    self._port = self._store.start()
    self._store.init(self._slots)
    self.rendezvous = f'http://127.0.0.1:{self._port}'
    self._folder = tempfile.mkdtemp()
    self.processes: dict[int, commands.Command] = {}

  def start(
    self,
    rank: int,
    program: Sequence[str] = ('-m', 'trainer.run'),
    env: Mapping[str, str] | None = None,
    stdout: IO | int | None = None,
  ) -> commands.Command:
    """Starts a rank.

    Args:
      rank: its number.
      program: what Python runs with the flags.
      env: variables that it has besides.
      stdout: where its output goes; by default `output` has it.
    """
    env = {'CTR_THREADS': '1'} | (env or {}) | create_slot_env_vars(self._slots[rank])
    env |= create_run_env_vars('127.0.0.1', ['lo'], str(self._port))
    with open(self._log(rank), 'wb') as log:
      self.processes[rank] = commands.start(
        *program, *self._flags, env=env, stdout=stdout or log, stderr=subprocess.STDOUT
      )
    return self.processes[rank]

  def _log(self, rank: int) -> str:
    return f'{self._folder}/rank_{rank}.log'

  def output(self, rank: int) -> str:
    """What a rank has said so far."""
    return pathlib.Path(self._log(rank)).read_text()

  def wait(self, rank: int, seconds: float = 120) -> int:
    """Returns the status of a rank, which must end within so many seconds."""
    return self.processes[rank].wait(seconds)

  def __exit__(self, *_: object) -> None:
    for process in self.processes.values():
      process.kill()
      process.wait()
    self._store.stop()


def run(size: int, module: str, *flags: str) -> str:
  """Runs a command on so many ranks. Returns: what rank 0 said.

  Raises:
    AssertionError: where a rank does not end with status 0.
  """
  with Ranks(size, flags) as ranks:
    for rank in range(size):
      ranks.start(rank, ('-m', module))
    statuses = [ranks.wait(rank, 300) for rank in range(size)]
    said = [ranks.output(rank) for rank in range(size)]
  assert not any(statuses), (statuses, said)
  return said[0]


def seen_by_others() -> str:
  """Returns the command lines of all processes, as another user sees them."""
  nobody = {'user': 65534, 'group': 65534, 'extra_groups': []} if os.geteuid() == 0 else {}
  ps = ['ps', '-ww', '-eo', 'args']
  return subprocess.run(ps, capture_output=True, text=True, check=True, cwd='/', **nobody).stdout


def ranks_below(launcher: int) -> dict[int, psutil.Process]:
  """Returns the processes by rank that the launcher with this process id started."""
  found = {}
  for process in psutil.Process(launcher).children(recursive=True):
    with contextlib.suppress(psutil.Error):
      rank = process.environ().get('HOROVOD_RANK')
      # Below a shell; and above what it starts itself, which comes later.
      program = os.path.basename((process.cmdline() or [''])[0])
      if rank is not None and program.startswith('python'):
        found.setdefault(int(rank), process)
  return found
