"""Judges a run: each check yields a finding for each thing that went wrong or looks wrong."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pandas as pd

from trainer import config
from trainer.errors import ConfigError
from trainer.reporting.metric_text import (
  Z,
  auc_interval_of,
  class_sizes,
  clicks_of,
  is_miscalibrated,
  overfits,
)
from trainer.tools.advice import no_help
from trainer.tools.columns import cold, command, harmful, of_log
from trainer.tools.drift import drifted
from trainer.tools.runs import RecordedRun, importances
from trainer.tools.sentences import Finding, found

# Thresholds beyond which a fault is reported.
FEW_ADMITTED = 0.05  # of the features seen
BLANK_JUMP = 0.5  # rise of a slot's blank share above the median of the earlier passes
LABEL_FACTOR = 3.0  # ratio between a pass's click rate and the median of the others
LABEL_AUC_DROP = 0.1  # how far a pass's AUC lies below the median of the others
UNIQUE, LEAST_UNIQUE = 0.5, 1000  # a slot's features per impression, and number of features
LEAK_AUC, LEAK_LOSS = 0.93, 0.15  # the model's AUC, and how much it falls without one slot
COLLAPSED_SHARE = 0.25  # effective rank of a slot's factors, as a share of the width
MISCALIBRATED = 0.1  # deviation of the calibration from 1
WORSE_LOGLOSS = 0.01  # of the kept epoch, above the best epoch's, as a share
# A slot of rare values: its least number of features, the most impressions of each, and the most
# features per impression; beyond that they are new all the time, so that counts know nothing.
LEAST_RARE, RARE, MOST_NEW = 100, 30, 0.5
MOST_WEIGHTS = 20  # weights per sample
LONG_STEPS = 1.35  # logloss of the first pass over that of predicting its share of clicks
LARGE = 10  # root mean square of a dense column that may cause such a logloss
LEAST_CLICKS = 100  # of the first pass; with fewer, its logloss may be chance

_Check = Callable[..., Iterator[Finding]]
_deciding = lambda run: [run.deciding]
_CHECKS: list[tuple[_Check, Callable[[RecordedRun], Iterable[RecordedRun]], str | None]] = []


def _check(
  of: Callable[[RecordedRun], Iterable[RecordedRun]] = lambda run: [run], last: str | None = None
) -> Callable[[_Check], _Check]:
  """Adds a check, which `faults` makes after those above it.

  Args:
    of: gives the runs to check: this run, or copies with the metrics of tasks.
    last: an event's name. The check also gets the last such event; without one, it is left out.
  """
  return lambda check: _CHECKS.append((check, of, last)) or check


def faults(run: RecordedRun) -> list[Finding]:
  """Returns a finding for each thing that went wrong or looks wrong."""
  told: list[Finding] = []
  for check, of, last in _CHECKS:
    for checked in of(run):
      if last is None:
        told += check(checked)
      for _, event in checked.of(last).tail(1).iterrows():
        told += check(checked, event)
  return told


def suspicious(run: RecordedRun) -> list[str]:
  """Returns the columns of the log without which, findings say, the model may be better."""
  named = (name for finding in faults(run) for name in finding.figures.get('may_go', ()))
  return list(dict.fromkeys(named))


@_check()
def uncalibrated(run: RecordedRun) -> Iterator[Finding]:
  if reason := run.cfg.uncalibrated():
    yield found('uncalibrated', reason=f'{reason[0].upper()}{reason[1:]}')


@_check(last='train')
def few_admitted(run: RecordedRun, last: pd.Series) -> Iterator[Finding]:
  policy, modes = run.cfg.policy(), config.LIFECYCLE_MODES['admission']
  features, admitted = last['features'], last['admitted']
  for key in (key for key, mode in modes.items() if mode == policy.admission):
    if admitted < FEW_ADMITTED * features:
      shown = {'admitted': admitted, 'features': features, 'share': admitted / features}
      yield found('few_admitted', key, threshold=getattr(policy, key), **shown)


@_check()
def labels(run: RecordedRun) -> Iterator[Finding]:
  trained = run.of('train').drop_duplicates('pass', keep='first')
  if len(trained) < 3:
    return
  rates = trained['ctr'].dropna()
  if len(values := rates.to_numpy()) < 2:
    return
  # The largest of so many normal |values| exceeds z in 5 % of cases (the Bonferroni correction).
  z = statistics.NormalDist().inv_cdf(1 - 0.025 / len(trained))
  ordered, places = np.sort(values), values.argsort().argsort()
  left = lambda i: ordered[i + (i >= places)]  # the i-th of the values but for one, for each
  medians = (left((len(values) - 2) // 2) + left((len(values) - 1) // 2)) / 2
  ratios = values / np.maximum(medians, 1e-9)
  for place in np.flatnonzero((ratios <= 1 / LABEL_FACTOR) | (ratios >= LABEL_FACTOR)):
    i, rate, others = rates.index[place], values[place], medians[place]
    # The number of clicks is random, with a variance equal to its mean (Poisson).
    clicks, without = class_sizes(trained.loc[i])
    expected = clicks * others / rate if rate else without * others
    is_chance = abs(clicks - expected) < z * max(clicks, expected) ** 0.5
    if not is_chance:
      yield found('label_rate', trained.loc[i, 'pass'], rate=rate, usual=others)
      return
  ahead = run.evaluated('next').drop_duplicates('pass', keep='first')
  rows = ahead if len(ahead) > 3 else trained
  values = rows['auc'].iloc[1:].dropna()  # before or in the first pass, the model knows nothing
  # Only passes before: while the model learns, those after have a higher AUC.
  for i, value, before in zip(values.index, values, values.expanding().median().shift()):
    if not value < before - LABEL_AUC_DROP:
      continue
    if (interval := auc_interval_of(rows.loc[i], z)) and interval[1] < before:
      yield found('label_auc', rows.loc[i, 'pass'], auc=value, usual=before)


@_check()
def never_filled(run: RecordedRun) -> Iterator[Finding]:
  kept, blank = run.kept_slots(), {}
  for columns, field in (('slots', 'blank'), ('dense', 'missing')):
    shares = run.by_slot('train', field, columns)
    names = [name for name in shares if (shares[name].dropna() == 1).all()]
    if columns == 'slots' and not run.begins_with_another:
      # The shares are of the first samples of each pass; a later one may have had a feature.
      names = [name for name in names if not kept.get(name, {}).get('features')]
    blank[columns] = names
  if any(blank.values()):
    yield found('never_filled', **blank)


@_check()
def blank_slots(run: RecordedRun) -> Iterator[Finding]:
  shares = run.by_slot('train', 'blank')
  names = run.of('train')['pass']
  for slot, share in shares.items():
    medians = share.expanding().median().shift()  # of the earlier passes
    for place in np.flatnonzero(share > medians + BLANK_JUMP)[:1]:
      before, name = medians.iloc[place], names[share.index[place]]
      stays = (share.iloc[place:] > before + BLANK_JUMP).all()
      when = f'from {name} on' if stays else f'in {name}'
      of = 'items' if slot in run.cfg.columns_of_items() else 'samples'
      yield found('went_blank', slot, when=when, share=share.iloc[place], usual=before, of=of)


@_check()
def cold_start(run: RecordedRun) -> Iterator[Finding]:
  unique = _unique_slots(run)  # which have a finding of their own
  by_split = {
    split: {slot: of for slot, of in slots.items() if slot not in unique}
    for split, slots in run.of_scores('slots').items()
    if split != 'next'
  }
  return cold(run.cfg, by_split, command(run))


@_check(last='drift')
def drift(run: RecordedRun, last: pd.Series) -> Iterator[Finding]:
  when = f'day {last["day"]:.0f}' if pd.notna(last.get('day')) else last['pass']
  beyond = last.get('beyond')  # runs of earlier versions have none
  yield from drifted(when, last['slots'], beyond if isinstance(beyond, dict) else {})


@_check(last='importance')
def leaks(run: RecordedRun, last: pd.Series) -> Iterator[Finding]:
  for column, loss in importances(last).items() if last['auc'] > LEAK_AUC else ():
    if (loss['auc'] or 0) - (loss.get('auc_plus_minus') or 0) > LEAK_LOSS:
      yield found('leak', column, auc=last['auc'], without=last['auc'] - loss['auc'])


@_check()
def factors(run: RecordedRun) -> Iterator[Finding]:
  widths = {s.name: run.cfg.sparse.tables[s.table].width for s in run.cfg.ordered_slots}
  for slot, values in run.kept_slots().items():
    width, dead = values.get('width') or widths[slot], values.get('dead_columns') or []
    if dead and width:
      yield found('dead_columns', slot, columns=dead)
    rank = values.get('effective_rank')
    is_judged = rank is not None and values.get('admitted', 0) >= 8 * width and width >= 4
    if is_judged and rank < max(1.5, COLLAPSED_SHARE * (width - len(dead))):
      yield found('collapsed', slot, rank=rank)


@_check(of=_deciding)
def long_steps(run: RecordedRun) -> Iterator[Finding]:
  """Yields a finding if the first pass has a far worse logloss than a constant prediction.

  Then dense columns have large values, or the steps of the rows are probably too long: on two
  made-up logs half of the default learning rate then raised the test AUC by 0.01 to 0.03.
  """
  trained = run.of('train')
  if run.begins_with_another or not len(trained):
    return
  first = trained.iloc[0]
  own, base = first.get('logloss'), first.get('base_logloss')
  if base and own > LONG_STEPS * base and (clicks_of(first) or 0) >= LEAST_CLICKS:
    if large := _large_columns(run, first):
      yield found('large_columns', run.task, logloss=own, base=base, sizes=large)
    else:
      yield found('long_steps', run.task, logloss=own, base=base, rates=_row_rates(run))


def _large_columns(run: RecordedRun, first: pd.Series) -> dict[str, float]:
  """Returns {dense column: root mean square in the first pass}, if it is large."""
  figures = first.get('dense')
  sizes = {n: of.get('size', 0) for n, of in figures.items()} if isinstance(figures, dict) else {}
  usual = {c.name for c in run.cfg.data.dense if 'standardise' in c.transform}
  return {n: size for n, size in sizes.items() if size > LARGE and n not in usual}


def _row_rates(run: RecordedRun) -> dict[str, float]:
  """Returns {config key: learning rate} of the row optimizers that this run's layers use."""
  rules = [(f'{key}.learning_rate', rule) for key, rule, _ in run.cfg.sparse.optimizers()]
  if {i.kind for i in run.cfg.model.all_interactions().values()} == {'linear'}:
    rules = [(key, rule) for key, rule in rules if key.endswith('.linear.learning_rate')]
  return {key: rule.learning_rate for key, rule in rules}


