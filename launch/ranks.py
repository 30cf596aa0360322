"""Runs horovodrun so that a job can be stopped and ends with the status of its ranks.

By itself, horovodrun kills its ranks on SIGTERM before they can save their state, and reports every
failure with status 1 and its own stack trace. Here SIGTERM and SIGINT go to rank 0, which stops the
job on all ranks; a second signal ends horovodrun. The exit status is that of the rank that ended
first. Messages about the ranks that horovodrun ends after that are not shown. Lines of rank 0 are
printed as they are, lines of other ranks with horovodrun's prefix.

Each job has a directory on each of its hosts that only this user can read. It holds the job's
secret, by which its ranks authenticate (CTR_SECRET_FILE is the file's name), and the variables that
ranks on other hosts get. A shell on each host removes it when this process ends, killed or not.
"""

import concurrent.futures
import contextlib
import ctypes
import fnmatch
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO

import psutil

# What ranks on several hosts get of this environment. CTR_EXPORT names more, with spaces.
_HANDED_OVER = """
  HOME LANG LC_* LOGNAME PATH SHELL TERM TMPDIR TZ USER
  PYTHON* VIRTUAL_ENV CONDA_PREFIX LD_* MALLOC_* OMP_* KMP_* MKL_* OPENBLAS_*
  CTR_* TF_* XLA_* GRPC_* HOROVOD_* GLOO_* NCCL_* CUDA_* NVIDIA_*
  AWS_* GOOGLE_* CLOUDSDK_* ARROW_* HADOOP_* LIBHDFS_* JAVA_HOME CLASSPATH KRB5*
  MLFLOW_* DATABRICKS_*
  *_proxy *_PROXY SSL_CERT_* REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
_OF_THIS_HOST = 'CUDA_VISIBLE_DEVICES', 'SSH_AUTH_SOCK'  # other hosts have their own
STORE_TOKEN = 'CTR_STORE_TOKEN'  # the variable by which horovodrun.py gets the store's token

_HOST_KEYS = os.environ.get('CTR_STRICT_HOST_KEYS', 'no')
_OPTIONS = 'BatchMode=yes', 'ConnectTimeout=10', f'StrictHostKeyChecking={_HOST_KEYS}'
SSH = 'ssh', *(f'-o{option}' for option in _OPTIONS)
_SSH_FAILED = 255
_LOST = 3
_SECONDS = 30  # that a host has to answer
_SECONDS_TO_END = 5

# In the shell of a host, at both ends of the job.
_COUNT_OOM_KILLS = "oom_kills() { sed -n 's/^oom_kill //p' /proc/vmstat; }; before=$(oom_kills)"
_COMPARE_OOM_KILLS = (
  '[ "$(oom_kills)" = "$before" ] || echo "the kernel of $(uname -n) has killed processes for lack '
  'of memory since the job began"'
)

_OF_A_RANK = re.compile(rb'\[\d+\]<std(out|err)>:')
_OF_RANK_0 = re.compile(rb'^\[0\]<std(out|err)>:')
# The second line has shells' messages about ranks that horovodrun ended because of another one, and
# about one that ended with a signal, whose status is told. The third is C++'s, of a rank that Gloo
# aborts; its next line says why.
_CONSEQUENCE = re.compile(
  rb'Process \d+ exit with status|Terminating remaining workers|'
  rb'\[\d+\]<stderr>:(Terminated|Killed|Aborted)( \(core dumped\))?\s*$|'
  rb"\[\d+\]<stderr>:terminate called after throwing an instance of 'gloo::"
)
_ABORTS = re.compile(rb'(?<=<stderr>:)  what\(\):  ')
_FIRST_TO_END = re.compile(r'exited with non-zero.*Process name: (\d+)\s+Exit code: (\d+)', re.S)
_TOLD = 2, 130, 143  # with these, the ranks have printed why they ended

# Prints the interface by which ssh has reached this host.
_INTERFACE = """
import os, psutil
address = os.environ['SSH_CONNECTION'].split()[2]
print(*(n for n, a in psutil.net_if_addrs().items() if address in [found.address for found in a]))
"""


class Ranks:
  """The ranks of one job.

  Args:
    slots: the number of ranks on each host.
    interface: the network interface between the hosts; '' finds it.
    command: what each rank runs.
  """

  def __init__(self, slots: Mapping[str, int], interface: str, command: Sequence[str]):
    self._hosts = [host for host, n in slots.items() for _ in range(n)]  # of each rank
    remote_hosts = [host for host in slots if not _is_this_host(host)]
    self._job = secrets.token_hex(8)
    directory = f'/tmp/ctr-{self._job}'
    self._asked = False
    self._trace = b''  # horovodrun's own stack trace
    names = [*_HANDED_OVER.split(), *_OF_THIS_HOST, *os.environ.get('CTR_EXPORT', '').split()]
    given = {k: v for k, v in os.environ.items() if any(fnmatch.fnmatchcase(k, n) for n in names)}
    handed_over = {k: v for k, v in given.items() if k not in _OF_THIS_HOST}
    token = secrets.token_hex(16)
    own = {'CTR_JOB': self._job, 'CTR_SECRET_FILE': f'{directory}/secret', 'PYTHONUNBUFFERED': '1'}
    own |= {'CTR_LAUNCHED_FROM': os.uname().nodename, 'CTR_TERMINAL': f'{sys.stdout.isatty():d}'}
    files = {'secret': secrets.token_hex(32)}
    files['environment'] = _exports(handed_over | own if remote_hosts else own, token)
    if remote_hosts:
      options = ['--network-interfaces', interface or _common_interface(remote_hosts)]
    else:
      options = ['--loopback']
    options += ['--gloo', '-np', str(len(self._hosts)), '-H']
    options.append(','.join(f'{host}:{n}' for host, n in slots.items()))
    self._shells: list[subprocess.Popen] = []
    for host in [socket.gethostname(), *remote_hosts]:
      self._make_directory(host, directory, files)
    here = os.path.dirname(os.path.abspath(__file__))
    self._process = subprocess.Popen(
      ['python', f'{here}/horovodrun.py', *options, 'sh', f'{here}/rank.sh', directory, *command],
      env=(given if remote_hosts else os.environ) | {STORE_TOKEN: token},
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
    return _run_on(self._hosts[0], f'kill -{number:d} $({pids})').returncode == 0

  def _make_directory(self, host: str, directory: str, files: Mapping[str, str]) -> None:
    """Makes the job's directory on a host; it stays until this process has ended."""
    # `mkdir` fails where another user has made it. A host may have two names.
    write = '\n'.join(f'printf %s {shlex.quote(text)} >{name}' for name, text in files.items())
    script = f"""set -e; umask 077; trap exit HUP INT TERM
      if mkdir {directory} 2>&1; then
        trap 'cd /; rm -rf {directory}' EXIT
        cd {directory}
        {write}
      else
        [ "$(cat {directory}/secret)" = {files['secret']} ]
      fi
      {_COUNT_OOM_KILLS}
      echo ready
      cat >/dev/null
      {_COMPARE_OOM_KILLS}
    """
    shell = subprocess.Popen(
      ['sh'] if _is_this_host(host) else [*SSH, host, 'sh'],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    self._shells.append(shell)
    limit = threading.Timer(_SECONDS, shell.kill)
    limit.daemon = True
    limit.start()
    with contextlib.suppress(OSError):  # it has ended; its last line says why
      shell.stdin.write(os.fsencode(script))
      shell.stdin.flush()
    said = b'no answer'
    for line in shell.stdout:
      said = line.strip()
      if said == b'ready':
        break
    limit.cancel()
    if said != b'ready':
      self._remove_directories()
      sys.exit(f'{host}: cannot write {directory}: {said.decode(errors="replace")}')

  def _remove_directories(self) -> str:
    """Returns what the hosts say about lack of memory."""
    for shell in self._shells:
      with contextlib.suppress(OSError):
        shell.stdin.close()
      shell.stdin = None
    said = b''
    for shell in self._shells:
      try:
        said += shell.communicate(timeout=_SECONDS_TO_END)[0]
      except subprocess.TimeoutExpired:  # the host may be gone
        shell.kill()
    lines = dict.fromkeys(said.decode(errors='replace').splitlines(keepends=True))
    return ''.join(line for line in lines if line.startswith('the kernel of '))

  def wait(self) -> int:
    """Shows the job's output until it ends; returns its exit status."""
    outputs = (self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer)
    threads = [threading.Thread(target=self._forward, args=pair, daemon=True) for pair in outputs]
    for thread in threads:
      thread.start()
    status = self._process.wait()
    lack_of_memory = self._remove_directories()
    for thread in threads:
      thread.join()
    first = _FIRST_TO_END.search(self._trace.decode(errors='replace'))
    if first is None:
      sys.stderr.buffer.write(self._trace)
      return status if status >= 0 else 128 - status
    rank, status = int(first[1]), int(first[2])
    host = self._hosts[rank]
    if status not in _TOLD:
      sys.stderr.write(lack_of_memory)
    if status == _SSH_FAILED and not _is_this_host(host):
      say(f'rank {rank} was lost: its ssh connection to {host} ended')
      return _LOST
    if status not in _TOLD:
      say(f'rank {rank} ended first, with status {status}')
    return status

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
          line = _ABORTS.sub(b'this rank aborts: ', line)
          self._show(_OF_RANK_0.sub(b'', line), to)
    self._show(rest, to)

  def _show(self, line: bytes, to: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # its reader is gone, or the disk is full: the job goes on
      to.write(line)
      to.flush()


def say(text: str) -> None:
  """Prints a line with the time."""
  sys.stderr.write(f'{time.strftime("%Y-%m-%d %H:%M:%S")} {text}\n')


def _exports(variables: Mapping[str, str], token: str) -> str:
  """Returns the lines of a shell that set the variables of a rank."""
  lines = []
  for name, value in variables.items():
    if re.fullmatch('[A-Za-z_][A-Za-z0-9_]*', name):
      line = f'export {name}={shlex.quote(value)}'
      # What horovodrun sets stays.
      lines.append(f'[ "${{{name}+set}}" ] || {line}' if name[:5] in ('HOROV', 'NCCL_') else line)
  # Gloo writes the port behind what it takes for the address, and so behind the token.
  store = '"$HOROVOD_GLOO_RENDEZVOUS_ADDR:$HOROVOD_GLOO_RENDEZVOUS_PORT"'
  return '\n'.join([*lines, f'export HOROVOD_GLOO_RENDEZVOUS_ADDR={store}/{token}\n'])


def answering(hosts: Iterable[str]) -> list[str]:
  """Returns the hosts on which a command can be run now."""

  def answers(host: str) -> bool:
    return _run_on(host, 'true').returncode == 0

  hosts = list(hosts)
  with concurrent.futures.ThreadPoolExecutor(32) as pool:
    return [host for host, there in zip(hosts, pool.map(answers, hosts)) if there]


def _common_interface(hosts: Sequence[str]) -> str:
  """Returns the network interface by which all of these hosts are reached.

  (horovodrun's own search writes the key of its services into command lines.)
  """
  names = {host: _run_on(host, f'{sys.executable} -c {shlex.quote(_INTERFACE)}') for host in hosts}
  found = {host: done.stdout.decode().strip() for host, done in names.items()}
  if len(set(found.values())) == 1 and found[hosts[0]] in psutil.net_if_addrs():
    return found[hosts[0]]
  named = ', '.join(f'{name or "none"} on {host}' for host, name in found.items())
  sys.stderr.write(
    f'network interfaces by which ssh reaches the hosts: {named}; wanted one that all hosts and '
    'this one have, as in launch/cluster.sh -i eth0\n'
  )
  sys.exit(2)


def _run_on(host: str, script: str) -> subprocess.CompletedProcess:
  command = ['sh', '-c', script] if _is_this_host(host) else [*SSH, host, script]
  try:
    return subprocess.run(
      command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
    )
  except subprocess.TimeoutExpired:
    return subprocess.CompletedProcess(command, _SSH_FAILED, b'', b'')


def _is_this_host(name: str) -> bool:
  return name in ('localhost', '127.0.0.1', socket.gethostname())
