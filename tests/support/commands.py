"""Commands in processes that start at once: forks of one that has imported what they import.

That process (`python -m tests.support.commands`) runs no op of TensorFlow itself, since a fork of a
process that has would stand still. A command that is started so differs from one that a shell
starts in its imports alone, which would take it some seconds of a processor.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pathlib
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from typing import IO

from campaigns.units import status_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What commands import of others when they first need it.
_IMPORTED_LATE = (
  *('boto3', 'horovod.tensorflow', 'plotly.graph_objects', 'requests', 'sklearn.metrics'),
  *('tensorboard.plugins.hparams.api', 'tensorflow'),
)
_sending = threading.Lock()


class Command:
  """A command that was started; as a subprocess.Popen.

  Attributes:
    pid: its process id.
    stdout: what it prints, where that is a pipe.
    returncode: its status; None while nobody has asked since it ended.
  """

  def __init__(self, pid: int, ended: IO[str], stdout: IO[str] | None):
    self.pid, self.stdout, self.returncode = pid, stdout, None
    self._ended = ended  # a line with the status comes when the command ends

  def wait(self, timeout: float | None = None) -> int:
    """Returns the status: negative where a signal ended the command.

    Raises:
      subprocess.TimeoutExpired: where it runs longer than so many seconds.
    """
    if self.returncode is None:
      if not connection.wait([self._ended], timeout):  # select() takes no descriptor above 1,023
        raise subprocess.TimeoutExpired(f'process {self.pid}', timeout)
      self.returncode = int(self._ended.readline())
      self._ended.close()
    return self.returncode

  def poll(self) -> int | None:
    """Returns the status; None while it runs."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      return self.wait(0)

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      os.kill(self.pid, number)

  def terminate(self) -> None:
    self.send_signal(signal.SIGTERM)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)


def start(
  *words: str,
  env: Mapping[str, str] | None = None,
  cwd: str | os.PathLike = ROOT,
  stdin: IO | None = None,
  stdout: IO | int | None = None,
  stderr: IO | int | None = None,
) -> Command:
  """Starts `python words…`.

  Args:
    *words: begin with -m and a module, with -c and a program, or with a script.
    env: variables besides those of this process.
    cwd: where it runs.
    stdin: a file; by default it is empty.
    stdout: a file, or subprocess.PIPE; by default it goes nowhere.
    stderr: a file, or subprocess.STDOUT; by default it goes nowhere.
  """
  with contextlib.ExitStack() as stack:
    nowhere = stack.enter_context(open(os.devnull, 'r+b'))
    read = None
    if stdout == subprocess.PIPE:
      read, write = os.pipe()
      stdout = stack.enter_context(os.fdopen(write, 'wb'))
    out = stdout or nowhere
    ended, end = os.pipe()
    stack.callback(os.close, end)
    files = [stdin or nowhere, out, out if stderr == subprocess.STDOUT else stderr or nowhere]
    request = json.dumps([list(map(str, words)), os.environ | (env or {}), str(cwd)])
    with _sending:
      socket.send_fds(_server(), [request.encode()], [*(f.fileno() for f in files), end])
  status = os.fdopen(ended, encoding='utf-8', buffering=1)
  return Command(int(status.readline()), status, read and os.fdopen(read, encoding='utf-8'))


def run(*words: str, timeout: float = 300, **kwargs) -> subprocess.CompletedProcess:
  """Runs `python words…` to its end; `kwargs` are those of `start`. Returns: what it said."""
  with tempfile.TemporaryFile('w+') as out, tempfile.TemporaryFile('w+') as err:
    command = start(*words, stdout=out, stderr=err, **kwargs)
    try:
      status = command.wait(timeout)
    finally:
      command.kill()
    out.seek(0)
    err.seek(0)
    return subprocess.CompletedProcess(words, status, out.read(), err.read())


@functools.cache
def _server() -> socket.socket:
  ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  # A session of its own: Ctrl-C is for the tests, which then hang up.
  command = [sys.executable, '-m', 'tests.support.commands']
  server = subprocess.Popen(
    command, cwd=ROOT, stdin=theirs, stdout=subprocess.DEVNULL, start_new_session=True
  )
  theirs.close()

  @atexit.register
  def end() -> None:
    ours.close()
    server.wait()

  return ours


def _import_everything() -> None:
  import trainer

  for module in pkgutil.walk_packages(trainer.__path__, 'trainer.'):
    place = module.name.split('.')[1]
    if module.ispkg or (module.name.count('.') > 1 and place != 'cli'):  # commands define flags
      with contextlib.suppress(ModuleNotFoundError):  # TFRA, which requirements-next.txt has not
        importlib.import_module(module.name)
  for name in _IMPORTED_LATE:
    importlib.import_module(name)


def _become(words: Sequence[str], env: Mapping[str, str], folder: str) -> None:
  """Goes on as `python words…` in this process, a fork."""
  # The streams of the server know what kind of file they had.
  sys.stdout = open(1, 'w', encoding='utf-8')
  sys.stderr = open(2, 'w', encoding='utf-8', buffering=1)
  os.chdir(folder)
  os.environ.clear()
  os.environ.update(env)
  sys.path[:0] = filter(None, env.get('PYTHONPATH', '').split(os.pathsep))
  sys.orig_argv[:] = [sys.executable, *words]  # a worker may start itself again
  try:
    if words[0] == '-m':
      sys.argv[:] = words[1:]
      runpy.run_module(words[1], run_name='__main__', alter_sys=True)
    elif words[0] == '-c':
      sys.argv[:] = ['-c', *words[2:]]
      exec(words[1], {'__name__': '__main__'})
    else:
      sys.argv[:] = words
      runpy.run_path(words[0], run_name='__main__')
    status = 0
  except SystemExit as e:
    status = e.code if isinstance(e.code, int) else int(e.code is not None)
  except BaseException:
    traceback.print_exc()
    status = 1
  sys.stdout.flush()
  os._exit(status)


def main() -> None:
  """Forks a command for each request on standard input, until that is closed."""
  requests = socket.socket(fileno=os.dup(0))
  _import_everything()
  gc.collect()
  gc.freeze()
  woken, wake = os.pipe()
  os.set_blocking(wake, False)
  signal.signal(signal.SIGCHLD, lambda *_: None)
  signal.set_wakeup_fd(wake)
  running: dict[int, int] = {}  # the descriptors at which ends are told, by process
  while True:
    ready = connection.wait([requests, woken])
    if woken in ready:
      os.read(woken, 100)
      for pid, end in list(running.items()):
        ended, raw = os.waitpid(pid, os.WNOHANG)
        if ended:
          with contextlib.suppress(BrokenPipeError):  # nobody asks any more
            os.write(end, b'%d\n' % status_of(raw))
          os.close(running.pop(pid))
    if requests in ready:
      request, files, _, _ = socket.recv_fds(requests, 1 << 18, 4)
      if not request:
        break
      pid = os.fork()
      if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        for number, file in enumerate(files[:3]):
          os.dup2(file, number)
        for file in (*files, woken, wake):
          os.close(file)
        _become(*json.loads(request))
      running[pid] = files.pop()
      for file in files:
        os.close(file)
      os.write(running[pid], b'%d\n' % pid)
  for pid in running:
    os.kill(pid, signal.SIGKILL)


if __name__ == '__main__':
  main()
