"""Columns without which a model may be better: which look so, and the config without one.

A column of the log and all that is made of it are a unit: its bins, crosses with it, and lists that
share its features. It is permuted, judged and left out as a whole.
"""

import json
import os
import shlex
import statistics
from collections.abc import Iterator, Mapping

from trainer import config
from trainer.config.columns import cross_slot
from trainer.plain_data import Json
from trainer.reporting.metric_text import Z
from trainer.tools.runs import RecordedRun, importances
from trainer.tools.sentences import Finding, found

COLD = 0.5  # share of samples whose value in a slot training never saw


def units(cfg: config.Config) -> dict[str, list[int]]:
  """Returns {column of the log: the places of the slots and dense columns that go with it}.

  Places count `cfg.ordered_slots`, then `cfg.data.dense`.
  """
  places: dict[str, dict[int, None]] = {}
  slots = {slot.name: slot for slot in cfg.data.slots}
  for i, column in enumerate([*cfg.ordered_slots, *cfg.data.dense]):
    for part in filter(None, (column, slots.get(getattr(column, 'shares', None)))):
      for name, _ in cfg.data.columns_of(part):
        places.setdefault(name, {})[i] = None
  return {name: [*own] for name, own in places.items()}


def of_log(slot: config.Slot) -> list[str]:
  """Returns the column of the log that a slot is; [] if it is made of others."""
  return [] if slot.made else [slot.column or slot.name]


def without(cfg: config.Config, column: str) -> list[str]:
  """Returns settings KEY=VALUE that leave out a column of the log, and all that is made of it."""
  places, slots = units(cfg)[column], len(cfg.data.slots)
  gone = {cfg.ordered_slots[i].name for i in places if i < slots}
  gone_dense = {cfg.data.dense[i - slots].name for i in places if i >= slots}
  stays = {
    'slots': lambda slot: slot['name'] not in gone,
    'dense': lambda dense: dense['name'] not in gone_dense,
    'crosses': lambda cross: cross_slot(cross) not in gone,
  }
  given = [(key, own) for key, own in cfg.given['data'].items() if key in stays]
  return [f'data.{key}={json.dumps([*filter(stays[key], own)])}' for key, own in given]


def command(run: RecordedRun) -> str:
  """Returns the command that trains without each column that findings name; '' if it cannot."""
  if not run.cfg.data.valid or run.cfg.data.stream or run.cfg.ranking_metrics:
    return ''
  given, study = os.path.join(run.directory, config.GIVEN), f'{run.directory}-columns'
  return f'ctr-tune --config {shlex.quote(given)} --study_dir {shlex.quote(study)} --columns'


def cold(
  cfg: config.Config, by_split: Mapping[str, Mapping[str, Mapping[str, Json]]], command: str
) -> Iterator[Finding]:
  """Yields a finding if training never saw most values of a slot.

  Args:
    by_split: the figure `slots` of data.valid and data.test.
  """
  shares: dict[str, dict[str, float]] = {}
  for slot in cfg.ordered_slots:
    of = {s: slots.get(slot.name, {}).get('unknown') or 0.0 for s, slots in by_split.items()}
    # What crosses combine may be known well.
    if max(of.values(), default=0) >= COLD and len({*cfg.data.columns_of(slot)}) == 1:
      shares[slot.name] = of
  if shares:
    slots = [] if cfg.ranking_metrics else cfg.ordered_slots  # towers need their ids
    may_go = [column for slot in slots if slot.name in shares for column in of_log(slot)]
    yield found('cold', shares=shares, may_go=may_go, command=command)


def harmful(run: RecordedRun) -> Iterator[Finding]:
  """Yields a finding on the columns with which data.valid is predicted worse."""
  # Chance finds such a column in one of twenty runs at most: the intervals are widened to hold for
  # all columns together (the Bonferroni correction).
  for _, measured in run.of('importance').tail(1).iterrows():
    if measured['split'] != 'valid' or not isinstance(measured.get('columns'), dict):
      return  # data.test reports the result; 0.2.0 permuted slots one by one
    columns = importances(measured)
    scale = statistics.NormalDist().inv_cdf(1 - 0.025 / max(1, len(columns))) / Z

    def gains(worse: Mapping[str, float | None], scale: float = scale) -> set[int]:
      """Returns 1 if a metric gains by more than chance, −1 if one loses."""
      bounds = [(worse.get(m), worse.get(f'{m}_plus_minus')) for m in ('auc', 'logloss')]
      return {-1 if by > 0 else 1 for by, error in bounds if error and abs(by) > scale * error}

    if names := [name for name, worse in columns.items() if gains(worse) == {1}]:
      yield found('harmful', may_go=names, command=command(run))
