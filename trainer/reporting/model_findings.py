"""What is wrong with the model of a run: each function yields a sentence for each such thing."""

import math
import statistics
from collections.abc import Iterator, Mapping

import pandas as pd

from trainer import config
from trainer.errors import ConfigError
from trainer.model.slices import Z, auc_interval_of
from trainer.plain_data import Json
from trainer.reporting.metric_text import (
  clicks_of,
  listed,
  metric_text,
  no_judge,
  worse_than_constant,
)
from trainer.reporting.runs import RecordedRun

# Thresholds beyond which a fault is reported.
LEAK_AUC, LEAK_LOSS = 0.93, 0.15  # the model's AUC, and how much it falls without one slot
COLLAPSED_SHARE = 0.25  # effective rank of a slot's factors, as a share of the width
MISCALIBRATED = 0.1  # deviation of the calibration from 1
WORSE_LOGLOSS = 0.01  # of the kept epoch, above the best epoch's, as a share
OVERFITTING = 0.1  # AUC on data.train minus AUC on data.valid
# A slot of rare values: its least number of features, the most impressions of each, and the most
# features per impression; beyond that they are new all the time, so that counts know nothing.
LEAST_RARE, RARE, MOST_NEW = 100, 30, 0.5
MOST_WEIGHTS = 20  # weights per sample
LONG_STEPS = 1.35  # logloss of the first pass over that of predicting its share of clicks
LARGE = 10  # root mean square of a dense column that may cause such a logloss
LEAST_CLICKS = 100  # of the first pass; with fewer, its logloss may be chance


def leaks(run: RecordedRun) -> Iterator[str]:
  for _, last in run.of('importance').tail(1).iterrows():
    for slot, loss in last['slots'].items() if last['auc'] > LEAK_AUC else ():
      if (loss['auc'] or 0) - (loss.get('auc_plus_minus') or 0) > LEAK_LOSS:
        yield (
          f"Slot '{slot}' looks like a leak of the label: with it AUC is {last['auc']:.4f}, with "
          f'its features permuted over samples {last["auc"] - loss["auc"]:.4f}.'
        )


def factors(run: RecordedRun) -> Iterator[str]:
  widths = {s.name: run.cfg.sparse.tables[s.table].width for s in run.cfg.ordered_slots}
  for slot, values in run.kept_slots().items():
    width = values.get('width') or widths[slot]
    if (dead := values.get('dead_columns')) and width:
      columns = f'column{"s" * (len(dead) > 1)} {listed([str(column) for column in dead])}'
      yield f"The factors of slot '{slot}' are (almost) 0 in every row in {columns}."
    rank = values.get('effective_rank')
    if rank is None or values.get('admitted', 0) < 8 * width or width < 4:
      continue
    if rank < max(1.5, COLLAPSED_SHARE * (width - len(dead or ()))):
      yield f"The factors of slot '{slot}' have collapsed to an effective rank of {rank:.1f}."


def calibration(run: RecordedRun) -> Iterator[str]:
  for run_of_task in run.by_task():
    for _, last in run_of_task.of('eval').tail(1).iterrows():
      if is_miscalibrated(last, MISCALIBRATED):
        how = 'above' if last['calibration'] > 1 else 'below'
        off = f'{abs(last["calibration"] - 1):.0%} {how} {run_of_task.task or "the clicks"}'
        yield f'Predictions of the {last["split"]} split ({last["pass"]}) lie {off}.'


def uncalibrated(run: RecordedRun) -> Iterator[str]:
  if reason := run.cfg.uncalibrated():
    yield f'{reason[0].upper()}{reason[1:]}.'


def is_miscalibrated(values: Mapping[str, Json], tolerance: float) -> bool:
  """Returns whether calibration differs from 1 by more than `tolerance`, and not by chance."""
  calibration, clicks = values.get('calibration'), clicks_of(values)
  if calibration is None or not calibration > 0:
    return False
  by_chance = Z / clicks**0.5 if clicks else 0  # the 95 % bound of an error of log(clicks)
  return abs(calibration - 1) > tolerance and abs(math.log(calibration)) > by_chance


