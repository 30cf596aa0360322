"""How a process joins a job on servers, and the connection that a worker keeps when it restarts.

A worker that goes back to the last checkpoint replaces its program. The new one takes over the
connection, and sends beats before it imports TensorFlow, so it stays a member all the while.
"""

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from trainer import runtime
from trainer.comm import messages
from trainer.job.source import Source
from trainer.reporting.status import Status


def train(source: Source, figures: Status, serve_figures: Callable[[], None]) -> int:
  """Runs this process's part of a job on parameter servers; returns the exit status."""
  cfg = source.cfg
  # Before TensorFlow is imported, so that a worker that restarts itself is not taken for lost.
  connection = inherited(cfg.sync.lost_peer_seconds)
  runtime.start(cfg)
  from trainer.parameter_server import run
  from trainer.parameter_server.cluster import Cluster

  cluster = Cluster.from_tf_config(runtime.tf_config(), cfg.sync.mode)
  is_first = cluster.name == 'worker 0'
  if is_first:
    serve_figures()
  return run.run(source.with_measured_values(tells=is_first), cluster, figures, connection)


def connect(address: messages.Address, secret: bytes, seconds: float) -> messages.MessageConnection:
  """Connects to a coordinator; ConnectionError if none that knows the secret answers in time."""
  return _with_beats(messages.connect(address, secret, seconds), seconds)


def inherited(seconds: float) -> messages.MessageConnection | None:
  """Returns the connection of the program that this one replaces; None if it replaces none."""
  descriptor = runtime.inherited_connection()
  if descriptor is None:
    return None
  os.set_inheritable(descriptor, False)
  return _with_beats(Connection(descriptor), seconds)


def _with_beats(connection: Connection, seconds: float) -> messages.MessageConnection:
  began = time.monotonic()
  # Until the client of the coordinator reports progress in place of this.
  return messages.MessageConnection(connection, seconds, lambda: ['beat', time.monotonic() - began])
