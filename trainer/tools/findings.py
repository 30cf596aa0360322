"""Judges a run: each check yields a sentence for each thing that went wrong or looks wrong."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import pandas as pd

from trainer import config
from trainer.errors import ConfigError
from trainer.reporting.metric_text import (
  Z,
  auc_interval_of,
  class_sizes,
  clicks_of,
  counted,
  is_miscalibrated,
  listed,
  no_judge,
  overfits,
  plural,
  worse_than_constant,
)
from trainer.tools.runs import RecordedRun, importances

# Thresholds beyond which a fault is reported.
FEW_ADMITTED = 0.05  # of the features seen
BLANK_JUMP = 0.5  # rise of a slot's blank share above the median of the earlier passes
LABEL_FACTOR = 3.0  # ratio between a pass's click rate and the median of the others
LABEL_AUC_DROP = 0.1  # how far a pass's AUC lies below the median of the others
# As in trainer.tools.drift: population stability index, share of values that are cut.
DRIFTED, BEYOND = 0.25, 0.25
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

_Check = Callable[..., Iterator[str]]
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


def faults(run: RecordedRun) -> list[str]:
  """Returns a sentence for each thing that went wrong or looks wrong."""
  told: list[str] = []
  for check, of, last in _CHECKS:
    for checked in of(run):
      if last is None:
        told += check(checked)
      for _, event in checked.of(last).tail(1).iterrows():
        told += check(checked, event)
  return told


@_check()
def uncalibrated(run: RecordedRun) -> Iterator[str]:
  if reason := run.cfg.uncalibrated():
    yield f'{reason[0].upper()}{reason[1:]}.'


@_check(last='train')
def few_admitted(run: RecordedRun, last: pd.Series) -> Iterator[str]:
  policy, modes = run.cfg.policy(), config.LIFECYCLE_MODES['admission']
  features, admitted = last['features'], last['admitted']
  for key in (key for key, mode in modes.items() if mode == policy.admission):
    if admitted < FEW_ADMITTED * features:
      yield (
        f'lifecycle.{key} {getattr(policy, key):g} admits {admitted:,.0f} of the {features:,.0f} '
        f'features seen ({admitted / features:.1%}): the others have only a linear weight.'
      )


@_check()
def labels(run: RecordedRun) -> Iterator[str]:
  trained = run.of('train').drop_duplicates('pass', keep='first')
  if len(trained) < 3:
    return
  rates = trained['ctr'].dropna()
  values = rates.to_numpy()
  # The largest of so many normal |values| exceeds z in 5 % of cases (the Bonferroni correction).
  z = statistics.NormalDist().inv_cdf(1 - 0.025 / len(trained))
  told = 'The label of {} looks broken: its {} is {:.4f}, that of {} {:.4f}.'
  for place, (i, rate) in enumerate(rates.items()):
    others = np.median(np.delete(values, place))
    # The number of clicks is random, with a variance equal to its mean (Poisson).
    clicks, without = class_sizes(trained.loc[i])
    expected = clicks * others / rate if rate else without * others
    is_chance = abs(clicks - expected) < z * max(clicks, expected) ** 0.5
    if not is_chance and not 1 / LABEL_FACTOR < rate / max(others, 1e-9) < LABEL_FACTOR:
      yield told.format(trained.loc[i, 'pass'], 'click rate', rate, 'the other passes', others)
      return
  ahead = run.evaluated('next').drop_duplicates('pass', keep='first')
  rows = ahead if len(ahead) > 3 else trained
  values = rows['auc'].iloc[1:].dropna()  # before or in the first pass, the model knows nothing
  # Only passes before: while the model learns, those after have a higher AUC.
  for i, value, before in zip(values.index, values, values.expanding().median().shift()):
    interval = auc_interval_of(rows.loc[i], z)
    if value < before - LABEL_AUC_DROP and interval and interval[1] < before:
      yield told.format(rows.loc[i, 'pass'], 'AUC', value, 'the passes before', before)


@_check()
def never_filled(run: RecordedRun) -> Iterator[str]:
  kept, told, count = run.kept_slots(), [], 0
  for what, columns, field in (('slot', 'slots', 'blank'), ('dense column', 'dense', 'missing')):
    shares = run.by_slot('train', field, columns)
    names = [name for name in shares if (shares[name].dropna() == 1).all()]
    if columns == 'slots' and not run.begins_with_another:
      # The shares are of the first samples of each pass; a later one may have had a feature.
      names = [name for name in names if not kept.get(name, {}).get('features')]
    if names:
      told.append(f'{plural(what, len(names))} {listed([repr(name) for name in names])}')
    count += len(names)
  if told:
    wanted = f'Check the log, or leave {"it" if count == 1 else "them"} out.'
    yield f'Blank in every sample of the training: {"; ".join(told)}. {wanted}'


@_check()
def blank_slots(run: RecordedRun) -> Iterator[str]:
  shares = run.by_slot('train', 'blank')
  names = run.of('train')['pass']
  for slot, share in shares.items():
    medians = share.expanding().median().shift()  # of the earlier passes
    for place in np.flatnonzero(share > medians + BLANK_JUMP)[:1]:
      before, name = medians.iloc[place], names[share.index[place]]
      stays = (share.iloc[place:] > before + BLANK_JUMP).all()
      when = f'from {name} on' if stays else f'in {name}'
      of = 'items' if slot in run.cfg.columns_of_items() else 'samples'
      yield (
        f"Slot '{slot}' went blank {when}: {share.iloc[place]:.0%} of its {of} have no feature, "
        f'{before:.0%} before.'
      )


@_check()
def unseen_values(run: RecordedRun) -> Iterator[str]:
  unique = _unique_slots(run)
  for split, slots in run.of_scores('slots').items():
    for slot, of_slot in slots.items():
      if of_slot.get('unknown') == 1 and slot not in unique:
        yield (
          f"Slot '{slot}': in data.{split} every sample has a value that was never trained on. "
          'Predictions lack what the slot has learned: train on more days, or leave it out.'
        )


@_check(last='drift')
def drift(run: RecordedRun, last: pd.Series) -> Iterator[str]:
  when = f'day {last["day"]:.0f}' if pd.notna(last.get('day')) else last['pass']
  for slot, of in last['slots'].items():
    if of['psi'] > DRIFTED:
      yield (
        f"The bins of slot '{slot}' have drifted since the first day: their population stability "
        f'index is {of["psi"]:.2f} on {when}.'
      )
  beyond = last.get('beyond')  # runs of earlier versions have none
  for column, share in beyond.items() if isinstance(beyond, dict) else ():
    if share > BEYOND:
      yield (
        f"Dense column '{column}' has left the values of the first pass: {share:.0%} on {when} are "
        'cut by standardise, which makes them alike. A new run measures the column anew.'
      )


@_check(last='importance')
def leaks(run: RecordedRun, last: pd.Series) -> Iterator[str]:
  for slot, loss in last['slots'].items() if last['auc'] > LEAK_AUC else ():
    if (loss['auc'] or 0) - (loss.get('auc_plus_minus') or 0) > LEAK_LOSS:
      yield (
        f"Slot '{slot}' looks like a leak of the label: with it AUC is {last['auc']:.4f}, with "
        f'its features permuted over samples {last["auc"] - loss["auc"]:.4f}.'
      )


@_check()
def factors(run: RecordedRun) -> Iterator[str]:
  widths = {s.name: run.cfg.sparse.tables[s.table].width for s in run.cfg.ordered_slots}
  for slot, values in run.kept_slots().items():
    width, dead = values.get('width') or widths[slot], values.get('dead_columns') or []
    if dead and width:
      columns = f'{plural("column", len(dead))} {listed([str(column) for column in dead])}'
      yield f"The factors of slot '{slot}' are (almost) 0 in every row in {columns}."
    rank = values.get('effective_rank')
    is_judged = rank is not None and values.get('admitted', 0) >= 8 * width and width >= 4
    if is_judged and rank < max(1.5, COLLAPSED_SHARE * (width - len(dead))):
      yield f"The factors of slot '{slot}' have collapsed to an effective rank of {rank:.1f}."


@_check(of=_deciding)
def long_steps(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence if the first pass has a far worse logloss than a constant prediction.

  Then dense columns have large values, or the steps of the rows are probably too long: on two
  made-up logs half of the default learning rate then raised the test AUC by 0.01 to 0.03.
  """
  trained = run.of('train')
  if run.begins_with_another or not len(trained):
    return
  first = trained.iloc[0]
  own, base = first.get('logloss'), first.get('base_logloss')
  if base and own > LONG_STEPS * base and (clicks_of(first) or 0) >= LEAST_CLICKS:
    of_task = f' of {run.task}' if run.task else ''
    told = (
      f'In the first pass logloss{of_task} is {own:.2f}, far above the {base:.2f} of predicting '
      f'the share of {"positives" if run.task else "clicks"} for all: '
    )
    if large := _large_columns(run, first):
      yield f'{told}{large}. Give such columns transform: standardise.'
    else:
      yield f'{told}steps look too long. Try half of the learning rates: {_halved_rates(run)}.'


