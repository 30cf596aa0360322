"""Sends processes a wrong TF_CONFIG, wrong messages and wrong bytes.

The sender knows the job's secret, like a peer of another version or with broken memory.
"""

import contextlib
import http.client
import json
import os
import random
import re
import resource
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent import futures
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from campaigns.fuzzing import LINES, changed
from campaigns.units import TRACE, Found, Kind, fork, text_of, wait
from tests.support import commands
from tests.support.parameter_servers import SETTINGS, PlayedJob
from tests.support.steps import make_config
from tests.support.threads import in_thread
from trainer import runtime
from trainer.comm import messages
from trainer.comm.heartbeat import Heartbeat
from trainer.config import Sync
from trainer.errors import UserError
from trainer.parameter_server import membership
from trainer.parameter_server.client import CoordinatorClient, Process
from trainer.parameter_server.cluster import Cluster

INPUTS = 2000  # of a unit, of TF_CONFIG and of messages
TALKS = 24  # of a unit, all at once
EXCHANGES = 200  # of a unit
ROUNDS = 5  # of a unit of patient connections, for each kind of process
FILES = 128  # which such a process may have
LOST_SECONDS = 1.0
BOUND = 60  # seconds in which a process must have ended, on a busy machine
_LONGEST = 2000  # characters of a message

_CLUSTER = {
  'cluster': {'ps': ['127.0.0.1:2221'], 'worker': ['h1:2222', 'h2:2222'], 'chief': ['[::1]:3']},
  'task': {'type': 'worker', 'index': 1},
  'environment': 'cloud',
}
_WELCOME = ['welcome', 1, 1, 2, False]
_HELLO = ['hello', 'worker', 1, 'process 7 on host', SETTINGS]
_TO_COORDINATOR = (
  _HELLO,
  ['beat', 0.0],
  ['meet', 'gather', 1],
  ['meet', 'sum', {'x': np.arange(3)}],
  [
    'meet',
    'open_pass',
    [{'slices': 2, 'first': 0, 'total': 20, 'pause_after': None}, {'place': 7}],
  ],
  ['meet', 'close_pass', None],
  ['enter'],
  ['claim', False, False],
  ['give_up', 'it ruins the state'],
  ['bye', 0],
  ['refused', 'it said no'],
)
_TO_CLIENT = (
  _WELCOME,
  ['beat', 0.0],
  ['reply', [1, 2]],
  ['note', 'a worker is gone'],
  ['finish', 0],
  ['end', 'it ends', 3],
)
_OF_RANKS = (['hello', 1, 'rank 1'], ['beat', 0.0], ['bye'], ['end', 'it ends', 3])


