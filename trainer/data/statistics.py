"""What a log is like: its days, its slots' features, its dense columns, the memory that they want.

Shapes: u distinct features of a slot, Dn dense columns.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ops.policy import Policy
from ops.row_optimizers import state_floats
from trainer import config
from trainer.data.prepared import PreparedPass

BATCH = 65536
HEAD = 100  # the most frequent features of a slot
QUANTILES = (0, 0.01, 0.25, 0.5, 0.75, 0.99, 1)
MAX_VALUES = 1_000_000  # of a dense column, from the beginning, that quantiles are of
# Measured (docs/performance.md): a feature before admission, and what a row's bytes are multiplied
# by for the room around it.
PROBATION_BYTES = 73
OVERHEAD = 1.5


class _Features:
  """Distinct features with their shows and clicks."""

  def __init__(self) -> None:
    self.keys = np.zeros([0], np.int64)
    self.counts = np.zeros([0, 2])  # float64 [u, 2]: shows, clicks

  def add(self, keys: np.ndarray, counts: np.ndarray) -> None:
    """Adds occurrences: keys int64 [n], counts float64 [n, 2]."""
    keys = np.concatenate([self.keys, keys])
    counts = np.concatenate([self.counts, counts])
    self.keys, place = np.unique(keys, return_inverse=True)
    self.counts = np.stack([np.bincount(place, c, len(self.keys)) for c in counts.T], 1)


class _SlotFigures:
  """What a slot held."""

  def __init__(self) -> None:
    self.all, self.of_day = _Features(), {}
    self.features = self.blank = 0

  def add(self, day: int, keys: np.ndarray, clicks: np.ndarray, blank: int) -> None:
    self.features += len(keys)
    self.blank += blank
    distinct = _Features()
    distinct.add(keys, np.stack([np.ones(len(keys)), clicks], 1))
    self.all.add(distinct.keys, distinct.counts)
    self.of_day[day] = np.union1d(self.of_day.get(day, distinct.keys), distinct.keys)


def _admitted_share(features: _Features, policy: Policy, slot_id: int) -> float:
  """The share of features that are admitted by the end, decay left aside."""
  of_slot = dataclasses.asdict(policy) | policy.per_slot.get(slot_id, {})
  if policy.admission == 'none' or not len(features.keys):
    return 1.0
  shows, clicks = features.counts.T
  if policy.admission == 'count':
    return float((shows >= of_slot['admission_count']).mean())
  if policy.admission == 'probability':
    return float((1 - (1 - of_slot['admission_probability']) ** shows).mean())
  score = (shows - clicks) * of_slot['nonclk_coeff'] + clicks * of_slot['clk_coeff']
  return float((score >= of_slot['admission_threshold']).mean())


def _row_bytes(slot: config.Slot, cfg: config.Config) -> float:
  """Bytes of an admitted feature's factors with their optimizer state."""
  table = cfg.sparse.tables[slot.table]
  kinds = [one.kind for one in cfg.model.all_interactions().values()]
  width = table.width * (len(cfg.slots) if 'ffm' in kinds else 1)
  number = 2 if table.dtype == 'bfloat16' else 4
  return OVERHEAD * number * (width + state_floats(table.factors.kind, width))


