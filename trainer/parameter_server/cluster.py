"""The processes of a parameter-server job:

who they are (`TF_CONFIG`), and this one's TensorFlow server.
"""

import dataclasses
import socket

import tensorflow as tf

from trainer.errors import UserError

WANTED = (
  'wanted \'{"cluster": {"ps": ["host:port", …], "worker": ["host:port", …]}, '
  '"task": {"type": "worker", "index": 0}}\''
)


def sent_twice(error):
  """Whether a process refused a request as received twice.

  TensorFlow draws request ids in a fresh thread, from a generator seeded with 32 bits, and a
  process refuses those that are among its last
  100,000: about once in 50,000 runs by chance. Where a worker alone refuses its part of a run, the
    server's waits for it for ever.
  """
  return isinstance(error, tf.errors.AbortedError) and 'received twice' in error.message


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Servers and workers as host:port, and which of them this process is. A `chief` is worker 0."""

  servers: tuple
  workers: tuple
  kind: str  # ps | worker
  index: int

  @property
  def name(self):
    return f'{self.kind} {self.index}'

  @property
  def address(self):
    return (self.servers if self.kind == 'ps' else self.workers)[self.index]

  @classmethod
  def from_tf_config(cls, tf_config, mode):
    """Args:

    tf_config: TF_CONFIG as a dict, or None. Raises: UserError naming the key of TF_CONFIG, what was
    found and what was wanted.
    """

    def fail(found):
      raise UserError(f'environment variable TF_CONFIG: {found}; {WANTED}')

    if tf_config is None:
      raise UserError(
        f'environment variable TF_CONFIG: is not set; sync.mode={mode} needs it; {WANTED}'
      )
    if not isinstance(tf_config, dict):
      fail(f'found {type(tf_config).__name__}')
    cluster, task = tf_config.get('cluster'), tf_config.get('task')
    if not isinstance(cluster, dict):
      fail(f"key 'cluster': found {cluster!r}")
    if not isinstance(task, dict):
      fail(f"key 'task': found {task!r}")
    for kind, addresses in cluster.items():
      if kind not in ('ps', 'worker', 'chief'):
        fail(f"key 'cluster.{kind}': unknown kind of task; servers and workers are all there is")
      if not isinstance(addresses, list) or not addresses:
        fail(f"key 'cluster.{kind}': found {addresses!r}; a list of addresses is needed")
      for address in addresses:
        host, _, port = str(address).rpartition(':')
        if (
          not isinstance(address, str)
          or not host
          or not port.isdigit()
          or not 0 < int(port) < 65536
        ):
          fail(f"key 'cluster.{kind}': found the address {address!r}; host:port is needed")
    chiefs = cluster.get('chief', [])
    if len(chiefs) > 1:
      fail(f"key 'cluster.chief': found {len(chiefs)} addresses; at most one is needed")
    servers, workers = tuple(cluster.get('ps', ())), (*chiefs, *cluster.get('worker', ()))
    for kind, addresses in (('ps', servers), ('worker', workers)):
      if not addresses:
        fail(f"key 'cluster.{kind}': is missing; one task of it is needed at least")
    everyone = [*servers, *workers]
    twice = sorted({a for a in everyone if everyone.count(a) > 1})
    if twice:
      fail(f"key 'cluster': the address '{twice[0]}' stands twice")
    kind, index = task.get('type'), task.get('index')
    if kind not in cluster:
      fail(
        f"key 'task.type': found {kind!r}, which the cluster has not; one of {sorted(cluster)} is "
        'needed'
      )
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(cluster[kind]):
      fail(
        f"key 'task.index': found {index!r}; the cluster has {len(cluster[kind])} of '{kind}', "
        'counted from 0'
      )
    if kind == 'worker':
      index += len(chiefs)
    return cls(servers, workers, 'ps' if kind == 'ps' else 'worker', index)

  def describe(self):
    """What all processes of a job must agree on."""
    return {
      'TF_CONFIG.cluster.ps': list(self.servers),
      'TF_CONFIG.cluster.worker': list(self.workers),
    }

  def start_server(self):
    """Starts this process's TensorFlow server. Raises: UserError where its port is in use."""
    port = int(self.address.rpartition(':')[2])
    in_use = UserError(
      f'environment variable TF_CONFIG: the port {port} of {self.name} is in use on this host; '
      'wanted a free one, '
      'or the process that holds it ended'
    )
    with socket.socket() as probe:
      probe.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
      )  # as gRPC does: connections that linger are no hindrance
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
