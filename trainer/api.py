"""Training from Python: `run = trainer.fit(config)`, `run.predict(frame)`, `trainer.load(run_dir)`.

One process, as `python -m trainer.run` without a launcher; the run_dir is the same, so that every
command works on it too. The commands themselves are what stands here, with flags.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml
from absl import logging

from trainer import command_line, config, runtime
from trainer.comm.heartbeat import Heartbeat
from trainer.config import effects
from trainer.data.log_files import is_directory, matching, normal
from trainer.errors import ConfigError, UserError
from trainer.plain_data import Json, JsonObject

if TYPE_CHECKING:  # TensorFlow takes seconds to import: it comes after the config was checked
  from trainer.data.passes import Pass
  from trainer.data.prepared import PreparedPass
  from trainer.training.finished_run import FinishedRun


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

  def evaluate(self, data: str | Sequence[str] | pd.DataFrame | None = None) -> JsonObject:
    """Returns auc, logloss, calibration and so on.

    Args:
      data: patterns of files, or a frame with the columns of the log; data.test where left out.
    """
    with self._open() as run, _patterns(self.cfg, data) as patterns:
      return run.evaluation.evaluate(run.inputs.prepared(passes_to_score(run, patterns), 'api'))

  def predict(self, data: str | Sequence[str] | pd.DataFrame | None = None) -> np.ndarray:
    """Returns the predictions in input order.

    Args:
      data: as of `evaluate`; labels, weights and groups are not read and may be missing.
    Returns:
      float32 [samples]; [samples, tasks] where the model has several.
    """
    # A bad record ends it: dropped ones would shift the predictions after them.
    with (
      self._open(['data.max_bad_share=0']) as run,
      _patterns(self.cfg, data, labelled=False) as patterns,
    ):
      prepared = run.inputs.prepared(passes_to_score(run, patterns), 'api', labelled=False)
      return np.concatenate(list(predictions(run, prepared)))

  def _open(
    self, overrides: Sequence[str] = ()
  ) -> contextlib.AbstractContextManager['FinishedRun']:
    from trainer.training.finished_run import open_run

    return open_run(self.run_dir, overrides, self.checkpoint)


def fit(
  configuration: str | Mapping[str, Json], overrides: Sequence[str] = (), run_dir: str | None = None
) -> Run:
  """Trains a model in this process; a run_dir that holds the run already is continued.

  Args:
    configuration: a YAML file, or what stands in one as a dict.
    overrides: strings `a.b=value`.
    run_dir: replaces that of the config.
  Raises:
    UserError: with one line, where the config or the data are wrong.
    KeyboardInterrupt: where it was asked to stop, by Ctrl-C or SIGTERM. The state is saved; the
      same call continues.
  """
  source = Source(configuration, overrides, run_dir)
  cfg = source.cfg
  if cfg.sync.mode != 'allreduce':
    raise UserError(f"sync.mode: found '{cfg.sync.mode}'; wanted 'allreduce', one process, in fit")
  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    status = train(source)
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
  if status > command_line.SIGNALLED:
    raise KeyboardInterrupt(f'run_dir {cfg.run_dir}: stopped, its state is saved')
  return Run(cfg.run_dir, config.load_of_run(cfg.run_dir))


def load(run_dir: str, checkpoint: str = 'best') -> Run:
  """Returns the run in a run_dir.

  Args:
    run_dir: of trainer.run or of `fit`.
    checkpoint: best or last.
  Raises:
    UserError: where there is none.
  """
  cfg = config.load_of_run(run_dir)
  _start(cfg)
  return Run(run_dir, cfg, checkpoint)


@dataclasses.dataclass(frozen=True)
class Source:
  """Where the config of a job that trains comes from.

  Attributes:
    configuration: a YAML file, or what stands in one as a dict.
    overrides: strings `a.b=value`.
    run_dir: replaces that of the config.
  """

  configuration: str | Mapping[str, Json]
  overrides: Sequence[str] = ()
  run_dir: str | None = None

  @functools.cached_property
  def cfg(self) -> config.Config:
    """The config, once it was checked that what it names is there. Raises: ConfigError."""
    cfg, where = self._parsed(), self._where()
    effects.check_effects(cfg, where)
    for key in ('train', 'valid', 'test'):
      try:
        matching(getattr(cfg.data, key), f'{where}: data.{key}')
      except ConfigError as e:
        raise ConfigError(f'{e}; {config.columns_wanted(cfg, where)}') from None
    if cfg.data.watch and not is_directory(normal(cfg.data.watch)):
      raise ConfigError(
        f"{where}: data.watch: found '{cfg.data.watch}', which is no directory; wanted one where "
        'passes arrive'
      )
    return cfg

  def for_its_log(self, tells: bool = True) -> config.Config:
    """Returns `cfg`; where no batch size is given, a small log gets one that suits it.

    It imports TensorFlow and reads the beginning of the log.

    Args:
      tells: whether the size, and settings without effect, are told.
    """
    cfg = self.cfg
    if tells:
      for line in effects.warnings(cfg):
        logging.warning('%s', line)
    if 'batch_size' in cfg.train.model_fields_set:
      return cfg
    if (size := config.measured_batch_size(cfg.run_dir)) is not None:
      if tells:
        print(f'train.batch_size: {size}, measured when the run began', flush=True)
      return self._parsed(size)
    from trainer.data.batch_size import suitable

    size, samples = suitable(cfg)
    if tells and size != cfg.train.batch_size:
      print(
        f'train.batch_size: {size}, measured: the log has {samples:,} samples '
        f'({cfg.train.batch_size} in a large one)',
        flush=True,
      )
    return self._parsed(size)

  def _where(self) -> str:
    return self.configuration if isinstance(self.configuration, str) else 'config'

  def _parsed(self, batch_size: int | None = None) -> config.Config:
    if isinstance(self.configuration, str):
      return config.load(self.configuration, self.overrides, self.run_dir, batch_size)
    text = yaml.safe_dump(dict(self.configuration))
    return config.parse(text, self._where(), self.overrides, self.run_dir, batch_size)


def train(
  source: Source, here: runtime.Runtime = runtime.Runtime(), init_from: str | None = None
) -> int:
  """Trains in this process, which may be one rank of several.

  Args:
    source: of the config.
    here: where this process stands.
    init_from: a run_dir whose features and layers a new run begins with.
  Returns:
    The exit status.
  """
  cfg = source.cfg
  with contextlib.ExitStack() as stack:
    # Before TensorFlow, so that the others hear of a rank that is lost while it starts.
    heartbeat = stack.enter_context(Heartbeat(here, cfg)) if here.size > 1 else None
    _start(cfg, here)
    from trainer.comm import horovod
    from trainer.training import dense_dtype
    from trainer.training.job import Job
    from trainer.training.step import TrainStep

    cfg = source.for_its_log(tells=here.rank == 0)
    communicator = horovod.communicator(here, cfg.sync)
    step = TrainStep(cfg, communicator, dense_dtype.chosen(cfg, communicator))
    progress_made = heartbeat.progress if heartbeat else lambda: None
    job = Job(cfg, communicator, step, progress_made, init_from=init_from)
    if heartbeat:
      heartbeat.tell_lost = job.tell_lost
    stopped_by = job.run()
    troubles = job.close()
    communicator.barrier()
  return command_line.status(stopped_by, troubles)


def passes_to_score(run: 'FinishedRun', patterns: Sequence[str]) -> list['Pass']:
  """Returns the passes that patterns of files name, or data.test where there are no patterns.

  Raises:
    UserError: where there is neither.
  """
  from trainer.data.passes import passes

  patterns = patterns or run.cfg.data.test
  if not patterns:
    raise UserError('--data: found none, and the config has no data.test; wanted files')
  return passes(run.cfg, patterns, '--data')


def predictions(run: 'FinishedRun', prepared: Sequence['PreparedPass']) -> Iterator[np.ndarray]:
  """Yields the predictions on passes, in order, on rank 0; every rank takes part.

  Yields:
    float32 [B], or [B, T] of several tasks.
  """
  communicator = run.communicator
  for data_pass in prepared:
    for _, own in run.evaluation.predict(data_pass):
      # The ranks' shares of a batch, side by side, are the batch.
      shares = [own if rank == 0 else None for rank in range(communicator.size)]
      shares = communicator.exchange(shares)
      if communicator.rank == 0:
        yield np.concatenate(shares)
  run.evaluation.tell_unknown()


def _start(cfg: config.Config, here: runtime.Runtime = runtime.Runtime()) -> None:
  runtime.start(cfg, here)
  import tensorflow as tf

  if (version := getattr(tf.keras, '__version__', '2')) >= '3':  # legacy Keras does not say it
    raise UserError(
      f'Keras {version} is active; wanted Keras 2: use trainer before TensorFlow is '
      'imported, or set TF_USE_LEGACY_KERAS=1'
    )


@contextlib.contextmanager
def _patterns(
  cfg: config.Config, data: str | Sequence[str] | pd.DataFrame | None, labelled: bool = True
) -> Iterator[Sequence[str]]:
  """The files of `data`; for the time of a `with` a frame is one, written as the log is."""
  if not isinstance(data, pd.DataFrame):
    yield [data] if isinstance(data, str) else data or []
    return
  from trainer.data.parse import WHOLE_NUMBER, whole_numbers
  from trainer.data.schema import wanted_columns

  for slot in cfg.data.slots:
    column = data.get(slot.column or slot.name)
    if column is None or not pd.api.types.is_float_dtype(column):
      continue
    _, wrong = whole_numbers(pa.Array.from_pandas(column))
    if wrong.any():
      found = column.iloc[int(wrong.argmax())]
      raise UserError(f"data: column '{column.name}': found {found}; wanted {WHOLE_NUMBER}")
  with tempfile.TemporaryDirectory(prefix='ctr-frame-') as folder:
    if cfg.data.format not in (None, 'csv'):
      path = os.path.join(folder, 'frame.parquet')
      data.to_parquet(path, index=False)
    else:
      path = os.path.join(folder, 'frame.csv')
      columns, wanted = cfg.data.columns, wanted_columns(cfg, labelled)
      missing = [c for c in columns or () if c not in data]
      for column in missing:
        if column in wanted:
          raise UserError(f"data: the frame has no column '{column}' ({wanted[column]})")
      frame = data.assign(**dict.fromkeys(missing, ''))
      frame.to_csv(
        path, sep=cfg.data.delimiter, index=False, columns=columns, header=columns is None
      )
    yield [path]
