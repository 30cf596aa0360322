"""Runs one process of a parameter-server job: servers keep rows and dense variables, workers train.

`TF_CONFIG` says which process is which.

  mode      what the servers apply                                                 who takes a step
  ps        the sum of all workers' gradients, as one process would                all together
  ps_async  each worker's gradients, as they come                                  each alone
  ps_geo    the changes of the workers' copies, every `sync.geo_steps` steps       each alone
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable

import tensorflow as tf

from ops import library
from trainer import command_line, runtime
from trainer.comm.heartbeat import EXIT_STATUS
from trainer.comm.messages import MessageConnection, address_text
from trainer.config import Config, flatten
from trainer.embedding.stores import plain_disk_errors, store_class
from trainer.errors import UserError, is_exhausted
from trainer.job.job import Job
from trainer.parameter_server import membership
from trainer.parameter_server.asynchronous_job import AsynchronousJob
from trainer.parameter_server.client import CoordinatorClient
from trainer.parameter_server.cluster import CONTINUE, Cluster, cpu_config, on_server
from trainer.parameter_server.coordinator import Coordinator
from trainer.parameter_server.geo import GeoStep
from trainer.parameter_server.worker_step import ServerStep
from trainer.reporting.status import Status

v1 = tf.compat.v1


def run(
  cfg: Config, cluster: Cluster, figures: Status, inherited: MessageConnection | None = None
) -> int:
  """Runs this process's part of a job until the job ends; returns the exit status.

  Once the processes have met, an error or a lost process ends this one at once; before, a user's
  mistake is a UserError. `inherited` is the connection of a process that has restarted itself.
  """
  # The servers need our ops too, and TFRA's if it keeps the rows.
  library.load()
  store_class(cfg.sparse.store)
  settings = flatten(cfg.model_dump()) | cluster.settings()
  if cluster.name == 'ps 0':
    coordinator = Coordinator(
      cluster, cfg.sync, settings, cluster.host(cfg.sync.lost_peer_seconds), runtime.secret()
    )
    _on_signals(coordinator.stop)
    server = cluster.start_server()
    _publish(server.target, coordinator)
    return coordinator.wait()
  server = cluster.start_server()
  try:
    connection = inherited or _connect(cluster, cfg.sync.lost_peer_seconds)
  except ConnectionError as e:
    cluster.say(f'{e}. The job ends; {CONTINUE}.')
    return EXIT_STATUS
  client = CoordinatorClient(connection, cluster, cfg.sync, settings)
  if cluster.kind == 'ps':
    # A launcher, or Ctrl-C, may ask all processes to stop at once; workers first save the state.
    _on_signals(client.stop)
    return client.wait()
  if not client.late:  # until the job listens to signals itself, there is no new state to save
    asked = 'asked to stop before the training began'
    _on_signals(lambda number: client.end(asked, command_line.SIGNALLED + number))
  try:
    make_step = GeoStep if cfg.sync.mode == 'ps_geo' else ServerStep
    make_job = Job if cfg.sync.mode == 'ps' else AsynchronousJob
    figures.also = client.progress
    with plain_disk_errors():
      job = make_job(cfg, client, make_step(cfg, client, cluster, server.target), figures)
      stopped_by = job.run()
      troubles = job.close()
      client.barrier()
      status = command_line.status(stopped_by, troubles)
      client.bye(status)
      return status
  except UserError as e:
    client.end(str(e), EXIT_STATUS if is_exhausted(e) else 2)
  except Exception as e:
    client.end_by(e)


def _on_signals(stop: Callable[[int], None]) -> None:
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: stop(number))


def _coordinator_variable() -> tf.Variable:
  """Adds a variable on server 0 to the graph, which holds the coordinator's address and secret."""
  with tf.device(on_server(0)):
    return v1.get_variable('coordinator', initializer='', use_resource=True, trainable=False)


def _publish(target: str, coordinator: Coordinator) -> None:
  with tf.Graph().as_default():
    # TensorFlow's servers answer anyone, so the launcher's secret is not published.
    record = json.dumps([coordinator.address, '' if runtime.secret() else coordinator.secret.hex()])
    publish = _coordinator_variable().assign(record)
    with v1.Session(target, config=cpu_config(device_filters=['/job:ps/task:0'])) as session:
      session.run(publish)


def _connect(cluster: Cluster, patience: float) -> MessageConnection:
  """Waits until server 0 has published the coordinator's address and secret; connects to it.

  A ConnectionError says what is wanted if that takes more than `patience` seconds or fails.
  """
  began = reminded = time.monotonic()
  config = cpu_config(device_filters=['/job:ps/task:0'], operation_timeout_in_ms=5000)
  with tf.Graph().as_default():
    read = _coordinator_variable().read_value()
    while True:
      try:
        # The session's own `with` would close it in a thread, which prints a stack trace.
        opened = v1.Session('grpc://' + cluster.servers[0], config=config)
        with contextlib.closing(opened) as session:
          address, secret = json.loads(session.run(read))
        break
      except tf.errors.OpError:
        pass  # server 0 has not started, or has not published the record
      now = time.monotonic()
      if now - began > patience:
        raise ConnectionError(
          f'ps 0 was lost: it did not answer at {cluster.servers[0]} within {patience:.0f} s; '
          'wanted it started, and its address in TF_CONFIG right'
        )
      if now - reminded > 10:
        reminded = now
        cluster.say(f'waiting for ps 0 at {cluster.servers[0]} ({now - began:.0f} s)')
      time.sleep(0.3)  # between attempts
  try:
    return membership.connect(address, runtime.secret() or bytes.fromhex(secret), patience)
  except ConnectionError as e:
    raise ConnectionError(
      f'cannot reach the coordinator of ps 0 at {address_text(address)}: {e}; wanted this port '
      'open between hosts'
    ) from None
