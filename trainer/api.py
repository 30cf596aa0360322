"""Training from Python: `run = trainer.fit(config)`, `run.predict(frame)`, `trainer.load(run_dir)`.

Training runs in one process, as with `python -m trainer.run` without a launcher. Every command
works on the run_dir that `fit` trains into.
"""

from __future__ import annotations  # so that help() shows Json by its name

import contextlib
import dataclasses
import functools
import html
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa

from trainer import command_line, config, runtime
from trainer.comm.heartbeat import Heartbeat
from trainer.data import frames
from trainer.data.frames import Frame
from trainer.errors import UserError, short
from trainer.job.source import Source
from trainer.plain_data import Json
from trainer.reporting.status import Status
from trainer.wings import wing

if TYPE_CHECKING:  # importing TensorFlow takes seconds, so the config is checked before it
  from trainer.data.passes import Pass
  from trainer.data.prepared import PreparedPass
  from trainer.evaluation.finished_run import FinishedRun
  from trainer.job.callback import Callback

Data = str | os.PathLike | Sequence[str | os.PathLike] | Frame
SPLITS = ('train', 'valid', 'test')
# Of an evaluation's figures; the last two are those of a constant.
_MAIN = ('auc', 'logloss', 'rmse', 'gauc', 'calibration', 'base_logloss', 'base_rmse')