def _large_columns(run: RecordedRun, first: pd.Series) -> str:
  """Returns which dense columns had large values in the first pass, in words; '' if none."""
  figures = first.get('dense')
  sizes = {n: of.get('size', 0) for n, of in figures.items()} if isinstance(figures, dict) else {}
  usual = {c.name for c in run.cfg.data.dense if 'standardise' in c.transform}
  large = [f"'{n}' is about {s:.3g}" for n, s in sizes.items() if s > LARGE and n not in usual]
  return f'dense column {listed(large)} (root mean square)' if large else ''


def _halved_rates(run: RecordedRun) -> str:
  """Returns the learning rates of the rows, each with its half; one table's to copy as `--set`."""
  rules = [(f'{key}.learning_rate', rule) for key, rule, _ in run.cfg.sparse.optimizers()]
  if {i.kind for i in run.cfg.model.all_interactions().values()} == {'linear'}:
    rules = [(key, rule) for key, rule in rules if key.endswith('.linear.learning_rate')]
  pairs = [
    (key, f'{rule.learning_rate / 2:.2g}', f'{rule.learning_rate:.3g}') for key, rule in rules
  ]
  if len(pairs) > 2:
    return listed([f'{key} {half} in place of {rate}' for key, half, rate in pairs])
  settings = ' '.join(f'--set {key}={half}' for key, half, _ in pairs)
  return f'{settings} in place of {" and ".join(dict.fromkeys(rate for *_, rate in pairs))}'


