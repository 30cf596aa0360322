"""`python -m tests.support.odd_calls FOLDER SEED COUNT`: calls commands with odd values of
their flags and of the environment variables that the trainer reads, and with few descriptors.

It draws so many of all such calls, and prints a line of JSON on each.

Commands are forked from this process, which has imported everything, so that they start in no time.
"""

import json
import os
import pathlib
import random
import re
import resource
import socket
import sys
from collections.abc import Iterator
from typing import NamedTuple

from campaigns.units import command, fork, killed_in_the_end, text_of, wait
from tests.support import commands, jobs
from trainer.job import job  # noqa: F401 before the forks

SECONDS = 60  # that a call may take
AT_ONCE = 6
ODD = (
  b'',
  b' ',
  b'\xff',
  b'a\nb',
  b'-1',
  b'nan',
  b'99999999999999999999',
  b'{',
  b'[',
  b'%s',
  b'/dev/null',
  b'/proc/nowhere',
  b'a=b',
  'é\u202e'.encode(),
  b'x' * 5000,
)
VARIABLES = (
  'CTR_SECRET_FILE',
  'CTR_TERMINAL',
  'CTR_THREADS',
  'HOROVOD_CYCLE_TIME',
  'HOROVOD_GLOO_IFACE',
  'HOROVOD_GLOO_RENDEZVOUS_ADDR',
  'HOROVOD_GLOO_RENDEZVOUS_PORT',
  'HOROVOD_GLOO_TIMEOUT_SECONDS',
  'HOROVOD_LOCAL_RANK',
  'HOROVOD_LOCAL_SIZE',
  'HOROVOD_RANK',
  'HOROVOD_SIZE',
  'OMPI_COMM_WORLD_SIZE',
  'PMI_SIZE',
  'TF_CONFIG',
)
# Of a rank that waits in vain for another.
RANK = {
  'HOROVOD_SIZE': '2',
  'HOROVOD_RANK': '1',
  'HOROVOD_LOCAL_SIZE': '2',
  'HOROVOD_LOCAL_RANK': '1',
  'HOROVOD_GLOO_RENDEZVOUS_ADDR': '127.0.0.1',
  'HOROVOD_GLOO_RENDEZVOUS_PORT': '9',
}


DESCRIPTORS = 8, 16, 24, 32, 64


class Call(NamedTuple):
  """A call of a command, with what is odd about it."""

  name: str
  arguments: list[str]
  variables: dict[bytes, bytes] = {}
  descriptors: int = 1024


def right_calls(folder: str, taken_port: int) -> list[Call]:
  """Returns one call of each command that ends by itself, the training first."""
  config = jobs.write_config(folder, 200, train={'epochs': 1}, sync={'lost_peer_seconds': 1})
  run, log = ['--run_dir', f'{folder}/run'], f'{folder}/day_0.csv'
  return [
    Call('run', ['--config', config, *run]),
    Call('export', [*run, '--kind', 'base']),
    Call('evaluate', [*run, '--data', log]),
    Call('inspect', ['--run_dir', f'{folder}/run']),
    Call('predict', [*run, '--data', log, '--out', f'{folder}/scores.csv']),
    Call('prepare', ['--config', config, '--out', f'{folder}/prepared']),
    Call('publish', [*run, '--once', '--to', f'{folder}/store']),
    Call('report', [f'{folder}/run']),
    Call('serve', [*run, '--port', str(taken_port)]),
    Call('synthesize', ['--out', f'{folder}/made', '--days', '1', '--samples_per_day', '50']),
  ]


def odd_calls(right: list[Call]) -> Iterator[Call]:
  for name, arguments, *_ in right:
    path = commands.module(name).replace('.', '/') + '.py'
    source = pathlib.Path(jobs.ROOT, path).read_text()
    for flag in re.findall(r"flags\.DEFINE_\w+\(\s*'(\w+)'", source):
      for value in ODD:
        yield Call(name, [*arguments, f'--{flag}={os.fsdecode(value)}'])
    for value in ODD:
      yield Call(name, [*arguments, os.fsdecode(value)])
      for variable in VARIABLES:
        rank = RANK if variable in RANK else {}
        given = {k.encode(): v.encode() for k, v in rank.items()}
        yield Call(name, arguments, given | {variable.encode(): value})
    for count in DESCRIPTORS:
      yield Call(name, arguments, descriptors=count)


def known(right: list[Call]) -> list[Call]:
  """Returns calls that once ended in a stack trace."""
  by_name = {call.name: call for call in right}
  rank = {k.encode(): v.encode() for k, v in RANK.items()}
  return [
    by_name['run']._replace(variables=rank | {b'HOROVOD_GLOO_RENDEZVOUS_PORT': b'http'}),
    by_name['run']._replace(variables=rank | {b'HOROVOD_GLOO_RENDEZVOUS_ADDR': b'a b'}),
    by_name['publish']._replace(arguments=[*by_name['publish'].arguments, '--to=\udcff']),
    by_name['report']._replace(arguments=[*by_name['report'].arguments, '--out=/proc/nowhere']),
    by_name['synthesize']._replace(arguments=['--out=.', '--users=99999999999999999999']),
    *(call._replace(descriptors=8) for call in right),
    *(
      by_name['run']._replace(
        arguments=[*by_name['run'].arguments, '--run_dir=new'], descriptors=count
      )
      for count in DESCRIPTORS
    ),
  ]


def start(call: Call, log: str) -> int:
  """Starts a call in a process of its own. Returns: its id."""

  def action() -> None:
    os.chdir(os.path.dirname(log))
    os.environb.update(call.variables)
    begin = command(commands.module(call.name), *call.arguments)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
    resource.setrlimit(resource.RLIMIT_NOFILE, (call.descriptors, call.descriptors))
    begin()

  return fork(action, log)


def main(folder: str, seed: str, count: str) -> None:
  with socket.create_server(('127.0.0.1', 0)) as taken:
    right = right_calls(folder, taken.getsockname()[1])
    calls = [
      *right,
      *known(right),
      *random.Random(int(seed)).sample(list(odd_calls(right)), int(count)),
    ]
    running: list[tuple[Call, str, int]] = []
    for i, call in enumerate(calls):
      log = f'{folder}/{i}/log'
      os.makedirs(os.path.dirname(log))
      running.append((call, log, start(call, log)))
      if i < len(right) or len(running) == AT_ONCE or i + 1 == len(calls):
        with killed_in_the_end([pid for *_, pid in running]):
          for of, path, pid in running:
            status = wait(pid, SECONDS)
            told = {k.decode(): repr(v) for k, v in of.variables.items()}
            arguments = [
              os.fsencode(a).decode(errors='backslashreplace')[:200] for a in of.arguments
            ]
            print(
              json.dumps([of.name, arguments, told, of.descriptors, status, text_of(path)]),
              flush=True,
            )
        running.clear()


if __name__ == '__main__':
  main(*sys.argv[1:])
