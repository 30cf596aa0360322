"""Runs horovodrun so that a job can be stopped and ends with the status of its ranks.

By itself, horovodrun kills its ranks on SIGTERM before they can save their state, and reports every
failure with status 1 and its own stack trace. Here SIGTERM and SIGINT go to rank 0, which stops the
job on all ranks; a second signal ends horovodrun. The exit status is that of the rank that ended
first. Messages about the ranks that horovodrun ends after that are not shown. Lines of rank 0 are
printed as they are, lines of other ranks with horovodrun's prefix.

Each job has a secret, by which its ranks authenticate. A file on each host holds it, which only
this user can read; CTR_SECRET_FILE is its name. (An environment variable would appear in the
command lines of horovodrun's shells.) If all ranks are on this host, horovodrun's key-value store
listens on loopback.
"""

import concurrent.futures
import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import BinaryIO

_OF_A_RANK = re.compile(rb'\[\d+\]<std(out|err)>:')
_OF_RANK_0 = re.compile(rb'^\[0\]<std(out|err)>:')
# The last is a shell's message about a rank that horovodrun ended because of another one.
_CONSEQUENCE = re.compile(
  rb'Process \d+ exit with status|Terminating remaining workers|\[\d+\]<stderr>:Terminated\s*$'
)
_FIRST_TO_END = re.compile(r'exited with non-zero.*Process name: (\d+)\s+Exit code: (\d+)', re.S)
_TOLD = 2, 130, 143  # with these, the ranks have printed why they ended


class Ranks:
  """The ranks of one job.

  Args:
    command: the whole command line of horovodrun.
  """

  def __init__(self, command: Sequence[str]):
    hosts = [entry.split(':')[0] for entry in command[command.index('-H') + 1].split(',')]
    self._host = hosts[0]
    self._remote_hosts = [host for host in dict.fromkeys(hosts) if not _is_this_host(host)]
    of_this_python = os.path.join(os.path.dirname(sys.executable), command[0])
    if not self._remote_hosts and shutil.which(command[0]) == of_this_python:
      command = [sys.executable, f'{os.path.dirname(__file__)}/loopback.py', *command[1:]]
      if '--network-interfaces' in command:  # loopback is none of those between the hosts
        at = command.index('--network-interfaces')
        del command[at : at + 2]
    self._job = secrets.token_hex(8)
    self._secret_file = f'/tmp/ctr-{self._job}'
    self._make_secret()
    self._asked = False
    self._trace = b''  # horovodrun's own stack trace
    own = {'CTR_JOB': self._job, 'CTR_SECRET_FILE': self._secret_file}
    own['CTR_TERMINAL'] = str(int(sys.stdout.isatty()))
    self._process = subprocess.Popen(
      command,
      env=os.environ | own,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      start_new_session=True,  # a terminal's Ctrl-C is for this process alone
      preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM),  # if this process is killed
    )

  def stop(self, number: int, *_: object) -> None:
    """Asks the job to stop; a second call ends horovodrun."""
    if self._asked or not self._signal_rank_0(number):
      self._process.terminate()
    self._asked = True

  def _signal_rank_0(self, number: int) -> bool:
    """Sends a signal to rank 0; returns whether rank 0 was there."""
    pids = (
      f"grep -lsz '^CTR_JOB={self._job}$' /proc/[0-9]*/environ | "
      "xargs -r grep -lsz '^HOROVOD_RANK=0$' | tr -dc '0-9\\n'"
    )
    return _run_on(self._host, f'kill -{number:d} $({pids})').returncode == 0

  def _make_secret(self) -> None:
    secret = secrets.token_hex(32)
    # `set -C` does not overwrite another user's file. A host may have two names.
    script = (
      f'umask 077; set -C; secret=$(cat); [ "$(cat {self._secret_file} 2>&1)" = "$secret" ] || '
      f'printf %s "$secret" >{self._secret_file}'
    )
    for host in [socket.gethostname(), *self._remote_hosts]:
      done = _run_on(host, script, secret)
      if done.returncode:
        self._remove_secret()
        sys.exit(f'{host}: cannot write {self._secret_file}: {done.stderr.decode().strip()}')

  def _remove_secret(self) -> None:
    for host in [socket.gethostname(), *self._remote_hosts]:
      with contextlib.suppress(subprocess.TimeoutExpired):  # the host may be gone
        _run_on(host, f'rm -f {self._secret_file}')

  def wait(self) -> int:
    """Shows the job's output until it ends; returns its exit status."""
    outputs = (self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer)
    threads = [threading.Thread(target=self._forward, args=pair, daemon=True) for pair in outputs]
    for thread in threads:
      thread.start()
    status = self._process.wait()
    self._remove_secret()
    for thread in threads:
      thread.join()
    first = _FIRST_TO_END.search(self._trace.decode(errors='replace'))
    if first is None:
      sys.stderr.buffer.write(self._trace)
      return status if status >= 0 else 128 - status
    if int(first[2]) not in _TOLD:
      sys.stderr.write(f'rank {first[1]} ended first, with status {first[2]}\n')
    return int(first[2])

  def _forward(self, source: BinaryIO, to: BinaryIO) -> None:
    rest = b''
    while chunk := source.read1(1 << 16):
      # A carriage return ends a line too: the live line uses it.
      *lines, rest = re.split(rb'(?<=[\r\n])', rest + chunk)
      for line in lines:
        if _CONSEQUENCE.match(line):
          continue
        if not _OF_A_RANK.match(line) and (self._trace or line.startswith(b'Traceback ')):
          self._trace += line
        else:
          self._show(_OF_RANK_0.sub(b'', line), to)
    self._show(rest, to)

  def _show(self, line: bytes, to: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # its reader is gone, or the disk is full: the job goes on
      to.write(line)
      to.flush()


def answering(hosts: Iterable[str]) -> list[str]:
  """Returns the hosts on which a command can be run now."""

  def answers(host: str) -> bool:
    try:
      return _run_on(host, 'true').returncode == 0
    except subprocess.TimeoutExpired:
      return False

  hosts = list(hosts)
  with concurrent.futures.ThreadPoolExecutor(32) as pool:
    return [host for host, there in zip(hosts, pool.map(answers, hosts)) if there]


def _run_on(host: str, script: str, text: str = '') -> subprocess.CompletedProcess:
  shell = ['sh', '-c']
  if not _is_this_host(host):
    options = 'BatchMode=yes', 'StrictHostKeyChecking=no', 'ConnectTimeout=10'
    shell = ['ssh', *(f'-o{option}' for option in options), host]
  arguments, stdin = [*shell, script], text.encode()
  return subprocess.run(arguments, input=stdin, stderr=subprocess.PIPE, timeout=30, check=False)


def _is_this_host(name: str) -> bool:
  return name in ('localhost', '127.0.0.1', socket.gethostname())