@_check(of=_deciding)
def overfitting(run: RecordedRun) -> Iterator[Finding]:
  """Says also what helps. A cold start, which has a finding of its own, explains such a gap too."""
  trained, valid = run.of('train'), run.evaluated('valid')
  goes_on = run.cfg.data.stream or run.begins_with_another
  if len(trained) and len(valid) and not goes_on and not any(cold_start(run)):
    own, new = trained['auc'].iloc[-1], valid.iloc[-1]
    if overfits(own, new):
      advice, added = list(_rare_values(run)), run.added_passes()
      yield found('overfits', trained=own, new=new['auc'], advice=advice, added=added)


_check()(harmful)


def _rare_values(run: RecordedRun) -> Iterator[Finding]:
  """Yields a finding on the slots with many rare values that should set the key `counts`."""
  kept, chosen = run.kept_slots(), {}
  for i, slot in enumerate(run.cfg.data.slots):
    features, shows = (kept.get(slot.name, {}).get(name, 0) for name in ('features', 'shows'))
    is_rare = features >= LEAST_RARE and MOST_NEW * shows > features > shows / RARE
    if is_rare and not slot.counts and slot.shares is None:
      chosen[slot.name] = f'data.slots.{i}.counts=true'
  try:
    config.load_of_run(run.directory, list(chosen.values()))
  except ConfigError:  # such as with squared_error
    return
  if chosen:
    yield found('rare_values', settings=chosen)


