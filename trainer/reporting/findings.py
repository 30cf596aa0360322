"""Describes a run in sentences: what was trained, its metrics and speed, and what went wrong."""

import statistics
from collections.abc import Iterator

import numpy as np
import pandas as pd

from trainer.config import METRICS
from trainer.model.slices import auc_interval_of
from trainer.reporting import model_findings as of_model
from trainer.reporting.metric_text import listed, metric_text, plus_minus
from trainer.reporting.runs import RecordedRun

NAMES = {name: metric.title for name, metric in METRICS.items()}

# Thresholds beyond which a fault is reported.
BLANK_JUMP = 0.5  # rise of a slot's blank share above the median of the earlier passes
LABEL_FACTOR = 3.0  # ratio between a pass's click rate and the median of the others
LABEL_AUC_DROP = 0.1  # how far a pass's AUC lies below the median of the others
DRIFTED = 0.25  # population stability index, as in trainer.training.drift
UNIQUE, LEAST_UNIQUE = 0.5, 1000  # a slot's features per impression, and number of features
DAYS_OF_A_FORECAST = 7  # the last days, whose growth tells when the disk will be full


def _count(number: float, noun: str) -> str:
  return f'{number:,.0f} {noun}{"s" * (number != 1)}'


def state(run: RecordedRun) -> str:
  """Returns 'finished', 'stopped', or 'unfinished' for a run that is at work or was killed."""
  ends = run.of('end')
  starts = run.of('start')
  is_over = len(ends) and (not len(starts) or ends.index[-1] > starts.index[-1])
  return str(ends.iloc[-1]['status']) if is_over else 'unfinished'


def summary(run: RecordedRun) -> list[str]:
  """Returns sentences on the model, the data, the kept state, the speed, and how the run ended."""
  cfg, trained, told = run.cfg, run.of('train'), []
  used = dict.fromkeys(i.kind.rpartition('.')[2] for i in cfg.model.all_interactions().values())
  kinds = ', '.join(used) or f'two towers with {cfg.model.retrieval.loss}'
  model = f'A model of {kinds} over {_count(len(cfg.data.slots), "slot")}'
  model += f' and {_count(len(cfg.data.dense), "dense column")}' * bool(cfg.data.dense)
  if not len(trained):
    told.append(f'{model}: no pass was trained to its end yet.')
  else:
    days, passes = trained['day'].nunique(), trained['pass'].nunique()
    count = f'{passes:,} pass{"es" * (passes > 1)}'
    count += f' of {days:,} day{"s" * (days > 1)}' * (days > 0)
    epochs = trained['epoch'].nunique()
    count += f', in {epochs} epochs' * (epochs > 1)
    told.append(f'{model} was trained on {run.samples:,.0f} samples: {count}.')
  told += _kept(run.deciding)
  if len(trained):
    speed = f'{trained["examples_per_second"].median():,.0f} samples/s (median)'
    for processes in run.of('start').tail(1).get('processes', ()):
      speed += f' on {processes:.0f} process{"es" * (processes > 1)}'
    seconds = sum(sum(parts.values()) for parts in trained['seconds'].dropna())
    took = f' took {_duration(seconds)} in all; its passes' if seconds else ''
    told.append(f'Training{took} ran at {speed}.')
  counts = run.events[run.events['event'].isin(['train', 'day_end'])]
  if len(counts):
    last = counts.iloc[-1]
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
  """Returns a duration as text, such as '40 s', '12 min' or '3.5 h'."""
  if seconds < 120:
    return f'{seconds:.0f} s'
  return f'{seconds / 60:.0f} min' if seconds < 7200 else f'{seconds / 3600:.1f} h'


