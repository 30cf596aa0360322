"""What a run's events say in words: what was trained, how well, how fast, and what went wrong."""

import datetime
from collections.abc import Iterator

import pandas as pd

from trainer.reporting.runs import RecordedRun

NAMES = {'auc': 'AUC', 'gauc': 'GAUC', 'logloss': 'logloss', 'rmse': 'RMSE'}

# From where on something is told. Each is far outside of what the demo's healthy slots show.
LEAK_AUC, LEAK_LOSS = 0.93, 0.15  # the model's AUC, and what it loses without one slot
COLLAPSED_SHARE = 0.25  # of a table's width, the effective rank of a slot's factors
BLANK_JUMP = 0.5  # of a slot's blank share between one pass and the median of those before
LABEL_FACTOR = 3.0  # between a pass's click rate and the median of the others
LABEL_AUC_DROP = 0.1  # of a pass's AUC below the median of its neighbours
MISCALIBRATED = 0.1
OVERFITTING = 0.1  # of the AUC of data.train above that of data.valid
MOST_WEIGHTS = 20  # a sample
UNIQUE, LEAST_UNIQUE = 0.5, 1000  # features an impression of a slot; features at least
DAYS_OF_A_FORECAST = 7  # whose growth says how long the disk lasts


def _list(names: list[str], most: int = 6) -> str:
  shown = names if len(names) <= most else [*names[: most - 1], f'{len(names) - most + 1} more']
  return shown[0] if len(shown) == 1 else f'{", ".join(shown[:-1])} and {shown[-1]}'


def _count(number: float, noun: str) -> str:
  return f'{number:,.0f} {noun}{"s" * (number != 1)}'


def state(run: RecordedRun) -> str:
  """How the run stands: finished, stopped, or neither, which is killed or running."""
  ends = run.of('end')
  starts = run.of('start')
  if len(ends) and (not len(starts) or ends.index[-1] > starts.index[-1]):
    return str(ends.iloc[-1]['status'])
  return 'unfinished'


def summary(run: RecordedRun) -> list[str]:
  """Sentences that say what was trained, on how much, how well, how fast, and how it ended."""
  cfg, trained, told = run.cfg, run.of('train'), []
  used = dict.fromkeys(i.kind.rpartition('.')[2] for i in cfg.model.all_interactions().values())
  kinds = ', '.join(used) or f'two towers with {cfg.model.retrieval.loss}'
  model = f'A model of {kinds} over {_count(len(cfg.slots), "slot")}'
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
  for one in run.by_task():
    test = one.evaluated('test')
    if not len(test):
      continue
    last = test.iloc[-1]
    ranked = cfg.model.retrieval.metrics() if cfg.model.retrieval else []
    shown = [m for m in ('auc', 'gauc', 'logloss', 'rmse', *ranked) if pd.notna(last.get(m))]
    of_task = f' of {one.task}' if one.task else ''
    text = f'On the test data{of_task}, ' + _list(
      [f'{NAMES.get(m, m)} is {last[m]:.4f}' for m in shown]
    )
    reach = [(m, one.reachable(last['pass'], m)) for m in shown]
    reach = [f'{NAMES[m]} {value:.4f}' for m, value in reach if value is not None]
    if reach:
      text += f'; the true probabilities reach {_list(reach)}'
    told.append(text + '.')
  if len(trained):
    starts = run.of('start')
    by = ''
    if len(starts):
      processes = int(starts.iloc[-1]['processes'])
      by = f' on {processes} process{"es" * (processes > 1)}'
    told.append(f'Training took {trained["examples_per_second"].median():,.0f} samples/s{by}.')
  counts = run.events[run.events['event'].isin(['train', 'day_end'])]
  if len(counts):
    last = counts.iloc[-1]
    told.append(
      f'The tables hold {last["features"]:,.0f} features, {last["admitted"]:,.0f} of them '
      f'admitted, in {last["table_bytes"] / 1e6:,.1f} MB.'
    )
  told += _disk(run)
  told += {
    'unfinished': [
      'The run has not finished: it is running still, or was killed; its last event '
      f'is of {_when(run)}.'
    ],
    'stopped': ['It was asked to stop, and its state was saved.'],
  }.get(state(run), [])
  return told