@_check(of=_deciding)
def better_logloss(run: RecordedRun) -> Iterator[Finding]:
  kept, valid = run.best, run.evaluated('valid')
  if kept is None or run.metric != 'auc' or not (interval := auc_interval_of(kept)):
    return
  other = valid.loc[valid['logloss'].fillna(math.inf).idxmin()]
  if other['auc'] > interval[0] and kept['logloss'] > (1 + WORSE_LOGLOSS) * other['logloss']:
    of_kept, of_other = (row[['epoch', 'auc', 'logloss']] for row in (kept, other))
    yield found('better_logloss', kept=of_kept, other=of_other)


@_check(of=RecordedRun.by_task, last='eval')
def calibration(run: RecordedRun, last: pd.Series) -> Iterator[Finding]:
  if is_miscalibrated(last, MISCALIBRATED):
    of_split = {'name': last['pass'], 'calibration': last['calibration']}
    yield found('miscalibrated', last['split'], **of_split, of=run.task or 'the clicks')


@_check(of=RecordedRun.by_task)
def constant(run: RecordedRun) -> Iterator[Finding]:
  for split, row in run.scores.items():
    if split != 'next':
      yield from no_help(split, row, 'no_help', task=run.task)


@_check()
def finds_no_more(run: RecordedRun) -> Iterator[Finding]:
  for split, row in run.scores.items():
    value, base = row.get(run.metric), row.get(f'base_{run.metric}')
    if run.cfg.ranking_metrics and base is not None and value <= base:
      shown = {'metric': run.metric, 'value': value, 'base': base}
      yield found('finds_no_more', split, **shown, unknown=row['unknown_queries'])


