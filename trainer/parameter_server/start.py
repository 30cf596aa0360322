"""Starts this process's part of a job on parameter servers."""

from collections.abc import Callable

from trainer import runtime
from trainer.job.source import Source
from trainer.parameter_server import membership
from trainer.reporting.status import Status


def train(source: Source, figures: Status, serve_figures: Callable[[], None]) -> int:
  """Runs this process's part of a job on parameter servers; returns the exit status."""
  cfg = source.cfg
  # Before TensorFlow is imported, so that a worker that restarts itself is not taken for lost.
  connection = membership.inherited(cfg.sync.lost_peer_seconds)
  runtime.start(cfg)
  from trainer.parameter_server import run
  from trainer.parameter_server.cluster import Cluster

  cluster = Cluster.from_tf_config(runtime.tf_config(), cfg.sync.mode)
  is_first = cluster.name == 'worker 0'
  if is_first:
    serve_figures()
  return run.run(source.with_measured_values(tells=is_first), cluster, figures, connection)
