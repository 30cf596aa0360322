"""The processes of a parameter-server job, from `TF_CONFIG`, and this one's TensorFlow server."""

import dataclasses
import re
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import tensorflow as tf

from trainer.errors import UserError
from trainer.plain_data import Json, JsonObject

CONTINUE = 'run the same command again to continue from the last checkpoint'
_WANTED = (
  'wanted \'{"cluster": {"ps": ["host:port", …], "worker": ["host:port", …]}, '
  '"task": {"type": "worker", "index": 0}}\''
)


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Servers and workers, and which of them this process is.

  Attributes:
    servers: their addresses as host:port.
    workers: likewise; a `chief` is worker 0.
    kind: 'ps' or 'worker'.
    index: of this process among those of its kind.
  """

  servers: tuple[str, ...]
  workers: tuple[str, ...]
  kind: str
  index: int

  @property
  def name(self) -> str:
    """What messages call this process, as 'worker 1'."""
    return f'{self.kind} {self.index}'

  @property
  def address(self) -> str:
    """This process's host:port."""
    return (self.servers if self.kind == 'ps' else self.workers)[self.index]

  @classmethod
  def from_tf_config(cls, tf_config: Json, mode: str) -> 'Cluster':
    """Returns the cluster that `TF_CONFIG` describes.

    Args:
      tf_config: its value, decoded; None where it is not set.
      mode: sync.mode.
    Raises:
      UserError: naming the key of TF_CONFIG, what was found and what was wanted.
    """
    if tf_config is None:
      _refuse(f'is not set; sync.mode={mode} needs it')
    if not isinstance(tf_config, dict):
      _refuse(f'found {type(tf_config).__name__}')
    cluster, task = tf_config.get('cluster'), tf_config.get('task')
    if not isinstance(cluster, dict):
      _refuse(f"key 'cluster': found {cluster!r}")
    if not isinstance(task, dict):
      _refuse(f"key 'task': found {task!r}")
    for kind, addresses in cluster.items():
      _check_addresses(kind, addresses)
    chiefs = cluster.get('chief', [])
    if len(chiefs) > 1:
      _refuse(f"key 'cluster.chief': found {len(chiefs)} addresses; at most one is needed")
    servers, workers = tuple(cluster.get('ps', ())), (*chiefs, *cluster.get('worker', ()))
    for kind, addresses in (('ps', servers), ('worker', workers)):
      if not addresses:
        _refuse(f"key 'cluster.{kind}': is missing; one task of it is needed at least")
    everyone = [*servers, *workers]
    twice = sorted({a for a in everyone if everyone.count(a) > 1})
    if twice:
      _refuse(f"key 'cluster': the address '{twice[0]}' is there twice")
    kind, index = task.get('type'), task.get('index')
    if not isinstance(kind, str) or kind not in cluster:
      _refuse(
        f"key 'task.type': found {kind!r}, which the cluster has not; one of {sorted(cluster)} is "
        'needed'
      )
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(cluster[kind]):
      _refuse(
        f"key 'task.index': found {index!r}; the cluster has {len(cluster[kind])} of '{kind}', "
        'counted from 0'
      )
    if kind == 'worker':
      index += len(chiefs)
    return cls(servers, workers, 'ps' if kind == 'ps' else 'worker', index)

  def settings(self) -> JsonObject:
    """What all processes of a job must agree on, as plain data by name."""
    return {
      'TF_CONFIG.cluster.ps': list(self.servers),
      'TF_CONFIG.cluster.worker': list(self.workers),
    }

  def host(self, patience: float) -> str:
    """Returns the IP address of this process's host, which may take a while to have a name.

    Args:
      patience: seconds.
    Raises:
      UserError: where the host of TF_CONFIG has no address by then.
    """
    host, began = self.address.rpartition(':')[0].strip('[]'), time.monotonic()
    while True:
      try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
      except ValueError:  # not even a name
        _refuse(f"the host '{host}' of {self.name} is no name of a host")
      except OSError as e:
        if time.monotonic() - began > patience:
          raise UserError(
            f"environment variable TF_CONFIG: the host '{host}' of {self.name} has no address: "
            f'{e.strerror or e}; wanted a name or address of this host'
          ) from None
      time.sleep(1)

  def start_server(self) -> tf.distribute.Server:
    """Starts this process's TensorFlow server.

    Raises:
      UserError: where its port is in use.
    """
    port = int(self.address.rpartition(':')[2])
    in_use = UserError(
      f'environment variable TF_CONFIG: the port {port} of {self.name} is in use on this host; '
      'wanted a free one, or the process that holds it ended'
    )
    with socket.socket() as probe:
      # As gRPC does, so that connections that linger do not matter.
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

  def say(self, text: str) -> None:
    """Prints a line that begins with this process's name."""
    _print(f'[{self.name}] {text}')

  def say_end(self, text: str, status: int) -> None:
    """Prints why this process ends with `status`; 2 is a user's mistake."""
    _print(f'error: {text}' if status == 2 else f'[{self.name}] {text}')


def _refuse(found: str) -> NoReturn:
  raise UserError(f'environment variable TF_CONFIG: {found}; {_WANTED}')


def _check_addresses(kind: str, addresses: Sequence[str]) -> None:
  key = f"key 'cluster.{kind}'"
  if kind not in ('ps', 'worker', 'chief'):
    _refuse(f'{key}: unknown kind of task; servers and workers are all there is')
  if not isinstance(addresses, list) or not addresses:
    _refuse(f'{key}: found {addresses!r}; a list of addresses is needed')
  for address in addresses:
    host, _, port = str(address).rpartition(':')
    valid = isinstance(address, str) and host and re.fullmatch('[0-9]{1,5}', port)
    valid = valid and 0 < int(port) < 65536
    if not valid:
      _refuse(f'{key}: found the address {address!r}; host:port is needed')


def _print(line: str) -> None:
  sys.stderr.write(line + '\n')
  sys.stderr.flush()
