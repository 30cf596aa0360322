"""Parameter servers: workers train, servers keep rows and dense variables; `TF_CONFIG` says who is
who.

  mode       rows and dense variables                                        a step is of
  ps         all workers' gradients meet, then one update                    all workers: equal to
  one process
  ps_async   each worker's gradients are applied as they come                one worker
  ps_geo     each worker trains copies, their differences meet now and then  one worker

The parts, in trainer/sync/ps: cluster (TF_CONFIG), hub (where processes meet: collectives, units of
work, who is lost), servers (the
TensorFlow graph over the servers), store (their rows as one store), step (a worker's step), job
(passes of workers that train apart).
"""

import importlib
import signal
import sys
import time

import tensorflow as tf

from ops import library
from trainer import command_line
from trainer.errors import UserError
from trainer.parameter_server.cluster import Cluster
from trainer.parameter_server.coordinator import Coordinator, CoordinatorClient
from trainer.parameter_server.servers import cpu_config
from trainer.runtime import tf_config

v1 = tf.compat.v1


def _flat(tree, prefix=''):
  """dict and lists -> one dict, 'a.b.0' -> value."""
  if not isinstance(tree, (dict, list, tuple)) or not tree:
    return {prefix[:-1]: tree}
  items = tree.items() if isinstance(tree, dict) else enumerate(tree)
  return {k: v for name, value in items for k, v in _flat(value, f'{prefix}{name}.').items()}


def _hub_variable():
  """Where server 0 publishes the hub's address, with the secret that the hub asks for."""
  with tf.device('/job:ps/task:0/device:CPU:0'):
    return v1.get_variable('hub', initializer='', use_resource=True, trainable=False)


def _publish(target, address):
  with tf.Graph().as_default():
    variable = _hub_variable()
    with v1.Session(target, config=cpu_config(device_filters=['/job:ps/task:0'])) as session:
      session.run(variable.assign(' '.join(map(str, address))))


def _find_hub(cluster, patience):
  """The hub's (host, port, secret), once server 0 has published it.

  Raises: UserError after `patience` seconds.
  """
  began = told = time.monotonic()
  config = cpu_config(device_filters=['/job:ps/task:0'], operation_timeout_in_ms=5000)
  with tf.Graph().as_default():
    read = _hub_variable().read_value()
    while True:
      try:
        with v1.Session('grpc://' + cluster.servers[0], config=config) as session:
          host, port, secret = session.run(read).decode().split()
          return host, int(port), secret
      except tf.errors.OpError:
        pass
      now = time.monotonic()
      if now - began > patience:
        raise UserError(
          f'environment variable TF_CONFIG: ps 0 at {cluster.servers[0]} did not answer '
          f'{cluster.name} within '
          f'{patience:.0f} s; wanted it started and its address right'
        )
      if now - told > 10:
        told = now
        sys.stderr.write(
          f'[{cluster.name}] waiting for ps 0 at {cluster.servers[0]} ({now - began:.0f} s)\n'
        )
      time.sleep(0.3)  # between knocks


def _check(cfg):
  """Raises: UserError naming a key whose value this mode has not."""
  mode = cfg.sync.mode
  for i, interaction in enumerate(cfg.model.interactions):
    if mode != 'ps' and interaction.args.get('batch_norm') == 'sync':
      raise UserError(
        f"model.interactions.{i}.batch_norm: found 'sync', but no two workers share a step in "
        f"sync.mode={mode}; wanted 'local', "
        'or sync.mode=ps or allreduce'
      )


def run(cfg):
  """Runs this process's part of a job. Returns: its exit status. Raises: UserError."""
  cluster = Cluster.from_tf_config(tf_config(), cfg.sync.mode)
  _check(cfg)
  library.load()  # the servers run our ops too
  if cfg.sparse.store == 'tfra':
    importlib.import_module('trainer.embedding.tfra_store')  # and TFRA's
  settings = _flat(cfg.model_dump()) | _flat(cluster.describe())
  server = cluster.start_server()
  if cluster.kind == 'ps' and cluster.index == 0:
    hub = Coordinator(cluster, cfg.sync, settings)
    _publish(server.target, hub.address)
    signal.signal(signal.SIGTERM, lambda *_: hub.asked_to_stop())
    return hub.wait()
  communicator = CoordinatorClient(
    _find_hub(cluster, cfg.sync.stalled_peer_seconds), cluster, cfg.sync, settings
  )
  if cluster.kind == 'ps':
    signal.signal(
      signal.SIGTERM, signal.SIG_IGN
    )  # a launcher may ask all to stop at once: the workers save what is here first
    return communicator.wait()
  try:
    return _work(cfg, cluster, server, communicator)
  except UserError as e:
    communicator.fail(str(e), 2)
    raise
  except Exception as e:
    communicator.fail_by(e)
    raise


def _work(cfg, cluster, server, communicator):
  from trainer.parameter_server.asynchronous_job import AsynchronousJob
  from trainer.parameter_server.geo import GeoStep
  from trainer.parameter_server.worker_step import ServerStep
  from trainer.reporting import closing
  from trainer.training.job import Job

  make_step = GeoStep if cfg.sync.mode == 'ps_geo' else ServerStep
  make_job = Job if cfg.sync.mode == 'ps' else AsynchronousJob
  step = make_step(cfg, communicator, cluster, server.target)
  done = make_job(cfg, communicator, step, communicator.progress).run()
  if communicator.rank == 0:
    closing.close(cfg)
  communicator.barrier()
  communicator.bye()
  return 0 if done else command_line.STOPPED