@dataclasses.dataclass(frozen=True)
class Run:
  """A trained model in its run_dir.

  `checkpoint` says which state to use, 'best' (the last one if none was chosen) or 'last'.
  """

  run_dir: str
  cfg: config.Config = dataclasses.field(repr=False)
  checkpoint: str = 'best'

  @property
  def metrics(self) -> pd.DataFrame:
    """The events of metrics.jsonl, one in each row. Fields that are lists or dicts are left out."""
    from trainer.reporting.events import read_events

    events = read_events(self.run_dir)
    return events.loc[:, ~events.map(lambda value: isinstance(value, (dict, list))).any()]

  def evaluate(self, data: Data | None = None) -> 'Figures':
    """Returns the metrics of the model on some data, {name: value}: auc, logloss and so on.

    `data` are patterns of files, or a frame with the columns of the log; by default data.test.
    """
    with self._prepared(data) as (run, prepared):
      return Figures(run.evaluation.figures(prepared))

  def predict(self, data: Data | None = None) -> np.ndarray:
    """Returns the predictions, in input order, float32 [samples], or [samples, tasks].

    `data` is as for `evaluate`; labels, weights and groups are not read and may be missing.
    """
    self.cfg.model.want('interactions', f'predict: run_dir {self.run_dir}')
    with self._prepared(data, labelled=False) as (run, prepared):
      return np.concatenate(list(predictions(run, prepared)))

  def compare(self, other: Run, data: Data | None = None) -> pd.DataFrame:
    """Returns what `trainer.compare` does, of this run and another one."""
    return compare(self, other, data)

  def recommend(self, data: Data | None = None, k: int = 20) -> pd.DataFrame:
    """Returns the best k items for each sample. Only for a run with model.retrieval.

    Columns: sample (from 0, in input order), item and score, the best first. Items for which the
    sample's user has a positive label in data.train or data.valid are left out or, with
    model.retrieval.leave_out: seen, all items of the user there. `data` is as for `evaluate`; only
    the columns of queries and data.group are read.
    """
    self.cfg.model.want('retrieval', f'recommend: run_dir {self.run_dir}')
    _check_count(k)
    with self._prepared(data, labelled=False) as (run, prepared):
      found = run.task.recommendations(run.inputs, run.texts, prepared, k)
      return pa.concat_tables(found).to_pandas()

  def vectors(self) -> pd.DataFrame:
    """Returns the vectors of all trained items. Only for a run with model.retrieval.

    Columns: item, key, and one for each dimension.
    """
    self.cfg.model.want('retrieval', f'vectors: run_dir {self.run_dir}')
    with self._open() as run:
      keys, texts, vectors = run.task.items(run.inputs, run.texts)
    return pd.concat([pd.DataFrame({'item': texts, 'key': keys}), pd.DataFrame(vectors)], axis=1)

  def importance(self, data: Data | None = None) -> pd.DataFrame:
    """Returns how much worse AUC and logloss get if a column is shuffled among all samples.

    There is a row for each column of the log, the most important first. Columns: auc_worse_by,
    auc_plus_minus, logloss_worse_by and logloss_plus_minus; for squared error, rmse_worse_by and
    rmse_plus_minus. A plus_minus is half the width of the 95 % interval of its worse_by. If it is
    the larger of the two, the effect may be chance. All that is made of a column is shuffled with
    it. `data` is as for `evaluate`, but by default data.valid, if there is one.
    """
    self.cfg.model.want('interactions', f'importance: run_dir {self.run_dir}')
    data = self.cfg.data.valid or None if data is None else data
    with self._prepared(data) as (run, prepared):
      return wing('tools.importance')(run, prepared)

  def features(self, slot: str) -> pd.DataFrame:
    """Returns the features of a slot, those with the most shows first.

    Columns: text, key, show, click, unseen_days, admitted, linear, and factors if the model has
    any. The text comes from data.keep_texts or from the passes of data.train; None if neither has
    it. show and click, the impressions and clicks, are sums over all epochs that the state was
    trained in, and of the run of --init_from; if a slot has `counts`, they are those of one epoch.
    If other slots share the slot, such as a history, they also count its features there.
    """
    from trainer.storage.checkpoint_reader import CheckpointReader

    return CheckpointReader(self.run_dir, self.checkpoint).most_shown(slot)[0]

  def embeddings(self, slot: str) -> pd.DataFrame:
    """Returns the factors of a slot's admitted features: columns text, key, and each dimension."""
    table = self.features(slot)
    table = table[table['admitted']] if 'factors' in table else table[:0]
    factors = pd.DataFrame(table['factors'].tolist() if len(table) else [], index=table.index)
    return pd.concat([table[['text', 'key']], factors], axis=1).reset_index(drop=True)

  def neighbours(self, slot: str, text: str, k: int = 10, least_shows: float = 0) -> pd.DataFrame:
    """Returns the features of a slot whose factors are most like those of one of them.

    Columns: text, key, show and cosine, that of the two factors; the nearest first. `text` is as
    written in the log; for a cross its parts, 'a × b'. Features with fewer shows (see `features`)
    than `least_shows` are left out: factors that few samples have trained are near by chance.
    """
    from trainer.storage.checkpoint_reader import CheckpointReader

    _check_count(k)
    if not isinstance(least_shows, (int, float, np.number)):
      raise UserError(f'least_shows: {frames.found(least_shows)}; wanted a number')
    reader = CheckpointReader(self.run_dir, self.checkpoint)
    return reader.neighbours(slot, str(text), k, least_shows)

  def report(self) -> 'ReportPage':
    """Writes report.html. A notebook shows it if the call ends a cell."""
    path = os.path.join(self.run_dir, 'report.html')
    wing('tools.report')([self.run_dir], path)
    return ReportPage(path)

  def _open(
    self, overrides: Sequence[str] = ()
  ) -> contextlib.AbstractContextManager['FinishedRun']:
    from trainer.evaluation.finished_run import open_run

    return open_run(self.run_dir, overrides, self.checkpoint)

  @contextlib.contextmanager
  def _prepared(
    self, data: Data | None, labelled: bool = True
  ) -> Iterator[tuple['FinishedRun', list['PreparedPass']]]:
    """Yields the opened run and the prepared passes of `data`, by default of data.test."""
    # Without labels a bad record is an error: dropping it would shift the predictions after it.
    overrides = [] if labelled else ['data.max_bad_share=0']
    patterns = [] if data is None or frames.is_frame(data) else _patterns(data)
    with self._open(overrides) as run:
      if not frames.is_frame(data):
        yield run, run.inputs.prepared(passes_to_score(run, patterns), 'api', labelled)
        return
      from trainer.data.conversion import prepare_table
      from trainer.data.prepared import PreparedPass
      from trainer.data.schema import wanted_columns

      table = frames.table_of(data, wanted_columns(run.cfg, labelled), run.cfg.data.made)
      with tempfile.TemporaryDirectory(prefix='ctr-frame-') as folder:
        prepare_table(run.cfg, table, frames.FRAME, f'{folder}/frame', labelled)
        yield run, [PreparedPass(f'{folder}/frame', run.cfg)]


def compare(
  first: Run | Sequence[Run], other: Run | Sequence[Run], data: Data | None = None
) -> pd.DataFrame:
  """Returns the metrics of two models on the same samples, with paired 95 % intervals.

  Each side is a run, or a list of runs that differ by the seed alone; the i-th of both are a pair.
  With one run a side the interval is of the samples alone: whether these two states differ. With
  several it is also of the seeds: whether the settings do. Three to five make it much narrower than
  two.

  Columns: task, metric, first and other (means over the runs), difference (other − first), low and
  high. The difference may be chance if 0 lies between low and high. `data` is as for
  `Run.evaluate`.
  """
  first, other = ([side] if isinstance(side, Run) else side for side in (first, other))
  if not len(first) == len(other) > 0:
    found = f'found {len(first)} and {len(other)} runs'
    raise UserError(f'compare: {found}; wanted as many on both sides')
  data, scores = first[0].cfg.data.test or None if data is None else data, []
  for run in (*first, *other):
    run.cfg.model.want('interactions', f'compare: run_dir {run.run_dir}')
    with run._prepared(data) as opened:
      scores.append(wing('tools.scored')(*opened))
  return wing('tools.differences')(scores[: len(first)], scores[len(first) :])


