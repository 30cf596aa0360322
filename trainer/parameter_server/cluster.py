"""Reads the processes of a parameter-server job from `TF_CONFIG`; starts a TensorFlow server."""

import dataclasses
import re
import socket
import sys
import time

import tensorflow as tf

from trainer.command_line import timed
from trainer.errors import UserError, short
from trainer.plain_data import Json, JsonObject

CONTINUE = 'run the same command again to continue from the last checkpoint'
_VARIABLE = 'environment variable TF_CONFIG'
_EXAMPLE = (
  'wanted \'{"cluster": {"ps": ["host:port", …], "worker": ["host:port", …]}, '
  '"task": {"type": "worker", "index": 0}}\''
)
_KINDS = 'ps', 'worker', 'chief'
_ADDRESS = re.compile('.+:([0-9]{1,5})')


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The addresses of servers and workers, and which of them this process is."""

  servers: tuple[str, ...]  # addresses as host:port
  workers: tuple[str, ...]  # the same; a `chief` is worker 0
  kind: str  # 'ps' or 'worker'
  index: int  # the number of this process among those of its kind, from 0

  @property
  def name(self) -> str:  # in messages, such as 'worker 1'
    return f'{self.kind} {self.index}'

  @property
  def address(self) -> str:
    return (self.servers if self.kind == 'ps' else self.workers)[self.index]

  @classmethod
  def from_tf_config(cls, tf_config: Json, mode: str) -> 'Cluster':
    """Returns the cluster of the parsed TF_CONFIG, or raises UserError; `mode` is sync.mode."""
    if tf_config is None:
      raise UserError(f'{_VARIABLE}: is not set; sync.mode={mode} needs it; {_EXAMPLE}')
    if not isinstance(tf_config, dict):
      raise UserError(f'{_VARIABLE}: found {type(tf_config).__name__}; {_EXAMPLE}')
    cluster, task = tf_config.get('cluster'), tf_config.get('task')
    _check(isinstance(cluster, dict), 'cluster', cluster, 'lists of addresses by kind of task')
    _check(isinstance(task, dict), 'task', task, 'the type and the index of this process')
    for kind in {'ps': [], 'worker': []} | cluster:
      addresses = cluster.get(kind, [])
      _check(kind in _KINDS, f'cluster.{kind}', addresses, f'only the kinds {", ".join(_KINDS)}')
      wanted = 'a list of addresses host:port'
      _check(isinstance(addresses, list), f'cluster.{kind}', addresses, wanted)
      for address in addresses:
        valid = isinstance(address, str) and _ADDRESS.fullmatch(address)
        _check(valid and 0 < int(valid[1]) < 65536, f'cluster.{kind}', address, wanted)
    chiefs = cluster.get('chief', [])
    _check(len(chiefs) <= 1, 'cluster.chief', chiefs, 'at most one address')
    servers, workers = tuple(cluster.get('ps', ())), (*chiefs, *cluster.get('worker', ()))
    _check(servers, 'cluster.ps', list(servers), 'at least one address')
    _check(workers, 'cluster.worker', list(workers), 'at least one address')
    for address in (everyone := [*servers, *workers]):
      _check(everyone.count(address) == 1, 'cluster', address, 'each address once')
    kind, index = task.get('type'), task.get('index')
    valid = isinstance(kind, str) and kind in cluster
    _check(valid, 'task.type', kind, f'one of {sorted(cluster)}')
    tasks = len(cluster[kind])
    wanted = f"a whole number below {tasks}, the number of '{kind}' tasks"
    _check(type(index) is int and 0 <= index < tasks, 'task.index', index, wanted)
    if kind == 'worker':
      index += len(chiefs)
    return cls(servers, workers, 'ps' if kind == 'ps' else 'worker', index)

  def settings(self) -> JsonObject:
    """Returns the settings that must be equal on all processes of a job, {name: value}."""
    return {
      'TF_CONFIG.cluster.ps': list(self.servers),
      'TF_CONFIG.cluster.worker': list(self.workers),
    }

  def host(self, patience: float) -> str:
    """Returns the IP address of this host; a UserError if none is found in `patience` seconds."""
    host, began = self.address.rpartition(':')[0].strip('[]'), time.monotonic()
    while True:
      try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
      except (OSError, ValueError) as e:  # ValueError: it cannot be a name
        if isinstance(e, ValueError) or time.monotonic() - began > patience:
          raise UserError(
            f"{_VARIABLE}: the host '{host}' of {self.name} has no address: "
            f'{getattr(e, "strerror", None) or e}; wanted a name or address of this host'
          ) from None
      time.sleep(1)

  def start_server(self) -> tf.distribute.Server:
    """Starts and returns this process's TensorFlow server; UserError if the port is in use."""
    port = int(self.address.rpartition(':')[2])
    in_use = UserError(
      f'{_VARIABLE}: the port {port} of {self.name} is in use on this host; wanted a free one, or '
      'end the process that holds it'
    )
    with socket.socket() as probe:
      # As for gRPC, a port counts as free if its old connections are only closing.
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      try:
        probe.bind(('', port))
        probe.listen(1)
      except OSError:
        raise in_use from None
    spec = tf.train.ClusterSpec({'ps': list(self.servers), 'worker': list(self.workers)})
    try:
      return tf.distribute.Server(spec, job_name=self.kind, task_index=self.index)
    except tf.errors.OpError:
      raise in_use from None

  def say(self, text: str, status: int = 0) -> None:
    """Prints a line with the time and the process; status 2, a user's mistake, adds 'error:'."""
    line = f'error: {text}' if status == 2 else timed(f'[{self.name}] {text}')
    sys.stderr.write(f'{line}\n')  # in one piece: several threads may print


def _check(valid: object, key: str, value: object, wanted: str) -> None:
  if not valid:
    raise UserError(f"{_VARIABLE}: key '{key}': found {short(value)}; wanted {wanted}")


def cpu_config(**options: object) -> tf.compat.v1.ConfigProto:
  """Returns session options that use no GPU, and as many threads as this process's TensorFlow."""
  options['intra_op_parallelism_threads'] = tf.config.threading.get_intra_op_parallelism_threads()
  return tf.compat.v1.ConfigProto(device_count={'GPU': 0}, **options)


def on_server(server: int) -> str:
  return f'/job:ps/task:{server}/device:CPU:0'
