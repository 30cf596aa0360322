"""What a check finds, as data, and the one table of the sentences that say it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainer.reporting.metric_text import counted, decimals, listed, plural


class Finding(NamedTuple):
  """Something that went wrong or looks wrong.

  Attributes:
    code: a key of SENTENCES.
    where: the slot, column, pass or split that it is about; '' if it is about the run.
    figures: {name: what was measured}.
  """

  code: str
  where: str
  figures: Mapping[str, Any]

  @property
  def sentence(self) -> str:
    words = SENTENCES[self.code]
    if callable(words):
      return words(where=self.where, **self.figures)
    return words.format(where=self.where, **self.figures)


def found(code: str, where: str = '', **figures: object) -> Finding:
  return Finding(code, where, figures)


def differing_texts(name: str, value: float, other: float) -> tuple[str, str]:
  """Returns two different values of a metric with so many decimals that their texts differ too."""
  for digits in range(decimals(name, min(value, other)), 18):
    texts = f'{value:.{digits}f}', f'{other:.{digits}f}'
    if texts[0] != texts[1]:
      break
  return texts


def _never_filled(where: str, **columns: list[str]) -> str:
  nouns = {'slots': 'slot', 'dense': 'dense column'}
  told = [
    f'{plural(nouns[kind], len(names))} {listed(list(map(repr, names)))}'
    for kind, names in columns.items()
    if names
  ]
  it = 'it' if sum(map(len, columns.values())) == 1 else 'them'
  return (
    f'Blank in every sample of the training: {"; ".join(told)}. Check the log, or leave {it} out.'
  )


def _dead_columns(where: str, columns: list[int]) -> str:
  of = f'{plural("column", len(columns))} {listed(list(map(str, columns)))}'
  return f"The factors of slot '{where}' are (almost) 0 in every row in {of}."


def _first_logloss(where: str, logloss: float, base: float) -> str:
  of_task, positives = (f' of {where}', 'positives') if where else ('', 'clicks')
  return (
    f'In the first pass logloss{of_task} is {logloss:.2f}, far above the {base:.2f} of predicting '
    f'the share of {positives} for all: '
  )


def _large_columns(where: str, logloss: float, base: float, sizes: Mapping[str, float]) -> str:
  columns = listed([f"'{name}' is about {size:.3g}" for name, size in sizes.items()])
  told = f'dense column {columns} (root mean square). Give such columns transform: standardise.'
  return _first_logloss(where, logloss, base) + told


def _long_steps(where: str, logloss: float, base: float, rates: Mapping[str, float]) -> str:
  """Advises to halve the learning `rates`, {config key: rate}; if at most two, as --set to copy."""
  pairs = [(key, f'{rate / 2:.2g}', f'{rate:.3g}') for key, rate in rates.items()]
  if len(pairs) > 2:
    halves = listed([f'{key} {half} in place of {rate}' for key, half, rate in pairs])
  else:
    halves = ' '.join(f'--set {key}={half}' for key, half, _ in pairs)
    halves += f' in place of {" and ".join(dict.fromkeys(rate for *_, rate in pairs))}'
  told = f'steps look too long. Try half of the learning rates: {halves}.'
  return _first_logloss(where, logloss, base) + told


def _may_go(may_go: list[str], command: str) -> str:
  """Says that only trainings tell whether a model is better without some columns."""
  if not may_go:
    return ''
  told = f' The model may be better without {listed(list(map(repr, may_go)))}'
  return told + (f': {command} trains without and says what is gained.' if command else '.')


def _harmful(where: str, may_go: list[str], command: str) -> str:
  it = 'it' if len(may_go) == 1 else 'them'
  return (
    f'With {listed(list(map(repr, may_go)))} and what is made of {it} permuted over the '
    f'samples, data.valid is predicted better, by more than chance.{_may_go(may_go, command)}'
  )


def _cold(where: str, shares: Mapping[str, Mapping[str, float]], **tried: Any) -> str:
  slots = [
    f"'{slot}' in {' and '.join(f'{share:.0%} of data.{split}' for split, share in of.items())}"
    for slot, of in shares.items()
  ]
  return (
    f'Cold start: training never saw the values of {plural("slot", len(slots))} {listed(slots)}.'
    f'{_may_go(**tried)} Features of the past and histories know new values, too '
    '(docs/better_model.md, Cold start).'
  )


def _rare_values(where: str, settings: Mapping[str, str]) -> str:
  names = [f"'{slot}'" for slot in settings]
  return (
    f'{plural("Slot", len(names))} {listed(names)} {"hold" if len(names) > 1 else "holds"} many '
    'rare values, whose factors learn single samples by heart. Counts may help: '
    f'{" ".join(f"--set {setting}" for setting in settings.values())}.'
  )


def _overfits(
  where: str, trained: float, new: float, advice: list[Finding], added: list[str]
) -> str:
  told = f'in the end AUC is {trained:.2f} on data.train and {new:.2f} on data.valid'
  use = (
    f'{"Else use" if advice else "Use"} more samples, or a model that memorises less: no dnn or a '
    'smaller one, a smaller width, l2, dropout, or admission of frequent features alone '
    '(lifecycle.admission).'
  )
  if added:
    use = (
      f'{listed(added)} went on from the last state, which may have overfitted before: begin the '
      'next day with --init_from, which takes the best epoch (docs/tutorial.md).'
    )
  return ' '.join([f'The model overfits: {told}.', *(one.sentence for one in advice), use])


def _miscalibrated(where: str, name: str, calibration: float, of: str) -> str:
  off = f'{abs(calibration - 1):.0%} {"above" if calibration > 1 else "below"} {of}'
  return f'Predictions of the {where} split ({name}) lie {off}.'


def _worse(metric: str, value: float, constant: float, task: str) -> str:
  own, base = differing_texts(metric, value, constant)
  what = 'the mean' if metric == 'rmse' else 'the share of clicks'
  of = f' of {task}' if task else ''
  return f'{metric} {own} is worse than the {base} of predicting {what} for all{of}'


def _no_help(where: str, **values: Any) -> str:
  return f'On data.{where}, the kept state does not help: {_worse(**values)}.'


def _no_help_yet(where: str, why: Finding, **values: Any) -> str:
  return f'{where}: {_worse(**values)}: {why.sentence}'


def _one_class(where: str, label: float, task: str) -> str:
  labels = f'all labels are {label:.0f}' + (f' of {task}' if task else '')
  return (
    f'On data.{where}, {labels}, so they judge no model: hold out samples with labels of both '
    'classes.'
  )


def _unique_values(
  where: str, features: float, shows: float, bytes_share: float, unknown: float | None, **tried: Any
) -> str:
  told = f'; the model does not know {unknown:.0%} of those it evaluates' if unknown else ''
  return (
    f"Slot '{where}' has a new value in {features / max(features, shows):.0%} of its impressions: "
    f'{features:,.0f} features of {shows:,.0f} impressions, in {bytes_share:.0%} of the bytes'
    f'{told}. Coarser values may serve better.{_may_go(**tried)}'
  )


def _bad_records(where: str, records: Mapping[str, float]) -> str:
  names = listed([f'{name} ({number:,.0f})' for name, number in records.items()])
  return f'{sum(records.values()):,.0f} bad records were left out: {names}.'


def _set_aside(where: str, fate: str, reasons: list[str]) -> str:
  told = '; '.join(reasons[:2]) + f'; and {len(reasons) - 2} more' * (len(reasons) > 2)
  were = 'were' if len(reasons) > 1 else 'was'
  return f'{counted(len(reasons), "pass")} {were} {fate}: {told}.'


def _interrupted(where: str, steps: list[float]) -> str:
  times = 'once' if len(steps) == 1 else f'{len(steps)} times'
  at = listed([f'{step:,.0f}' for step in steps])
  return f'The job ended and was continued {times}, at step {at}.'


def _no_auc(where: str, label: float) -> str:
  return f'{where}: ' * bool(where) + f'no AUC: all labels are {label:.0f}'


# {code: a text with the figures' places, or a function of `where` and the figures}
SENTENCES: dict[str, str | Callable[..., str]] = {
  'uncalibrated': '{reason}.',
  'few_admitted': (
    'lifecycle.{where} {threshold:g} admits {admitted:,.0f} of the {features:,.0f} features seen '
    '({share:.1%}): the others have only a linear weight.'
  ),
  'label_rate': (
    'The label of {where} looks broken: its click rate is {rate:.4f}, that of the other passes '
    '{usual:.4f}.'
  ),
  'label_auc': (
    'The label of {where} looks broken: its AUC is {auc:.4f}, that of the passes before '
    '{usual:.4f}.'
  ),
  'never_filled': _never_filled,
  'went_blank': (
    "Slot '{where}' went blank {when}: {share:.0%} of its {of} have no feature, {usual:.0%} before."
  ),
  'cold': _cold,
  'drifted': (
    "The bins of slot '{where}' have drifted since the first day: their population stability index "
    'is {psi:.2f} on {when}.'
  ),
  'left_range': (
    "Dense column '{where}' has left the values of the first pass: {share:.0%} on {when} are cut "
    'by standardise, which makes them alike. A new run measures the column anew.'
  ),
  'leak': (
    "Column '{where}' looks like a leak of the label: with it AUC is {auc:.4f}, with its values "
    'permuted over samples {without:.4f}.'
  ),
  # Why a pass withholds exports.
  'not_finite': '{where} is {value}; wanted a finite one',
  'blank': "slot '{where}' is blank: {share:.2%} of the samples have it; wanted about {usual:.2%}",
  'fell': '{where} is {value:.4f}; wanted {usual:.4f}, or worse by {tolerance:g} at most',
  'no_auc': _no_auc,
  'dead_columns': _dead_columns,
  'collapsed': "The factors of slot '{where}' have collapsed to an effective rank of {rank:.1f}.",
  'large_columns': _large_columns,
  'long_steps': _long_steps,
  'overfits': _overfits,
  'harmful': _harmful,
  'rare_values': _rare_values,
  'better_logloss': (
    'The kept epoch {kept[epoch]:.0f} has the best AUC, {kept[auc]:.4f}, but a logloss of '
    '{kept[logloss]:.4f}; epoch {other[epoch]:.0f} has AUC {other[auc]:.4f} and logloss '
    '{other[logloss]:.4f}. If probabilities matter: train.plateau.metric: logloss.'
  ),
  'miscalibrated': _miscalibrated,
  'one_class': _one_class,
  'no_help': _no_help,
  'no_help_yet': _no_help_yet,
  'finds_no_more': (
    'On data.{where} the model finds no more than a list of the most shown items: {metric} is '
    '{value:.4f}, that of the list {base:.4f}. Of {unknown:.0%} of the queries it knows nothing.'
  ),
  'finds_less': (
    'On data.test {metric} is {test:.4f}, on data.valid {valid:.4f}. If the samples of data.test '
    'are later, train on the days between, too.'
  ),
  'many_weights': (
    'The tables hold {weights:,.0f} weights, but the log has only {samples:,.0f} samples to train '
    "them; {share:.0%} are of slot '{where}'. Use a smaller width or a higher "
    'lifecycle.admission_threshold.'
  ),
  'unique_values': _unique_values,
  'bad_records': _bad_records,
  'set_aside': _set_aside,
  'lost': 'The job ended at step {step:,.0f}: {reason}.',
  'interrupted': _interrupted,
  # Why a model predicts worse than a constant: what `no_help_yet` ends with.
  'large_steps': (
    '{where} takes steps of {kind} at learning_rate {rate:g}; wanted about {usual:g}'
  ),
  'few_steps': (
    'it was trained for {steps} steps only; more epochs or a smaller train.batch_size help'
  ),
  'uncalibrated_loss': '{reason}',
  'overfits_here': (
    'the model overfits: AUC was {trained:.2f} in training and is {new:.2f} here; fewer epochs, '
    'l2, dropout or a smaller width help'
  ),
  'few_clicks': ('{clicks:,.0f} clicks are too few to judge a model by, or to choose an epoch'),
  'other_sampling': (
    'the predictions add up to {calibration:.2f} times the clicks; are both logs sampled alike '
    '(model.negative_sampling_rate), and labelled alike?'
  ),
  'diverges': 'the model overfits or diverges; lower the learning rates{fewer}, or set l2',
}