def describe(passes: Sequence[PreparedPass], cfg: config.Config) -> dict[str, Any]:
  """Statistics of passes, in their order.

  Returns:
    JSON: samples; days: samples and label_rate of each; slots: blank, distinct, seen_once,
    features_per_sample, head (the share of occurrences that the HEAD most frequent features have),
    new_by_day (the share of a day's features that the day before had not); dense: missing, and
    quantiles; table_bytes: without_admission and with_admission, an estimate.
  """
  slots = {slot.name: _SlotFigures() for slot in cfg.slots}
  values: list[list[np.ndarray]] = [[] for _ in cfg.data.dense]
  missing, kept = np.zeros(len(cfg.data.dense)), 0
  days: dict[int, np.ndarray] = {}
  for one in passes:
    for batch in one.batches(BATCH):
      n, f = len(batch.label), len(slots)
      label = batch.label if batch.label.ndim == 1 else np.nan_to_num(batch.label[:, 0])
      days[one.day] = days.get(one.day, np.zeros(2)) + [n, label.sum(dtype=np.float64)]
      is_flat = not len(batch.segments) and len(batch.keys)
      segments = np.arange(n * f) if is_flat else batch.segments
      for i, slot in enumerate(slots.values()):
        mine = segments % f == i
        samples = segments[mine] // f
        blank = n - len(np.unique(samples))
        slot.add(one.day, batch.keys[mine], label[samples], blank)
      is_missing = np.isnan(batch.dense)
      missing += is_missing.sum(0)
      if kept < MAX_VALUES:
        kept += n
        for column, x, gone in zip(values, batch.dense.T, is_missing.T):
          column.append(x[~gone])
  total = int(sum(d[0] for d in days.values()))
  without = admitted = 0.0
  policy, ids = cfg.policy(), cfg.slot_ids()
  described = {}
  for spec in cfg.slots:
    slot = slots[spec.name]
    shows = np.sort(slot.all.counts[:, 0])[::-1]
    distinct, row_bytes = len(shows), _row_bytes(spec, cfg)
    without += distinct * (PROBATION_BYTES + row_bytes)
    admitted += distinct * (
      PROBATION_BYTES + _admitted_share(slot.all, policy, ids[spec.name]) * row_bytes
    )
    in_order = sorted(slot.of_day)
    described[spec.name] = {
      'blank': slot.blank / max(total, 1),
      'distinct': distinct,
      'seen_once': float((shows == 1).mean()) if distinct else 0.0,
      'features_per_sample': slot.features / max(total, 1),
      'head': float(shows[:HEAD].sum() / max(shows.sum(), 1)),
      'new_by_day': {
        day: float(1 - np.isin(slot.of_day[day], slot.of_day[before]).mean())
        for before, day in zip(in_order, in_order[1:])
        if len(slot.of_day[day])
      },
    }
  dense = {}
  for column, parts, gone in zip(cfg.data.dense, values, missing):
    x = np.concatenate([np.zeros([0], np.float32), *parts])
    quantiles = np.quantile(x, QUANTILES).tolist() if len(x) else []
    dense[column.name] = {'missing': gone / max(total, 1), 'quantiles': quantiles}
  return {
    'samples': total,
    'days': {
      day: {'samples': int(n), 'label_rate': clicks / n}
      for day, (n, clicks) in sorted(days.items())
    },
    'slots': described,
    'dense': dense,
    'table_bytes': {'without_admission': int(without), 'with_admission': int(admitted)},
  }


def table(found: dict[str, Any]) -> str:
  """The statistics as text, a line each day, slot and dense column."""
  lines = [f'{found["samples"]:,} samples']
  for day, one in found['days'].items():
    lines.append(f'day {day}: {one["samples"]:,} samples, label rate {one["label_rate"]:.4f}')
  row = '{:20} {:>7} {:>12} {:>9} {:>10} {:>6} {:>9}'
  lines.append(
    row.format('slot', 'blank', 'distinct', 'seen once', 'per sample', 'head', 'new a day')
  )
  for name, s in found['slots'].items():
    new = list(s['new_by_day'].values())
    lines.append(
      row.format(
        name[:20],
        f'{s["blank"]:.1%}',
        f'{s["distinct"]:,}',
        f'{s["seen_once"]:.1%}',
        f'{s["features_per_sample"]:.2f}',
        f'{s["head"]:.1%}',
        f'{np.mean(new):.1%}' if new else '',
      )
    )
  for name, d in found['dense'].items():
    quantiles = ' '.join(f'{q:.4g}' for q in d['quantiles'])
    lines.append(f'{name[:20]:20} {d["missing"]:7.1%} missing; quantiles {quantiles}')
  memory = found['table_bytes']
  lines.append(
    f'tables: about {memory["without_admission"] / 2**20:,.0f} MiB with every feature admitted, '
    f'{memory["with_admission"] / 2**20:,.0f} MiB with the lifecycle of the config'
  )
  return '\n'.join(lines)