@_check(of=_deciding)
def overfitting(run: RecordedRun) -> Iterator[str]:
  """Says also what helps. Columns with which the model predicts worse are named in any case."""
  trained, valid, told = run.of('train'), run.evaluated('valid'), []
  if len(trained) and len(valid) and not run.cfg.data.stream:
    own, new = trained['auc'].iloc[-1], valid.iloc[-1]
    if overfits(own, new):
      found = f'in the end AUC is {own:.2f} on data.train and {new["auc"]:.2f} on data.valid'
      told.append(f'The model overfits: {found}.')
  advice = [*_harmful_columns(run), *(_rare_values(run) if told else ())]
  if told:
    advice.append(
      f'{"Else use" if advice else "Use"} more samples, or a model that memorises less: no dnn or '
      'a smaller one, a smaller width, l2, dropout, or admission of frequent features alone '
      '(lifecycle.admission).'
    )
  if told or advice:
    yield ' '.join([*told, *advice])


def _harmful_columns(run: RecordedRun) -> Iterator[str]:
  # Chance finds such a column in one of twenty runs at most: the intervals are widened to hold for
  # all columns together (the Bonferroni correction).
  for _, measured in run.of('importance').tail(1).iterrows():
    columns = importances(measured)
    scale = statistics.NormalDist().inv_cdf(1 - 0.025 / max(1, len(columns))) / Z

    def gains(worse: Mapping[str, float | None], scale: float = scale) -> set[int]:
      """Returns 1 if a metric gains by more than chance, −1 if one loses."""
      bounds = [(worse.get(m), worse.get(f'{m}_plus_minus')) for m in ('auc', 'logloss')]
      return {-1 if by > 0 else 1 for by, error in bounds if error and abs(by) > scale * error}

    if names := [repr(name) for name, worse in columns.items() if gains(worse) == {1}]:
      yield (
        f'With {listed(names)} permuted over the samples data.{measured["split"]} is predicted '
        f'better, by more than chance: leave {"it" if len(names) == 1 else "them"} out, or make '
        'the values coarser.'
      )