def _kept(run: RecordedRun) -> Iterator[str]:
  """Which state is kept and predicts, and how good it is."""
  name = f'{run.task} {NAMES.get(run.metric, run.metric)}'.strip()
  if run.best is not None:
    yield (
      f'The state of epoch {run.best["epoch"]:.0f} (step {run.best["step"]:,.0f}) is kept and '
      f'predicts: its {name} of data.valid is the best, {run.best[run.metric]:.4f}.'
    )
    return
  ahead = run.evaluated('next')
  if run.metric in ahead and ahead[run.metric].notna().any():
    ahead = ahead.dropna(subset=[run.metric])
    last = ahead.iloc[-1]
    text = f'Before it was trained on, {last["pass"]} had {name} {last[run.metric]:.4f}'
    if len(ahead) > 1:
      text += f'; the median of {len(ahead):,} passes is {ahead[run.metric].median():.4f}'
    yield f'The last state is kept and predicts. {text}.'


def _disk(run: RecordedRun) -> Iterator[str]:
  """How long the disk of a run that never ends lasts, as the last days went."""
  ends = run.of('day_end')
  if 'disk_bytes' not in ends:
    return
  ends = ends.dropna(subset='disk_bytes').tail(1 + DAYS_OF_A_FORECAST)
  last = ends.iloc[-1]
  text = f'The run_dir takes {last["disk_bytes"] / 1e6:,.1f} MB'
  grown = last['disk_bytes'] - ends.iloc[0]['disk_bytes']
  if grown <= 0:
    yield f'{text}, and {last["disk_free"] / 1e9:,.1f} GB of its disk are free.'
    return
  a_day = grown / (len(ends) - 1)
  yield (
    f'{text} and grows by {a_day / 1e6:,.1f} MB a day: its disk is full in '
    f'{last["disk_free"] / a_day:,.0f} days.'
  )


def _when(run: RecordedRun) -> str:
  if not len(run.events):
    return 'no time: there is none yet'
  at = datetime.datetime.fromtimestamp(run.events['time'].iloc[-1], datetime.timezone.utc)
  return f'{at:%Y-%m-%d %H:%M:%S} UTC'


def faults(run: RecordedRun) -> list[str]:
  """Sentences that each name one thing that went wrong, or looks wrong."""
  return [text for look in _LOOKS for text in look(run)]


def slot_table(run: RecordedRun, event: str, field: str) -> pd.DataFrame:
  """One figure by slot, of the events that have it: a row an event, a column a slot."""
  found = run.of(event)
  if 'slots' not in found:
    return pd.DataFrame()
  found = found[found['slots'].notna()]
  rows = {
    i: {slot: values.get(field) for slot, values in slots.items()}
    for i, slots in found['slots'].items()
  }
  return pd.DataFrame.from_dict(rows, orient='index').dropna(axis=1, how='all')


def _interruptions(run: RecordedRun) -> Iterator[str]:
  steps = [step for step in run.of('start')['step'].iloc[1:] if step]
  if steps:
    times = 'once' if len(steps) == 1 else f'{len(steps)} times'
    places = _list([f'{step:,.0f}' for step in steps])
    yield f'The run was interrupted and continued {times}, at step {places}.'


def _lost_ranks(run: RecordedRun) -> Iterator[str]:
  for _, one in run.of('lost').iterrows():
    reason = str(one['reason']).partition('. ')[0]
    yield f'The job ended at step {one["step"]:,.0f}: {reason}.'