@_check()
def finds_less(run: RecordedRun) -> Iterator[Finding]:
  scores = [run.scores.get(split, {}) for split in ('valid', 'test')]
  known = [(of.get(run.metric), of.get('queries')) for of in scores]
  if not run.cfg.ranking_metrics or any(None in pair for pair in known):
    return
  (before, _), (now, _) = known
  # Means over users of values between 0 and 1, whose variance is at most p (1 − p) for a mean of p.
  errors = [math.sqrt(max(0.0, p * (1 - p)) / users) for p, users in known]
  if now < before / 2 and before - now > Z * math.hypot(*errors):
    yield found('finds_less', metric=run.metric, test=now, valid=before)


@_check()
def weights(run: RecordedRun) -> Iterator[Finding]:
  of_slots = {
    slot: of.get('features', 0) + of.get('admitted', 0) * (of.get('width') or 0)
    for slot, of in run.kept_slots().items()
  }
  weights = sum(of_slots.values())
  if run.samples and weights > MOST_WEIGHTS * run.samples:
    largest = max(of_slots, key=of_slots.get)
    shown = {'weights': weights, 'samples': run.samples, 'share': of_slots[largest] / weights}
    yield found('many_weights', largest, **shown)


@_check()
def unique_values(run: RecordedRun) -> Iterator[Finding]:
  scored = next(iter(run.scores.values()), {}).get('slots')
  by_name = {slot.name: slot for slot in run.cfg.data.slots}
  of_items = run.cfg.columns_of_items()  # an item may get a row before it is ever shown
  if run.cfg.data.items is not None:
    of_items.add(run.cfg.item_slot.name)
  for slot, (features, shows) in _unique_slots(run).items():
    if slot in of_items:
      continue
    of_slot = scored.get(slot, {}) if isinstance(scored, dict) else {}
    shown = {'bytes_share': run.kept_slots()[slot].get('bytes_share') or 0}
    shown['unknown'] = of_slot.get('unknown')
    shown |= {'may_go': of_log(by_name[slot]), 'command': command(run)}
    yield found('unique_values', slot, features=features, shows=shows, **shown)


def _unique_slots(run: RecordedRun) -> dict[str, tuple[int, float]]:
  """Returns the slots that have a new value in half of their impressions or more.

  Returns:
    {slot: (its features, its impressions)}. The impressions are those of one epoch, undecayed.
  """
  kept = {
    slot: (of.get('features', 0), of.get('shows', 0)) for slot, of in run.kept_slots().items()
  }
  many = {slot: of for slot, of in kept.items() if of[0] >= LEAST_UNIQUE}
  undecayed = run.undecayed() if many else 1
  counts = {slot: (features, shows * undecayed) for slot, (features, shows) in many.items()}
  return {slot: of for slot, of in counts.items() if of[0] >= UNIQUE * of[1]}


@_check()
def bad_records(run: RecordedRun) -> Iterator[Finding]:
  trained = run.of('train')
  bad = trained[trained['bad'] > 0].drop_duplicates('pass')
  if len(bad):
    yield found('bad_records', records=dict(zip(bad['pass'], bad['bad'])))


@_check()
def passes_set_aside(run: RecordedRun) -> Iterator[Finding]:
  told, trained = run.of('pass'), run.of('train')['pass']

  def reason(row: pd.Series) -> str:
    is_mended = row['fate'] == 'refused' and row['pass'] in set(trained[trained.index > row.name])
    return f'{row["reason"]}{" (trained on since)" * is_mended}'

  for fate, some in told.groupby('fate'):
    yield found('set_aside', fate=fate, reasons=[reason(row) for _, row in some.iterrows()])


@_check()
def lost_ranks(run: RecordedRun) -> Iterator[Finding]:
  for _, lost in run.of('lost').iterrows():
    yield found('lost', step=lost['step'], reason=str(lost['reason']).partition('. ')[0])


@_check()
def interruptions(run: RecordedRun) -> Iterator[Finding]:
  if steps := [step for step in run.of('start')['step'].iloc[1:] if step]:
    yield found('interrupted', steps=steps)