def _patterns(data: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
  """Returns the patterns of files that `data` gives: one, or several in a list."""
  is_list = isinstance(data, (list, tuple)) and len(data) > 0
  some = data if is_list else [data]
  for pattern in some:
    if not isinstance(pattern, (str, os.PathLike)):
      wanted = 'one frame (pandas, Polars, Arrow), or patterns of files'
      raise UserError(f'data: {frames.found(pattern)}{" in a list" * is_list}; wanted {wanted}')
  return [os.fsdecode(pattern) for pattern in some]


def _check_count(k: int) -> None:
  if not isinstance(k, (int, np.integer)) or k < 1:
    raise UserError(f'k: {frames.found(k)}; wanted a whole number above 0')


class Figures(dict[str, Json]):
  """The figures of an evaluation, {name: value}; `repr` shows the values of the main ones.

  These are the ones of _MAIN, such as auc, that the model has, in all and for each task; if it has
  none of them (model.retrieval), all float figures. Of the other figures `repr` shows the names.
  """

  def __repr__(self) -> str:
    main = [name for name in _MAIN if self.get(name) is not None]
    main = main or [name for name, value in self.items() if isinstance(value, float)]
    lines = ['  '.join(f'{name} {self[name]:.4g}' for name in main)]
    tasks = self.get('tasks', {})
    lines += [f'{name}: {Figures(values)!r}'.partition('\n')[0] for name, values in tasks.items()]
    rest = ', '.join(name for name in self if name not in main)
    return '\n'.join([*lines, f'also: {rest}'])


@dataclasses.dataclass(frozen=True)
class ReportPage:
  """The path of an HTML page; a notebook shows the page itself."""

  path: str

  def _repr_html_(self) -> str:
    with open(self.path, encoding='utf-8') as f:
      page = html.escape(f.read())
    return f'<iframe srcdoc="{page}" width="100%" height="900" style="border: 0"></iframe>'


def fit(
  configuration: str | os.PathLike | Mapping[str, Json],
  overrides: Sequence[str] = (),
  run_dir: str | os.PathLike | None = None,
  *,
  train: Frame | Sequence[Frame] | None = None,
  valid: Frame | None = None,
  test: Frame | None = None,
  callbacks: Sequence['Callback'] = (),
) -> Run:
  """Trains a model in this process, or continues the run that run_dir holds.

  Args:
    configuration: a YAML file, or its content as a dict.
    overrides: settings as strings `a.b=value`.
    run_dir: replaces the config's run_dir.
    train: a frame with the columns of the log (pandas, Polars, Arrow), or a list of frames, one a
      pass. It replaces data.train, and is written into run_dir/frames as Parquet.
    valid: a frame that replaces data.valid.
    test: a frame that replaces data.test.
    callbacks: objects that are told what happens during training.
  Raises:
    UserError: if the config or the data are wrong; the message is one line.
    KeyboardInterrupt: if Ctrl-C or SIGTERM stopped the training. The state is saved; the same call
      continues the run.
  """
  is_list = isinstance(overrides, (list, tuple))
  if not (is_list and all(isinstance(text, str) for text in overrides)):
    wanted = "a list of settings, as ['train.epochs=2']"
    raise UserError(f'overrides: found {short(overrides)}; wanted {wanted}')
  if isinstance(configuration, os.PathLike):
    configuration = os.fsdecode(configuration)
  run_dir = None if run_dir is None else _directory(run_dir)
  data = configuration.get('data') if isinstance(configuration, Mapping) else None
  if isinstance(data, Mapping):
    for split in SPLITS:
      if frames.is_frame(data.get(split)):
        raise UserError(f'data.{split}: found a frame; wanted fit(config, {split}=frame)')
  _check_callbacks(callbacks)
  frames_by_split = {s: f for s, f in zip(SPLITS, (train, valid, test)) if f is not None}
  frames.check_frames(frames_by_split)
  source = Source(configuration, overrides, run_dir, frames_by_split)
  cfg = source.cfg
  if cfg.sync.mode != 'allreduce':
    raise UserError(f"sync.mode: found '{cfg.sync.mode}'; wanted 'allreduce', one process, in fit")
  handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    status, cfg = train_here(source, callbacks=callbacks)
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
  if status > command_line.SIGNALLED:
    raise KeyboardInterrupt(f'run_dir {cfg.run_dir}: stopped, its state is saved')
  return Run(cfg.run_dir, cfg)


def _check_callbacks(callbacks: Sequence['Callback']) -> None:
  from trainer.job.callback import Callback

  is_list = isinstance(callbacks, Sequence)
  wrong = [c for c in callbacks if not isinstance(c, Callback)] if is_list else [callbacks]
  if wrong:
    wanted = 'wanted a list of objects whose classes derive from trainer.Callback'
    raise UserError(f'callbacks: found {short(wrong[0])}; {wanted}')


def _directory(run_dir: str | os.PathLike) -> str:
  if not isinstance(run_dir, (str, os.PathLike)):
    raise UserError(f'run_dir: {frames.found(run_dir)}; wanted the path of a directory')
  return os.fsdecode(run_dir)


def load(run_dir: str | os.PathLike, checkpoint: str = 'best') -> Run:
  """Returns the run in a run_dir; `checkpoint` is 'best' or 'last', see `Run`."""
  run_dir = _directory(run_dir)
  if checkpoint not in ('best', 'last'):
    raise UserError(f"checkpoint: found {short(checkpoint)}; wanted 'best' or 'last'")
  cfg = config.load_of_run(run_dir)
  runtime.start(cfg)
  _check_keras()
  return Run(run_dir, cfg, checkpoint)


def train_here(
  source: Source,
  here: runtime.Runtime = runtime.Runtime(),
  init_from: str | None = None,
  callbacks: Sequence['Callback'] = (),
  status: Status | None = None,
) -> tuple[int, config.Config]:
  """Trains in this process, one rank of several or alone; returns the exit status, and the config.

  `here` is its place among the ranks, by default alone. A new run begins with the features and
  layers of the run_dir `init_from`. `status` is told how the job goes.
  """
  cfg = source.cfg
  with contextlib.ExitStack() as stack:
    # The heartbeat starts before TensorFlow, so that other ranks notice if this one dies early.
    heartbeat = stack.enter_context(Heartbeat(here, cfg)) if here.size > 1 else None
    runtime.start(cfg, here, heartbeat and heartbeat.end)
    _check_keras()
    from trainer.comm import horovod
    from trainer.embedding.stores import plain_disk_errors
    from trainer.evaluation.task import task_of
    from trainer.job.job import Job
    from trainer.job.race import reached
    from trainer.model.builder import check_layers
    from trainer.storage.bucket import Bucket
    from trainer.training import dense_dtype

    stack.enter_context(plain_disk_errors())
    communicator = horovod.communicator(here, cfg.sync)
    bucket = Bucket(source.bucket, cfg.run_dir) if source.bucket else None
    if bucket:
      communicator.together('', lambda: None if here.rank else bucket.download())
    communicator.together('', lambda: check_layers(cfg.model))  # before the log is read
    status = status or Status('trainer', cfg.sync.stalled_peer_seconds)
    if heartbeat:
      status.also = heartbeat.progress
    race = functools.partial(reached, progress_made=status.progress)
    cfg = source.with_measured_values(here.rank == 0, init_from, communicator.on_first, race)
    dtype = dense_dtype.chosen(cfg.train.dense_dtype, cfg.run_dir, communicator)
    step = task_of(cfg).step(communicator, dtype)
    job = Job(cfg, communicator, step, status, init_from, callbacks, bucket)
    if heartbeat:
      heartbeat.tell_lost = job.tell_lost
    stopped_by = job.run()
    troubles = job.close()
    communicator.barrier()
  return command_line.status(stopped_by, troubles), cfg


def passes_to_score(run: 'FinishedRun', patterns: Sequence[str]) -> list['Pass']:
  """Returns the passes that the patterns match; without patterns, those of data.test.

  Raises a UserError if data.test is empty too.
  """
  from trainer.data.passes import passes

  patterns = patterns or run.cfg.data.test
  if not patterns:
    raise UserError('no data to score: found neither --data (in Python: data) nor data.test')
  return passes(run.cfg.data, patterns, '--data')


def predictions(run: 'FinishedRun', prepared: Sequence['PreparedPass']) -> Iterator[np.ndarray]:
  """Yields the predictions of `Run.predict` in batches, on rank 0 only. Every rank must iterate."""
  communicator = run.communicator
  for data_pass in prepared:
    for _, own in run.evaluation.predict(data_pass):
      # The shares of all ranks, joined, are the batch.
      shares = [own if rank == 0 else None for rank in range(communicator.size)]
      shares = communicator.exchange(shares)
      if communicator.rank == 0:
        yield np.concatenate(shares)
  run.evaluation.tell_unknown()


def _check_keras() -> None:
  import tensorflow as tf

  if (version := getattr(tf.keras, '__version__', '2')) >= '3':  # legacy Keras has no __version__
    wanted = 'import trainer before TensorFlow, or set TF_USE_LEGACY_KERAS=1'
    raise UserError(f'Keras {version} is active; wanted Keras 2: {wanted}')