def _kept(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence that says which state is kept for prediction, and its metric."""
  name = f'{run.task} {NAMES.get(run.metric, run.metric)}'.strip()
  if run.best is not None:
    yield (
      f'The state of epoch {run.best["epoch"]:.0f} (step {run.best["step"]:,.0f}) is kept for '
      f'prediction: its {name} on data.valid is the best, '
      f'{metric_text(run.metric, run.best[run.metric])}'
      f'{plus_minus(run.metric, run.best, bool(run.task))}.'
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


def faults(run: RecordedRun) -> list[str]:
  """Returns a sentence for each thing that went wrong or looks wrong."""
  return [text for check in _CHECKS for text in check(run)]


def _interruptions(run: RecordedRun) -> Iterator[str]:
  steps = [step for step in run.of('start')['step'].iloc[1:] if step]
  if steps:
    times = 'once' if len(steps) == 1 else f'{len(steps)} times'
    places = listed([f'{step:,.0f}' for step in steps])
    yield f'The job ended and was continued {times}, at step {places}.'


def _lost_ranks(run: RecordedRun) -> Iterator[str]:
  for _, lost in run.of('lost').iterrows():
    reason = str(lost['reason']).partition('. ')[0]
    yield f'The job ended at step {lost["step"]:,.0f}: {reason}.'


def _bad_records(run: RecordedRun) -> Iterator[str]:
  trained = run.of('train')
  bad = trained[trained['bad'] > 0].drop_duplicates('pass')
  if len(bad):
    names = listed([f'{name} ({records:,.0f})' for name, records in zip(bad['pass'], bad['bad'])])
    yield f'{bad["bad"].sum():,.0f} bad records were left out: {names}.'


def _passes_set_aside(run: RecordedRun) -> Iterator[str]:
  told, trained = run.of('pass'), run.of('train')['pass']

  def reason(row: pd.Series) -> str:
    is_mended = row['fate'] == 'refused' and row['pass'] in set(trained[trained.index > row.name])
    return f'{row["reason"]}{" (trained on since)" * is_mended}'

  for fate, some in told.groupby('fate') if len(told) else ():
    reasons = '; '.join(reason(row) for _, row in some.head(2).iterrows())
    reasons += f'; and {len(some) - 2} more' * (len(some) > 2)
    count = f'{len(some):,} pass{"es" * (len(some) > 1)}'
    yield f'{count} {"were" if len(some) > 1 else "was"} {fate}: {reasons}.'


def _medians_of_others(values: pd.Series) -> pd.Series:
  """Returns for each value the median of all other values."""
  order = np.sort(values.to_numpy())
  own = np.searchsorted(order, values.to_numpy())
  places = np.array([(len(order) - 2) // 2, (len(order) - 1) // 2])  # the middle of all others
  return pd.Series(order[places + (places >= own[:, None])].mean(1), values.index)


def _labels(run: RecordedRun) -> Iterator[str]:
  trained = run.of('train').drop_duplicates('pass', keep='first')
  if len(trained) < 3:
    return
  rates = trained['ctr'].dropna()
  # The largest of so many normal |values| exceeds z in 5 % of cases (the Bonferroni correction).
  z = statistics.NormalDist().inv_cdf(1 - 0.025 / len(trained))
  for i, rate, others in zip(rates.index, rates, _medians_of_others(rates)):
    # The number of clicks is random, with a variance equal to its mean (Poisson).
    expected, clicks = (share * trained.loc[i, 'examples'] for share in (others, rate))
    is_chance = abs(clicks - expected) < z * max(clicks, expected) ** 0.5
    if not is_chance and not 1 / LABEL_FACTOR < rate / max(others, 1e-9) < LABEL_FACTOR:
      yield _broken_label(
        trained.loc[i, 'pass'], 'click rate', rate, f'the other passes {others:.4f}'
      )
      return
  ahead = run.evaluated('next').drop_duplicates('pass', keep='first')
  rows = ahead if len(ahead) > 3 else trained
  values = rows['auc'].iloc[1:].dropna()  # before or in the first pass, the model knows nothing
  # Only passes before: while the model learns, those after have a higher AUC.
  for i, value, before in zip(values.index, values, values.expanding().median().shift()):
    interval = auc_interval_of(rows.loc[i], z)
    if value < before - LABEL_AUC_DROP and interval and interval[1] < before:
      yield _broken_label(rows.loc[i, 'pass'], 'AUC', value, f'the passes before {before:.4f}')


def _broken_label(name: str, figure: str, value: float, others: str) -> str:
  return f'The label of {name} looks broken: its {figure} is {value:.4f}, that of {others}.'


def _never_filled(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence on the slots and dense columns that were blank in the whole training."""
  kept, told, count = run.kept_slots(), [], 0
  for what, columns, field in (('slot', 'slots', 'blank'), ('dense column', 'dense', 'missing')):
    shares = run.by_slot('train', field, columns)
    names = [name for name in shares if (shares[name].dropna() == 1).all()]
    if columns == 'slots' and not run.begins_with_another:
      # The shares are of the first samples of each pass; a later one may have had a feature.
      names = [name for name in names if not kept.get(name, {}).get('features')]
    if names:
      quoted = listed([f"'{name}'" for name in names])
      told.append(f'{what}{"s" * (len(names) > 1)} {quoted}')
    count += len(names)
  if told:
    names = '; '.join(told)
    wanted = f'Check the log, or leave {"it" if count == 1 else "them"} out.'
    yield f'Blank in every sample of the training: {names}. {wanted}'


def _blank_slots(run: RecordedRun) -> Iterator[str]:
  shares = run.by_slot('train', 'blank')
  names = run.of('train')['pass']
  for slot in shares:
    share = shares[slot]
    medians = share.expanding().median().shift()  # of the earlier passes
    for place in np.flatnonzero(share > medians + BLANK_JUMP)[:1]:
      before = medians.iloc[place]
      since = 'from' if (share.iloc[place:] > before + BLANK_JUMP).all() else 'in'
      of = 'items' if slot in run.cfg.columns_of_items() else 'samples'
      yield (
        f"Slot '{slot}' went blank {since} {names[share.index[place]]}"
        f'{" on" * (since == "from")}: {share.iloc[place]:.0%} of its {of} have no feature, '
        f'{before:.0%} before.'
      )


def _drift(run: RecordedRun) -> Iterator[str]:
  for _, event in run.of('drift').tail(1).iterrows():
    for slot, of in event['slots'].items():
      if of['psi'] > DRIFTED:
        when = f'day {event["day"]:.0f}' if pd.notna(event.get('day')) else event['pass']
        yield (
          f"The bins of slot '{slot}' have drifted since the first day: their population stability "
          f'index is {of["psi"]:.2f} on {when}.'
        )


def _unique_values(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence for each slot that has a new value in half of its impressions or more."""
  scored = next(iter(run.scores.values()), {}).get('slots')
  of_items = run.cfg.columns_of_items()
  if run.cfg.data.items is not None:
    of_items.add(run.cfg.item_slot.name)
  kept = run.kept_slots()
  for slot, (features, shows) in _unique_slots(run).items():
    # An item of data.items may get a row before it is ever shown.
    if slot in of_items:
      continue
    of_slot = scored.get(slot, {}) if isinstance(scored, dict) else {}
    unknown = of_slot.get('unknown')
    told = f'; the model does not know {unknown:.0%} of those it evaluates' if unknown else ''
    share = features / max(features, shows)
    yield (
      f"Slot '{slot}' has a new value in {share:.0%} of its impressions: {features:,.0f} features "
      f'of {shows:,.0f} impressions, in {kept[slot].get("bytes_share", 0):.0%} of the bytes{told}. '
      'Leave it out, or make its values coarser.'
    )


def _unseen_values(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence for each slot of which data.valid, or data.test, has only new values."""
  unique = _unique_slots(run)
  for split, figures in run.scores.items():
    slots = figures.get('slots')
    for slot, of_slot in slots.items() if isinstance(slots, dict) else ():
      if of_slot.get('unknown') == 1 and slot not in unique:
        yield (
          f"Slot '{slot}': in data.{split} every sample has a value that was never trained on. "
          'Predictions lack what the slot has learned: train on more days, or leave it out.'
        )


def _unique_slots(run: RecordedRun) -> dict[str, tuple[int, float]]:
  """Returns the slots that have a new value in half of their impressions or more.

  Returns:
    {slot: (its features, its impressions)}. The impressions are those of one epoch, undecayed.
  """
  unique, undecayed = {}, None
  for slot, values in run.kept_slots().items():
    features, shows = values.get('features', 0), values.get('shows', 0)
    if features >= LEAST_UNIQUE:
      undecayed = undecayed or _undecayed(run)
      if features >= UNIQUE * shows * undecayed:
        unique[slot] = features, shows * undecayed
  return unique


def _undecayed(run: RecordedRun) -> float:
  """Returns how many impressions there were for each that the decay of days has left."""
  trained = run.of_kept('train')
  if run.cfg.counted_fields():  # shows are reset at the start of each epoch
    trained = trained[trained['epoch'] == trained['epoch'].iloc[-1]]
  ends = np.searchsorted(run.of('day_end').index, trained.index)
  left = trained['examples'] * run.cfg.policy().decay ** (ends[-1] - ends)
  return trained['examples'].sum() / left.sum()


_CHECKS = (
  of_model.uncalibrated,
  _labels,
  _never_filled,
  _blank_slots,
  _unseen_values,
  _drift,
  of_model.leaks,
  of_model.factors,
  of_model.long_steps,
  of_model.overfitting,
  of_model.better_logloss,
  of_model.calibration,
  of_model.constant,
  of_model.finds_less,
  of_model.weights,
  _unique_values,
  _bad_records,
  _passes_set_aside,
  _lost_ranks,
  _interruptions,
)