def _bad_records(run: RecordedRun) -> Iterator[str]:
  trained = run.of('train')
  if 'bad' in trained and trained['bad'].sum():
    bad = trained[trained['bad'] > 0].drop_duplicates('pass')
    names = _list([f'{one["pass"]} ({one["bad"]:,.0f})' for _, one in bad.iterrows()])
    yield f'{bad["bad"].sum():,.0f} bad records were left out: {names}.'


def _passes_set_aside(run: RecordedRun) -> Iterator[str]:
  told = run.of('pass')
  for fate, some in told.groupby('fate') if len(told) else ():
    reasons = _list([str(reason) for reason in some['reason']], most=3)
    count = f'{len(some):,} pass{"es" * (len(some) > 1)}'
    yield f'{count} {"were" if len(some) > 1 else "was"} {fate}: {reasons}.'


def _labels(run: RecordedRun) -> Iterator[str]:
  trained = run.of('train').drop_duplicates('pass', keep='first')
  if len(trained) < 3:
    return
  if 'ctr' in trained:
    for _, one in trained.iterrows():
      others = trained[trained['pass'] != one['pass']]['ctr'].median()
      if (
        pd.notna(one['ctr'])
        and not 1 / LABEL_FACTOR < one['ctr'] / max(others, 1e-9) < LABEL_FACTOR
      ):
        yield (
          f'The label of {one["pass"]} looks broken: its click rate is {one["ctr"]:.4f}, that of '
          f'the other passes {others:.4f}.'
        )
        return
  ahead = run.evaluated('next').drop_duplicates('pass', keep='first')
  rows = ahead if len(ahead) > 3 else trained
  if 'auc' in rows:
    values = rows['auc'].iloc[1:] if rows is ahead else rows['auc']
    for i, value in values.items():
      others = values.drop(i).median()
      if value < others - LABEL_AUC_DROP:
        yield (
          f'The label of {rows.loc[i, "pass"]} looks broken: its AUC is {value:.4f}, that of the '
          f'other passes {others:.4f}.'
        )


def _blank_slots(run: RecordedRun) -> Iterator[str]:
  shares = slot_table(run, 'train', 'blank')
  names = run.of('train')['pass']
  for slot in shares:
    share = shares[slot]
    for place in range(1, len(share)):
      before = share.iloc[:place].median()
      if share.iloc[place] > before + BLANK_JUMP:
        since = 'from' if (share.iloc[place:] > before + BLANK_JUMP).all() else 'in'
        yield (
          f"Slot '{slot}' went blank {since} {names[share.index[place]]}"
          f'{" on" * (since == "from")}: {share.iloc[place]:.0%} of its samples have no feature, '
          f'{before:.0%} before.'
        )
        break


def _leaks(run: RecordedRun) -> Iterator[str]:
  found = run.of('importance')
  for _, one in found.tail(1).iterrows() if 'auc' in found else ():
    for slot, values in one['slots'].items():
      if one['auc'] > LEAK_AUC and (values['auc'] or 0) > LEAK_LOSS:
        yield (
          f"Slot '{slot}' looks like a leak of the label: with it AUC is {one['auc']:.4f}, with "
          f'its features exchanged between samples {one["auc"] - values["auc"]:.4f}.'
        )


def _factors(run: RecordedRun) -> Iterator[str]:
  widths = {s.name: run.cfg.sparse.tables[s.table].width for s in run.cfg.slots}
  for slot, values in _kept_slots(run).items():
    width = values.get('width') or widths[slot]
    if (dead := values.get('dead_columns')) and width:
      which = _list([str(column) for column in dead])
      yield (
        f"Column{'s' * (len(dead) > 1)} {which} of the factors of slot '{slot}' "
        f'{"are" if len(dead) > 1 else "is"} dead: (almost) 0 in every row.'
      )
    rank = values.get('effective_rank')
    if rank is None or values.get('admitted', 0) < 8 * width or width < 4:
      continue
    if rank < max(1.5, COLLAPSED_SHARE * (width - len(dead or ()))):
      yield (
        f"The factors of slot '{slot}' have collapsed: their effective rank is {rank:.1f} of "
        f'{width}.'
      )


