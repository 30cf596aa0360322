"""`python -m tests.support.killed_starts CONFIG FOLDER`: kills each process of a parameter-server
job at each stage of its start, in a job of its own, and prints a line of JSON on each.

The jobs are forked from this process, which has imported everything, so that they start in no time.
"""

import json
import os
import signal
import sys
import time

from campaigns.processes import Fault
from campaigns.units import command, fork, killed_in_the_end, text_of, wait
from tests.support.parameter_servers import free_addresses
from trainer.parameter_server import run  # noqa: F401 before the forks

SECONDS = 100  # in which a job must end
AT_ONCE = 5  # jobs
NAMES = 'ps 0', 'ps 1', 'worker 0'
PUBLISHES, FINDS = 'parameter_server/run.py:_publish', 'parameter_server/run.py:_connect'
# By the stage, the function at whose call each process is killed.
STAGES = {
  'before its first line': dict.fromkeys(NAMES, 'parameter_server/run.py:run'),
  'after it has bound its port': {'ps 0': PUBLISHES, 'ps 1': FINDS, 'worker 0': FINDS},
  'before the first step': {
    'ps 0': 'parameter_server/coordinator.py:Coordinator.wait',
    'ps 1': 'parameter_server/client.py:CoordinatorClient.wait',
    'worker 0': 'job/stream.py:Stream.next',
  },
}


def start(config: str, folder: str, killed: str, place: str) -> dict[str, int]:
  """Starts a job of which one process kills itself at a place. Returns: the processes by name."""
  os.makedirs(folder)
  addresses = free_addresses(3)
  cluster = {'ps': addresses[:2], 'worker': addresses[2:]}
  train = command('trainer.run', '--config', config, '--run_dir', f'{folder}/run')

  def begin(name: str) -> None:
    kind, index = name.split()
    task = {'type': kind, 'index': int(index)}
    os.environ['TF_CONFIG'] = json.dumps({'cluster': cluster, 'task': task})
    if name == killed:
      Fault(signal.SIGKILL, sys.maxsize, place).arm()
    train()

  return {name: fork(lambda name=name: begin(name), f'{folder}/{name}.log') for name in NAMES}


def main(config: str, folder: str) -> None:
  cases = [(stage, *one) for stage, places in STAGES.items() for one in places.items()]
  for first in range(0, len(cases), AT_ONCE):
    jobs = []
    for stage, killed, place in cases[first : first + AT_ONCE]:
      own = f'{folder}/{stage} {killed}'
      jobs.append((stage, killed, own, start(config, own, killed, place)))
    deadline = time.monotonic() + SECONDS
    with killed_in_the_end([pid for *_, pids in jobs for pid in pids.values()]):
      for stage, killed, own, pids in jobs:
        ends = {name: wait(pid, max(0, deadline - time.monotonic())) for name, pid in pids.items()}
        said = {name: text_of(f'{own}/{name}.log') for name in pids}
        print(json.dumps([stage, killed, ends, said]), flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