def overfits(trained_auc: float | None, values: Mapping[str, Json]) -> bool:
  """Returns whether AUC on new samples (`values`) is far below `trained_auc`, and not by chance."""
  auc, interval = values.get('auc'), auc_interval_of(values)
  if auc is None or trained_auc is None:
    return False
  return trained_auc - auc > OVERFITTING and not (interval and trained_auc < interval[1])


def constant(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence for each split that judges no model, or on which a constant is better."""
  for run_of_task in run.by_task():
    for split, row in run_of_task.scores.items():
      of_task = f' of {run_of_task.task}' * bool(run_of_task.task)
      if split != 'next' and (told := no_judge(row, of_task)):
        yield f'On data.{split}, {told}.'
      elif split != 'next' and (told := worse_than_constant(row)):
        yield f'On data.{split}, the kept state does not help: {told}{of_task}.'


def better_logloss(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence if another epoch has a clearly better logloss than the kept one.

  The AUC of that epoch must be as high as the kept one's, up to chance.
  """
  run = run.deciding
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


def overfitting(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence if the AUC is far higher on data.train than on data.valid; says what helps.

  Without such a difference, columns with which the model predicts worse are still named.
  """
  run = run.deciding
  trained, valid, told = run.of('train'), run.evaluated('valid'), []
  if len(trained) and len(valid) and not run.cfg.data.watch:
    own, new = trained['auc'].iloc[-1], valid['auc'].iloc[-1]
    if overfits(own, valid.iloc[-1]):
      told.append(
        f'The model overfits: in the end AUC is {own:.2f} on data.train and {new:.2f} on '
        'data.valid.'
      )
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
  """Yields a sentence on the columns whose permutation makes the predictions better, if any.

  Chance finds such a column in one of twenty runs at most: the intervals are widened to hold for
  all columns together (the Bonferroni correction).
  """
  for _, measured in run.of('importance').tail(1).iterrows():
    dense = measured.get('dense')
    columns = measured['slots'] | (dense if isinstance(dense, dict) else {})
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
      f'Slot{"s" * (len(chosen) > 1)} {listed(list(chosen.values()))} '
      f'{"hold" if len(chosen) > 1 else "holds"} many rare values, whose factors learn single '
      f'samples by heart. Counts may help: {" ".join(f"--set {key}" for key in chosen)}.'
    )


def long_steps(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence if the first pass has a far worse logloss than a constant prediction.

  Then dense columns have large values, or the steps of the rows are probably too long: on two
  made-up logs half of the default learning rate then raised the test AUC by 0.01 to 0.03.
  """
  run = run.deciding
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
  if not isinstance(figures, dict):
    return ''
  sizes = {name: of.get('size', 0) for name, of in figures.items()}
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


def finds_less(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence if a retrieval model finds far fewer items on data.test than on data.valid.

  Recall and the other metrics are means over users of values between 0 and 1. The variance of such
  a value is at most p (1 − p), where p is the mean.
  """
  valid, test = (run.scores.get(split, {}) for split in ('valid', 'test'))
  found = [(of.get(run.metric), of.get('queries')) for of in (valid, test)]
  if not run.cfg.model.retrieval or any(None in pair for pair in found):
    return
  (before, _), (now, _) = found
  errors = [math.sqrt(max(0.0, p * (1 - p)) / users) for p, users in found]
  if now < before / 2 and before - now > Z * math.hypot(*errors):
    values = [metric_text(run.metric, value) for value in (now, before)]
    yield (
      f'On data.test {run.metric} is {values[0]}, on data.valid {values[1]}. If the samples of '
      'data.test are later, train on the days between, too.'
    )


def weights(run: RecordedRun) -> Iterator[str]:
  """Yields a sentence if the tables hold far more weights than the log has samples."""
  slots = run.kept_slots()
  of_slots = {
    slot: of.get('features', 0) + of.get('admitted', 0) * (of.get('width') or 0)
    for slot, of in slots.items()
  }
  weights = sum(of_slots.values())
  if run.samples and weights > MOST_WEIGHTS * run.samples:
    largest = max(of_slots, key=of_slots.get)
    yield (
      f'The tables hold {weights:,.0f} weights, but the log has only {run.samples:,.0f} samples to '
      f"train them; {of_slots[largest] / weights:.0%} are of slot '{largest}'. Use a smaller width "
      'or a higher lifecycle.admission_threshold.'
    )