def _tf_config(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes values, keys and bytes of TF_CONFIG. It must be accepted, or refused in one line."""
  found, names = Found(), ['ps', 'worker', 'chief', 'evaluator', 'type', 'index', 'cluster', 'task']
  for _ in range(INPUTS):
    text = json.dumps(changed(draw, _CLUSTER, names))
    for _ in range(draw.choice((0, 0, 1, 2))):
      at = draw.randrange(len(text) + 1)
      text = text[:at] + draw.choice(LINES) + text[at + draw.randrange(4) :]
    os.environ['TF_CONFIG'] = text.replace('\0', '')
    try:
      cluster = Cluster.from_tf_config(runtime.tf_config(), 'ps')
    except UserError as e:
      wrong = '\n' in str(e) or not str(e).startswith('environment variable TF_CONFIG')
      found.trial('refused in one line', f'{e}: {text[:1000]}' if wrong else None)
    except Exception as e:
      found.trial('', f'{type(e).__name__}: {str(e)[:300]}: {text[:1000]}')
    else:
      same = cluster.address in json.loads(text)['cluster'][json.loads(text)['task']['type']]
      found.trial('taken', None if same else f'{cluster}: {text[:1000]}')
  return found


def _garbled(draw: random.Random, data: bytes) -> bytes:
  """Returns the data with some bytes changed, added or removed."""
  data = bytearray(data)
  for _ in range(draw.choice((1, 1, 2, 8))):
    at = draw.randrange(len(data) + 1)
    match draw.randrange(6):
      case 0 if at < len(data):
        data[at] ^= 1 << draw.randrange(8)
      case 1 if at < len(data):
        data[at] = draw.choice(b'\0\xff[]{}",:0')
      case 2:
        data[at:at] = draw.randbytes(draw.choice((1, 4, 100)))
      case 3:
        del data[at : at + draw.choice((1, 4, 12))]
      case 4:
        del data[at:]
      case 5:
        data = bytearray(draw.randbytes(draw.choice((0, 1, 12, 300))))
  return bytes(data)


def _messages(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes bytes and texts of messages between processes.

  The receiver must get plain data or an error.
  """
  found = Found()
  arrays = {'a': np.arange(6.0).reshape(2, 3), 'b': np.array(['x', 'yz']), 'c': np.zeros([0, 4])}
  good = (*_TO_COORDINATOR, *_TO_CLIENT, [arrays, {'n': None, 't': 'grün', 'x': [1, 2.5, True]}])
  for _ in range(INPUTS):
    value = draw.choice(good)
    data = messages.encode(value)
    if draw.random() < 0.5:  # the text alone, in a frame that fits
      size, text_size = struct.unpack_from('!QI', data)
      text, rest = data[12 : 12 + text_size], data[12 + text_size :]
      text = _garbled(draw, text)
      if draw.random() < 0.3:
        line = draw.choice(LINES).encode()
        text = text.replace(b'"<f8"', json.dumps(line.decode()).encode()) or line
      data = struct.pack('!QI', 12 + len(text) + len(rest), len(text)) + text + rest
    else:
      data = _garbled(draw, data)
    try:
      messages.encode(messages.decode(data))
    except ValueError as e:
      found.trial('refused', f'{e}: {data!r}' if len(str(e)) > _LONGEST else None)
    except Exception as e:
      found.trial('', f'{type(e).__name__}: {str(e)[:300]}: {data!r}')
    else:
      found.trial('taken')
  return found


def _say(draw: random.Random, connection: Connection, known: tuple[Any, ...]) -> None:
  """Sends some messages that are almost right, and mostly closes the connection."""
  with contextlib.suppress(OSError, ValueError):
    for _ in range(draw.choice((1, 2, 5))):
      message = draw.choice(known)
      match draw.randrange(6):
        case 0:  # a right message, perhaps out of place
          connection.send_bytes(messages.encode(message))
        case 1 | 2:  # of another version
          other = changed(draw, json.loads(json.dumps(message, default=str)), ['hello', 'a'])
          connection.send_bytes(messages.encode(other))
        case 3:
          connection.send_bytes(messages.encode([*message, draw.choice((None, 1, 'x', [], {}))]))
        case 4:
          connection.send_bytes(_garbled(draw, messages.encode(message)))
        case 5:  # a wrong length
          data = messages.encode(message)
          length = draw.choice((len(data) + 50, 3, 0, -1, -2, 2**31 - 1))
          os.write(connection.fileno(), struct.pack('!i', length) + data)
  if draw.random() < 0.9:  # else it stays and sends nothing more
    connection.close()
  else:
    _silent.append(connection)


_silent: list[Connection] = []


class _EndingProcess(Process):
  """Ends when a coordinator asks it to restart or to stop."""

  def restart(self, connection: messages.MessageConnection) -> None:
    os._exit(0)

  def ask_to_stop(self) -> None:
    os._exit(0)


def _sync(mode: str, lost_seconds: float = LOST_SECONDS) -> Sync:
  return Sync(mode=mode, lost_peer_seconds=lost_seconds, stalled_peer_seconds=3 * lost_seconds)


def _at_the_coordinator(draw: random.Random) -> int:
  """Runs a coordinator with a faulty worker, beside a good one or before the job has formed."""
  mode, says_hello = draw.choice(('ps', 'ps_async')), draw.random() >= 0.5
  # Without a hello, nobody is lost: the good ones may take their time to come.
  job = PlayedJob(_sync(mode, LOST_SECONDS if says_hello else BOUND), workers=2)

  def connect() -> Connection:
    return messages.connect(job.coordinator.address, job.coordinator.secret, BOUND)

  if not says_hello:
    _say(draw, connect(), tuple(m for m in _TO_COORDINATOR if m is not _HELLO))
    results = job.run(*[lambda client: client.gather(client.rank)] * 2)
    return 0 if results == [[0, 1]] * 2 else 9
  worker = in_thread(lambda: job.connect(0))
  almost = connect()
  almost.send_bytes(messages.encode(_HELLO))
  client = worker.result(BOUND)  # the job has formed
  in_thread(lambda: (client.gather(0), client.bye(0)))
  _say(draw, almost, _TO_COORDINATOR)
  return job.coordinator.wait()


def _at_a_worker(draw: random.Random) -> int:
  """Runs a worker with a faulty coordinator."""

  def serve(connection: Connection) -> None:
    if draw.random() < 0.8:
      connection.send_bytes(messages.encode(_WELCOME))
    _say(draw, connection, _TO_CLIENT)

  listener = messages.Listener('127.0.0.1', None, b'secret', LOST_SECONDS, serve)
  cluster = Cluster(('s:1',), ('w:1', 'w:2'), 'worker', 1)
  connection = membership.connect(listener.address, b'secret', LOST_SECONDS)
  client = CoordinatorClient(connection, cluster, _sync('ps'), SETTINGS, _EndingProcess())
  client.gather(1)
  return 0


def _at_a_rank(draw: random.Random) -> int:
  """Runs a rank 0 with a faulty rank 1, or the other way round."""
  store = RendezvousServer()
  port = store.start()
  store.init(get_host_assignments(parse_hosts('localhost:2'), 2))
  rank, url = draw.randrange(2), f'http://127.0.0.1:{port}'
  here = runtime.Runtime(rank, 2, rank, 2, None, url, b'\1')
  key = f'{url}/ctr_trainer/heartbeat'
  if rank:
    listener = messages.Listener(
      '127.0.0.1', None, b'\1', LOST_SECONDS, lambda c: _say(draw, c, _OF_RANKS)
    )
    record = {'address': listener.address, 'name': 'rank 0'}
    urllib.request.urlopen(urllib.request.Request(key, json.dumps(record).encode(), method='PUT'))
  sync = {'lost_peer_seconds': LOST_SECONDS, 'stalled_peer_seconds': 3}
  with Heartbeat(here, make_config({'sync': sync})):
    if not rank:
      with urllib.request.urlopen(key) as response:
        record = json.load(response)
      almost = messages.connect(record['address'], b'\1', BOUND)
      if draw.random() < 0.5:
        almost.send_bytes(messages.encode(_OF_RANKS[0]))
      _say(draw, almost, _OF_RANKS)
    threading.Event().wait(3 * LOST_SECONDS)
  return 0


def _talks(draw: random.Random, folder: str, shared: str) -> Found:
  """Lets a peer that knows the secret send messages that are garbled, cut short, out of place, of a
  wrong length or of another version to a coordinator, a worker or a heartbeat. The peer must be
  dropped, or the job end in one line, in time.
  """
  found, running = Found(), []
  for i in range(TALKS):
    part = draw.choice((_at_the_coordinator, _at_the_coordinator, _at_a_worker, _at_a_rank))
    own, log = random.Random(draw.random()), f'{folder}/{i}.log'

    def action(part: Callable[[random.Random], int] = part, own: random.Random = own) -> None:
      os._exit(part(own))

    running.append((part.__name__, log, fork(action, log)))
  for name, log, pid in running:
    status, said = wait(pid, BOUND), text_of(log)
    what = 'refused by name' if status in (1, 2, 3) else 'went on'
    if status is None:
      wrong = f'{name} still runs: {said[-500:]}'
    elif status not in (0, 1, 2, 3) or TRACE in said:
      wrong = f'{name} ended with {status}: {said[-1500:]}'
    elif status and not said.strip() and name != _at_a_rank.__name__:  # rank 0 says why
      wrong = f'{name} ended with {status} and no reason'
    else:
      wrong = None
    found.trial(what, wrong)
  return found


def _exchanges(draw: random.Random, folder: str, shared: str) -> Found:
  """Lets a rank send wrong bytes in an exchange of rows; an error must name it, in time."""
  import tensorflow as tf

  from ops.connections import Connections

  found = Found()
  own = tf.reshape(tf.range(12, dtype=tf.int64), [6, 2])
  exchange = lambda fds, rank: Connections(fds, rank).all_to_all([own, tf.ones([6])], [2, 4])
  a, b = socket.socketpair()
  in_thread(lambda fd=a.detach(): exchange([fd, -1], 1))
  right = b.recv(1 << 16)
  b.close()
  for _ in range(EXCHANGES):
    a, b = socket.socketpair()
    result = in_thread(lambda fd=a.detach(): exchange([-1, fd], 0))
    data = _garbled(draw, right)
    with contextlib.suppress(OSError):
      b.sendall(data)
      b.shutdown(socket.SHUT_WR)
    try:
      result.result(BOUND)
      found.trial('went on')
    except (tf.errors.AbortedError, tf.errors.DataLossError, tf.errors.ResourceExhaustedError) as e:
      found.trial('refused by name', None if 'rank 1' in str(e) or 'memory' in str(e) else str(e))
    except futures.TimeoutError:
      found.trial('', f'it still waits, after {data[:200]!r}')
    except Exception as e:
      found.trial('', f'{type(e).__name__}: {str(e)[:300]}, after {data[:200]!r}')
    b.close()
  return found


def _patient(draw: random.Random, folder: str, shared: str) -> Found:
  """Keeps more connections than a process may have files, to /metrics, a server of scores or a
  coordinator, each with a byte now and then. Whoever asks well must be answered in time."""
  found, log = Found(), f'{folder}/log'
  words = {
    'metrics': ['publish', '--run_dir', f'{folder}/none', '--to', 'x', '--metrics_port', '0'],
    'a server': ['serve', '--store', f'{folder}/none', '--port', '0'],
  }
  job = PlayedJob(_sync('ps', 60.0), workers=1)
  with open(log, 'wb') as out, contextlib.ExitStack() as stack:
    for part in (*words, 'a coordinator'):
      if part in words:
        module, *flags = words[part]
        one = commands.start('-m', commands.module(module), *flags, stdout=out, stderr=out)
        stack.callback(one.kill)
        deadline = time.monotonic() + BOUND
        while not (port := re.findall(r'http://127.0.0.1:(\d+)/', text_of(log))):
          if time.monotonic() > deadline:
            found.trial('', f'{part} does not start: {text_of(log)[-500:]}')
            return found
          time.sleep(0.05)
        address = '127.0.0.1', int(port[-1])
        for pid in (one.pid, *_children(one.pid)):
          resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, FILES))
      else:
        address = tuple(job.coordinator.address)
      patient: list[socket.socket] = []
      for number in range(ROUNDS):
        while len(patient) < 1.5 * FILES:
          with contextlib.suppress(OSError):
            patient.append(socket.create_connection(address, BOUND))
        for stranger in list(patient):
          try:
            stranger.send(draw.choice((b'G', b'\0', b'x')), socket.MSG_DONTWAIT)
          except OSError:
            patient.remove(stranger)
        try:
          if part in words:
            connection = http.client.HTTPConnection(*address, timeout=BOUND)
            connection.request('GET', '/healthz')
            outcome = str(connection.getresponse().status)
            connection.close()
          else:
            messages.connect(list(address), job.coordinator.secret, BOUND).close()
            outcome = 'let in'
          wrong = None if part not in words or one.poll() is None else 'it ended'
        except OSError as e:
          wrong = f'{e!r} in round {number}'
        found.trial(f'{part}: {outcome}', wrong and f'{part}: {wrong}: {text_of(log)[-500:]}')
      for stranger in patient:
        stranger.close()
  if TRACE in text_of(log):
    found.trial('', f'a trace: {text_of(log)[-1500:]}')
  return found


def _children(pid: int) -> list[int]:
  with open(f'/proc/{pid}/task/{pid}/children', encoding='utf-8') as f:
    return list(map(int, f.read().split()))


KINDS = [
  Kind('TF_CONFIG', 'inputs', 8, 600, _tf_config),
  Kind('messages', 'inputs', 10, 600, _messages),
  Kind('peers', 'faults', 10, 600, _talks),
  Kind('patient connections', 'faults', 5, 900, _patient),
  Kind('row connections', 'inputs', 5, 600, _exchanges),
]
