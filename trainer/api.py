"""Training from Python: `run = trainer.fit(config)`, `run.predict(frame)`, `trainer.load(run_dir)`.

One process, as `python -m trainer.run` without a launcher; the run_dir is the same, so that every
command works on it too.
"""

import dataclasses
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import yaml

from trainer import config, runtime
from trainer.data.log_files import matching
from trainer.errors import UserError


@dataclasses.dataclass(frozen=True)
class Run:
  """A trained model in its run_dir.

  Attributes:
    run_dir: where it is kept.
    cfg: its config.
    checkpoint: which state is used: best (by validation, where there is one) or last.
  """

  run_dir: str
  cfg: config.Config
  checkpoint: str = 'best'

  @property
  def metrics(self) -> pd.DataFrame:
    """The events of the run, a row each: metrics.jsonl."""
    from trainer.reporting.events import read_events

    return read_events(self.run_dir)

  def evaluate(self, data: str | Sequence[str] | pd.DataFrame | None = None) -> dict[str, Any]:
    """Returns auc, logloss, calibration and so on.

    Args:
      data: patterns of files, or a frame with the columns of the log; data.test where left out.
    """
    from trainer.data.passes import passes
    from trainer.training.job import finished_job

    with (
      tempfile.TemporaryDirectory(prefix='ctr-frame-') as folder,
      finished_job(self.run_dir, (), self.checkpoint) as job,
    ):
      patterns = _patterns(self.cfg, data, folder)
      if not patterns:
        raise UserError(
          'data: found none, and the config has no data.test; wanted files or a frame'
        )
      return job.evaluation.evaluate(job.inputs.prepared(passes(job.cfg, patterns, 'data'), 'api'))

  def predict(self, data: str | Sequence[str] | pd.DataFrame) -> np.ndarray:
    """Returns the predictions in input order.

    Args:
      data: patterns of files, or a frame with the columns of the log; labels may be left out of it.
    Returns:
      float32 [samples]; [samples, tasks] where the model has several.
    """
    from trainer.data.passes import passes
    from trainer.training.job import finished_job

    with (
      tempfile.TemporaryDirectory(prefix='ctr-frame-') as folder,
      finished_job(self.run_dir, ['data.max_bad_share=0'], self.checkpoint) as job,
    ):
      found = passes(job.cfg, _patterns(self.cfg, data, folder), 'data')
      parts = [
        probabilities
        for one in job.inputs.prepared(found, 'api')
        for _, probabilities in job.evaluation.predict(one)
      ]
      return np.concatenate(parts)


def fit(
  configuration: str | Mapping[str, Any], overrides: Sequence[str] = (), run_dir: str | None = None
) -> Run:
  """Trains a model in this process; a run_dir that holds the run already is continued.

  Args:
    configuration: a YAML file, or what stands in one as a dict.
    overrides: strings `a.b=value`.
    run_dir: replaces that of the config.
  Raises:
    UserError: with one line, where the config or the data are wrong.
  """
  if isinstance(configuration, str):
    cfg = config.load(configuration, overrides, run_dir)
  else:
    cfg = config.parse(yaml.safe_dump(dict(configuration)), 'fit', overrides, run_dir)
  if cfg.sync.mode != 'allreduce':
    raise UserError(f"sync.mode: found '{cfg.sync.mode}'; wanted 'allreduce', one process, in fit")
  config.check_effects(cfg, 'fit')
  for key in ('train', 'valid', 'test'):
    matching(getattr(cfg.data, key), f'data.{key}')
  _start(cfg)
  from trainer.comm.communicator import SingleProcess
  from trainer.training.job import Job
  from trainer.training.step import TrainStep

  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    job = Job(cfg, SingleProcess(), TrainStep(cfg, SingleProcess()))
    job.run()
    job.close()
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
  return Run(cfg.run_dir, cfg)


def load(run_dir: str, checkpoint: str = 'best') -> Run:
  """Returns the run in a run_dir.

  Args:
    run_dir: of trainer.run or of `fit`.
    checkpoint: best or last.
  Raises:
    UserError: where there is none.
  """
  path = os.path.join(run_dir, 'config.yaml')
  if not os.path.exists(path):
    raise UserError(f'run_dir {run_dir}: no config.yaml there; wanted that of a training run')
  cfg = config.load(path, (), run_dir)
  _start(cfg)
  return Run(run_dir, cfg, checkpoint)


def _start(cfg: config.Config) -> None:
  runtime.start(cfg)
  import tensorflow as tf

  if (version := getattr(tf.keras, '__version__', '2')) >= '3':  # legacy Keras does not say it
    raise UserError(
      f'Keras {version} is active; wanted Keras 2: use trainer before TensorFlow is '
      'imported, or set TF_USE_LEGACY_KERAS=1'
    )


def _patterns(
  cfg: config.Config, data: str | Sequence[str] | pd.DataFrame | None, folder: str
) -> list[str]:
  """The files of `data`; a frame is written into `folder`, as the log is."""
  if data is None:
    return cfg.data.test
  if not isinstance(data, pd.DataFrame):
    return [data] if isinstance(data, str) else list(data)
  labels = [label.column or label.name for label in cfg.labels]
  needed = [*labels, cfg.data.weight, cfg.data.group]
  frame = data.assign(**{c: 0 for c in needed if c is not None and c not in data})
  if cfg.data.format not in (None, 'csv'):
    path = os.path.join(folder, 'frame.parquet')
    frame.to_parquet(path, index=False)
    return [path]
  path = os.path.join(folder, 'frame.csv')
  columns = cfg.data.columns
  frame.to_csv(path, sep=cfg.data.delimiter, index=False, columns=columns, header=columns is None)
  return [path]