def _rare_values(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence on the slots of many rare values without `counts`, if they can have them."""
  kept, chosen = run.kept_slots(), {}
  for i, slot in enumerate(run.cfg.data.slots):
    features, shows = (kept.get(slot.name, {}).get(name, 0) for name in ('features', 'shows'))
    is_rare = features >= LEAST_RARE and MOST_NEW * shows > features > shows / RARE
    if is_rare and not slot.counts and slot.shares is None:
      chosen[f'data.slots.{i}.counts=true'] = f"'{slot.name}'"
  try:
    config.load_of_run(run.directory, list(chosen))
  except ConfigError:  # such as with squared_error
    return
  if chosen:
    yield (
      f'{plural("Slot", len(chosen))} {listed(list(chosen.values()))} '
      f'{"hold" if len(chosen) > 1 else "holds"} many rare values, whose factors learn single '
      f'samples by heart. Counts may help: {" ".join(f"--set {key}" for key in chosen)}.'
    )


@_check(of=_deciding)
def better_logloss(run: RecordedRun) -> Iterator[str]:
  kept, valid = run.best, run.evaluated('valid')
  if kept is None or run.metric != 'auc' or not (interval := auc_interval_of(kept)):
    return
  other = valid.loc[valid['logloss'].fillna(math.inf).idxmin()]
  if other['auc'] > interval[0] and kept['logloss'] > (1 + WORSE_LOGLOSS) * other['logloss']:
    yield (
      f'The kept epoch {kept["epoch"]:.0f} has the best AUC, {kept["auc"]:.4f}, but a logloss of '
      f'{kept["logloss"]:.4f}; epoch {other["epoch"]:.0f} has AUC {other["auc"]:.4f} and logloss '
      f'{other["logloss"]:.4f}. If probabilities matter: train.plateau.metric: logloss.'
    )


@_check(of=RecordedRun.by_task, last='eval')
def calibration(run: RecordedRun, last: pd.Series) -> Iterator[str]:
  if is_miscalibrated(last, MISCALIBRATED):
    how = 'above' if last['calibration'] > 1 else 'below'
    off = f'{abs(last["calibration"] - 1):.0%} {how} {run.task or "the clicks"}'
    yield f'Predictions of the {last["split"]} split ({last["pass"]}) lie {off}.'


@_check(of=RecordedRun.by_task)
def constant(run: RecordedRun) -> Iterator[str]:
  of_task = f' of {run.task}' * bool(run.task)
  for split, row in run.scores.items():
    if split != 'next' and (told := no_judge(row, of_task)):
      yield f'On data.{split}, {told}.'
    elif split != 'next' and (told := worse_than_constant(row)):
      yield f'On data.{split}, the kept state does not help: {told}{of_task}.'


@_check()
def finds_less(run: RecordedRun) -> Iterator[str]:
  scores = [run.scores.get(split, {}) for split in ('valid', 'test')]
  found = [(of.get(run.metric), of.get('queries')) for of in scores]
  if not run.cfg.ranking_metrics or any(None in pair for pair in found):
    return
  (before, _), (now, _) = found
  # Means over users of values between 0 and 1, whose variance is at most p (1 − p) for a mean of p.
  errors = [math.sqrt(max(0.0, p * (1 - p)) / users) for p, users in found]
  if now < before / 2 and before - now > Z * math.hypot(*errors):
    told = f'On data.test {run.metric} is {now:.4f}, on data.valid {before:.4f}'
    yield f'{told}. If the samples of data.test are later, train on the days between, too.'


@_check()
def weights(run: RecordedRun) -> Iterator[str]:
  of_slots = {
    slot: of.get('features', 0) + of.get('admitted', 0) * (of.get('width') or 0)
    for slot, of in run.kept_slots().items()
  }
  weights = sum(of_slots.values())
  if run.samples and weights > MOST_WEIGHTS * run.samples:
    largest = max(of_slots, key=of_slots.get)
    yield (
      f'The tables hold {weights:,.0f} weights, but the log has only {run.samples:,.0f} samples to '
      f"train them; {of_slots[largest] / weights:.0%} are of slot '{largest}'. Use a smaller width "
      'or a higher lifecycle.admission_threshold.'
    )


@_check()
def unique_values(run: RecordedRun) -> Iterator[str]:
  scored = next(iter(run.scores.values()), {}).get('slots')
  of_items = run.cfg.columns_of_items()  # an item may get a row before it is ever shown
  if run.cfg.data.items is not None:
    of_items.add(run.cfg.item_slot.name)
  for slot, (features, shows) in _unique_slots(run).items():
    if slot in of_items:
      continue
    of_slot = scored.get(slot, {}) if isinstance(scored, dict) else {}
    unknown = of_slot.get('unknown')
    told = f'; the model does not know {unknown:.0%} of those it evaluates' if unknown else ''
    share, bytes_share = features / max(features, shows), run.kept_slots()[slot].get('bytes_share')
    yield (
      f"Slot '{slot}' has a new value in {share:.0%} of its impressions: {features:,.0f} features "
      f'of {shows:,.0f} impressions, in {bytes_share or 0:.0%} of the bytes{told}. '
      'Leave it out, or make its values coarser.'
    )


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
def bad_records(run: RecordedRun) -> Iterator[str]:
  trained = run.of('train')
  bad = trained[trained['bad'] > 0].drop_duplicates('pass')
  if len(bad):
    names = listed([f'{name} ({records:,.0f})' for name, records in zip(bad['pass'], bad['bad'])])
    yield f'{bad["bad"].sum():,.0f} bad records were left out: {names}.'


@_check()
def passes_set_aside(run: RecordedRun) -> Iterator[str]:
  told, trained = run.of('pass'), run.of('train')['pass']

  def reason(row: pd.Series) -> str:
    is_mended = row['fate'] == 'refused' and row['pass'] in set(trained[trained.index > row.name])
    return f'{row["reason"]}{" (trained on since)" * is_mended}'

  for fate, some in told.groupby('fate'):
    reasons = '; '.join(reason(row) for _, row in some.head(2).iterrows())
    reasons += f'; and {len(some) - 2} more' * (len(some) > 2)
    were = 'were' if len(some) > 1 else 'was'
    yield f'{counted(len(some), "pass")} {were} {fate}: {reasons}.'


@_check()
def lost_ranks(run: RecordedRun) -> Iterator[str]:
  for _, lost in run.of('lost').iterrows():
    reason = str(lost['reason']).partition('. ')[0]
    yield f'The job ended at step {lost["step"]:,.0f}: {reason}.'


@_check()
def interruptions(run: RecordedRun) -> Iterator[str]:
  if steps := [f'{step:,.0f}' for step in run.of('start')['step'].iloc[1:] if step]:
    times = 'once' if len(steps) == 1 else f'{len(steps)} times'
    yield f'The job ended and was continued {times}, at step {listed(steps)}.'
