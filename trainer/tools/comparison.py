"""Compares several runs: their metrics on the same split, and the settings in which they differ."""

import re
from collections.abc import Iterator, Sequence

import pandas as pd

from trainer.plain_data import Json
from trainer.reporting.metric_text import decimals, metric_text
from trainer.tools.runs import RecordedRun
from trainer.tools.summary import NAMES, state

_THERE = 'there'
_COMPUTED = re.compile(r'-?\d+\.\d{7,}(e-?\d+)?')  # a number that nobody typed


def differences(runs: Sequence[RecordedRun]) -> tuple[pd.DataFrame, list[str]]:
  """Returns a table with a row for each run, and sentences that say how to read it.

  The metrics are of the kept state, on the first of test, valid and next that all runs have, and of
  the task that chose the best epoch. Differences are a run's metric minus the first run's.
  """
  decided = [run.deciding for run in runs]
  split = next((s for s in ('test', 'valid', 'next') if all(s in r.scores for r in decided)), None)
  rows, notes = [], []
  scores = [run.scores[split] for run in decided] if split else [pd.Series(dtype=float)] * len(runs)
  first = scores[0]
  for run, score in zip(decided, scores):
    row = {'run': run.directory, 'state': state(run), 'samples': run.samples}
    for metric, title in NAMES.items():
      if pd.notna(score.get(metric)):
        row[title] = metric_text(metric, score[metric])
        compares = score is not first and pd.notna(first.get(metric))
        form = f'+.{decimals(metric, score[metric])}f'
        difference = format(score[metric] - first[metric], form) if compares else ''
        row[f'{title} difference'] = difference
    row['calibration'] = score.get('calibration')
    row['samples/s'] = run.of('train')['examples_per_second'].median()
    rows.append(row)
  if split is None:
    notes.append('The runs were not evaluated on the same split, so they cannot be compared.')
  else:
    notes.append(
      f'Metrics are of the {split} split; differences are from {runs[0].name}. They may be chance: '
      'ctr-report with --data FILE tells their intervals over the samples of a file, and with '
      '--seeds N over seeds too.'
    )
    if len({(score['examples'], score.get('ctr')) for score in scores}) > 1:
      notes.append(f'Their {split} data differ, which may be why their metrics differ.')
  return pd.DataFrame(rows).dropna(axis=1, how='all'), notes


def settings_that_differ(runs: Sequence[RecordedRun]) -> pd.DataFrame:
  """Returns the settings in which runs differ: a row for each key, a column for each run.

  Slots, columns and interactions are matched by name. One that a run lacks has a single row.
  """
  dropped = {'run_dir', 'report'}
  table = pd.DataFrame([dict(_settings(run.cfg.model_dump(exclude=dropped))) for run in runs]).T
  table.columns = [run.name for run in runs]
  is_lacking = table.eq(_THERE).any(axis=1) & table.isna().any(axis=1)
  below = tuple(f'{key}.' for key in table.index[is_lacking])
  table = table[[not key.startswith(below) for key in table.index]]
  table = table[table.nunique(axis=1, dropna=False) > 1].fillna('')
  rows = [_shortened(row) for row in table.to_numpy().tolist()]  # runs may have the same name
  return pd.DataFrame(rows, table.index, table.columns)


def _shortened(row: list[str]) -> list[str]:
  """Returns a row of settings with 4 digits of each computed number, if they still differ."""
  short = [f'{float(text):.4g}' if _COMPUTED.fullmatch(text) else text for text in row]
  return short if len(set(short)) == len(set(row)) else row


def _settings(tree: Json, prefix: str = '') -> Iterator[tuple[str, str]]:
  """Yields each key of a config, joined by dots, and its value as text.

  An entry of a list goes by its name or kind, and is itself a key too, with the value _THERE.
  """
  if isinstance(tree, list) and tree and isinstance(tree[0], dict):
    named: dict[str, Json] = {}
    for entry in tree:
      name = str(entry.get('name', entry.get('kind')))
      named[f'{name}_{len(named)}' if name in named else name] = entry
    for name, entry in named.items():
      yield prefix + name, _THERE
      yield from _settings(entry, f'{prefix}{name}.')
  elif isinstance(tree, dict) and tree:
    for name, value in tree.items():
      yield from _settings(value, f'{prefix}{name}.')
  else:
    yield prefix[:-1], str(tree)
