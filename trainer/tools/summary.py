"""Describes a run in sentences: what was trained, which state is kept, and how fast it was."""

from collections.abc import Iterator

import pandas as pd

from trainer.config import METRICS
from trainer.reporting.metric_text import counted, metric_text, plus_minus
from trainer.tools.runs import RecordedRun

NAMES = {name: metric.title for name, metric in METRICS.items()}
DAYS_OF_A_FORECAST = 7  # the last days, whose growth tells when the disk will be full


def state(run: RecordedRun) -> str:
  """Returns 'finished', 'stopped', or 'unfinished' for a run that is at work or was killed."""
  last = run.events[run.events['event'].isin(['start', 'end'])].tail(1)
  return next((row['status'] for _, row in last.iterrows() if row['event'] == 'end'), 'unfinished')


def summary(run: RecordedRun) -> list[str]:
  """Returns sentences on the model, the data, the kept state, the speed, and how the run ended."""
  cfg, trained, told = run.cfg, run.of('train'), []
  if 'dropped' in run.events:
    since = f'step {run.events["step"].iloc[:2].iloc[-1]:,}'
    told.append(
      f'Events before {since} were dropped (report.keep_mb): all this is of what followed.'
    )
  used = dict.fromkeys(i.kind.rpartition('.')[2] for i in cfg.model.all_interactions().values())
  kinds = ', '.join(used) or f'two towers with {cfg.model.retrieval.loss}'
  model = f'A model of {kinds} over {counted(len(cfg.data.slots), "slot")}'
  model += f' and {counted(len(cfg.data.dense), "dense column")}' * bool(cfg.data.dense)
  if not len(trained):
    told.append(f'{model}: no pass was trained to its end yet.')
  else:
    days, passes, epochs = (trained[field].nunique() for field in ('day', 'pass', 'epoch'))
    of = counted(passes, 'pass') + f' of {counted(days, "day")}' * (days > 0)
    of += f', in {epochs} epochs' * (epochs > 1)
    told.append(f'{model} was trained on {run.samples:,.0f} samples: {of}.')
  told += _kept(run.deciding)
  if len(trained):
    speed = f'{trained["examples_per_second"].median():,.0f} samples/s (median)'
    for processes in run.of('start').tail(1).get('processes', ()):
      speed += f' on {counted(processes, "process")}'
    seconds = sum(sum(parts.values()) for parts in trained['seconds'].dropna())
    took = f' took {_duration(seconds)} in all; its passes' if seconds else ''
    told.append(f'Training{took} ran at {speed}.')
  for _, last in run.events[run.events['event'].isin(['train', 'day_end'])].tail(1).iterrows():
    features = f'{last["features"]:,.0f} features, {last["admitted"]:,.0f} of them admitted'
    told.append(f'The tables hold {features}, in {last["table_bytes"] / 1e6:,.1f} MB.')
  told += _disk(run)
  times = pd.to_datetime(run.events['time'].tail(1), unit='s')
  when = f'{times.iloc[0]:%Y-%m-%d %H:%M:%S} UTC' if len(times) else 'none yet'
  if (how := state(run)) == 'unfinished':
    told.append(f'The run is still at work, or was killed; its last event: {when}.')
  elif how == 'stopped':
    told.append('The run was asked to stop, and its state was saved.')
  return told


def _duration(seconds: float) -> str:
  if seconds < 120:
    return f'{seconds:.0f} s'
  return f'{seconds / 60:.0f} min' if seconds < 7200 else f'{seconds / 3600:.1f} h'


def _kept(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence that says which state is kept for prediction, and its metric."""
  name, best = f'{run.task} {NAMES.get(run.metric, run.metric)}'.strip(), run.best
  if best is not None:
    value = metric_text(run.metric, best[run.metric])
    yield (
      f'The state of epoch {best["epoch"]:.0f} (step {best["step"]:,.0f}) is kept for prediction: '
      f'its {name} on data.valid is the best, {value}'
      f'{plus_minus(run.metric, best, bool(run.task))}.'
    )
    return
  ahead = run.evaluated('next')
  if run.metric in ahead and ahead[run.metric].notna().any():
    ahead = ahead.dropna(subset=[run.metric])
    last = ahead.iloc[-1]
    value = metric_text(run.metric, last[run.metric])
    text = f'Before the training on {last["pass"]}, its {name} was {value}'
    if len(ahead) > 1:
      median = metric_text(run.metric, ahead[run.metric].median())
      text += f'; the median of {len(ahead):,} passes is {median}'
    yield f'The last state is kept for prediction. {text}.'


def _disk(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence on the size of the run_dir and, if it grows, when its disk will be full."""
  ends = run.of('day_end').dropna(subset='disk_bytes').tail(1 + DAYS_OF_A_FORECAST)
  if not len(ends):
    return
  last = ends.iloc[-1]
  text = f'The run_dir takes {last["disk_bytes"] / 1e6:,.1f} MB'
  grown = last['disk_bytes'] - ends.iloc[0]['disk_bytes']
  if grown <= 0:
    yield f'{text}, and {last["disk_free"] / 1e9:,.1f} GB of its disk are free.'
    return
  a_day = grown / (len(ends) - 1)
  days = last['disk_free'] / a_day
  yield f'{text} and grows by {a_day / 1e6:,.1f} MB a day: its disk is full in {days:,.0f} days.'