def _calibration(run: RecordedRun) -> Iterator[str]:
  for one in run.by_task():
    evaluated = one.of('eval')
    if not len(evaluated) or 'calibration' not in evaluated:
      continue
    last = evaluated.iloc[-1]
    if pd.notna(last['calibration']) and abs(last['calibration'] - 1) > MISCALIBRATED:
      how = 'above' if last['calibration'] > 1 else 'below'
      yield (
        f'Predictions of the {last["split"]} split ({last["pass"]}) lie '
        f'{abs(last["calibration"] - 1):.0%} {how} {one.task or "the clicks"}.'
      )
  if reason := run.cfg.uncalibrated():
    yield f'{reason[0].upper()}{reason[1:]}.'


def _overfitting(run: RecordedRun) -> Iterator[str]:
  run = run.deciding
  trained, valid = run.of('train'), run.evaluated('valid')
  if 'auc' not in trained or not len(trained) or not len(valid) or run.cfg.data.watch:
    return
  own, new = trained['auc'].iloc[-1], valid['auc'].iloc[-1]
  if own - new > OVERFITTING:
    yield (
      f'The model overfits: at its end AUC is {own:.2f} on data.train and {new:.2f} on data.valid. '
      'Wanted more samples, or a model that learns fewer of them by heart: a smaller width, a '
      'higher lifecycle.admission_threshold, l2 or dropout.'
    )


def _weights(run: RecordedRun) -> Iterator[str]:
  """Tables that hold far more weights than the log has samples."""
  slots = _kept_slots(run)
  of_slots = {
    slot: values.get('features', 0) + values.get('admitted', 0) * (values.get('width') or 0)
    for slot, values in slots.items()
  }
  weights = sum(of_slots.values())
  if run.samples and weights > MOST_WEIGHTS * run.samples:
    largest = max(of_slots, key=of_slots.get)
    yield (
      f'The tables hold {weights:,.0f} weights, and the log has only {run.samples:,.0f} samples to '
      f"teach them; {of_slots[largest] / weights:.0%} are of slot '{largest}'. Wanted a smaller "
      'width or a higher lifecycle.admission_threshold.'
    )


def _unique_values(run: RecordedRun) -> Iterator[str]:
  """Slots that have a value of its own for almost each sample."""
  scored = next(iter(run.scores.values()), {}).get('slots')
  for slot, values in _kept_slots(run).items():
    epochs = max(1, run.of_kept('train')['epoch'].nunique())
    features, shows = values.get('features', 0), values.get('shows', 0) / epochs
    if features < LEAST_UNIQUE or features < UNIQUE * shows:
      continue
    of_slot = scored.get(slot, {}) if isinstance(scored, dict) else {}
    unknown = of_slot.get('unknown')
    told = f', and {unknown:.0%} of the samples scored have one it never saw' if unknown else ''
    yield (
      f"Slot '{slot}' has a new value in almost every sample: {features:,.0f} features of "
      f'{shows:,.0f} impressions, in {values.get("bytes_share", 0):.0%} of the bytes{told}. '
      'Wanted it left out, or in coarser values.'
    )


def _kept_slots(run: RecordedRun) -> dict[str, dict]:
  """What the tables hold of each slot in the state that is kept."""
  found = run.of_kept('train')
  found = found['slots'].dropna() if 'slots' in found else found
  return found.iloc[-1] if len(found) else {}


_LOOKS = (
  _labels,
  _blank_slots,
  _leaks,
  _factors,
  _calibration,
  _overfitting,
  _weights,
  _unique_values,
  _bad_records,
  _passes_set_aside,
  _lost_ranks,
  _interruptions,
)
