"""Describes a log: its days, slots and dense columns, and the memory of its embedding tables."""

import collections
from collections.abc import Sequence

import numpy as np
import pandas as pd

from ops.policy import Policy
from ops.row_optimizers import state_floats
from trainer import config
from trainer.config.sparse import Table
from trainer.data.prepared import PreparedPass
from trainer.plain_data import JsonObject

BATCH = 65536
HEAD = 100  # the most frequent features of a slot
QUANTILES = (0, 0.01, 0.25, 0.5, 0.75, 0.99, 1)
MAX_VALUES = 1_000_000  # the first values of a dense column, from which quantiles are computed
# Measured (docs/performance.md): the bytes of a feature before it gets an embedding, and the factor
# by which memory allocation makes rows larger.
PROBATION_BYTES = 73
OVERHEAD = 1.5


class _SlotFigures:
  def __init__(self) -> None:
    self.counts = pd.DataFrame(columns=['shows', 'clicks'], dtype=np.float64)  # by feature
    self.of_day: dict[int, np.ndarray] = {}  # distinct features
    self.features = self.blank = 0

  def add(self, day: int, keys: np.ndarray, clicks: np.ndarray, blank: int) -> None:
    self.features += len(keys)
    self.blank += blank
    counts = pd.DataFrame({'shows': 1.0, 'clicks': clicks}, index=keys).groupby(level=0).sum()
    self.counts = self.counts.add(counts, fill_value=0)
    self.of_day[day] = np.union1d(self.of_day.get(day, counts.index), counts.index)

  def described(self, samples: int) -> JsonObject:
    shows = np.sort(self.counts['shows'].to_numpy())[::-1]
    days = sorted(self.of_day)
    return {
      'blank': self.blank / max(samples, 1),
      'distinct': len(shows),
      'seen_once': float((shows == 1).mean()) if len(shows) else 0.0,
      'features_per_sample': self.features / max(samples, 1),
      'head': float(shows[:HEAD].sum() / max(shows.sum(), 1)),
      'new_by_day': {
        day: float(1 - np.isin(self.of_day[day], self.of_day[before]).mean())
        for before, day in zip(days, days[1:])
        if len(self.of_day[day])
      },
    }


def _admitted_share(counts: pd.DataFrame, policy: Policy, slot_id: int) -> float:
  """Returns the share of a slot's features that the log would admit; ignores decay."""
  of_slot, shows, clicks = policy.for_slot(slot_id), counts['shows'], counts['clicks']
  score = (shows - clicks) * of_slot.nonclk_coeff + clicks * of_slot.clk_coeff
  shares = {
    'none': shows >= 0,
    'count': shows >= of_slot.admission_count,
    'probability': 1 - (1 - of_slot.admission_probability) ** shows,
    'score': score >= of_slot.admission_threshold,
  }
  return 1.0 if counts.empty else float(shares[policy.admission].mean())


def _row_bytes(table: Table, fields: int) -> float:
  """Estimates a feature's bytes: the embeddings of all `fields`, and their optimizer state."""
  number, width = 2 if table.dtype == 'bfloat16' else 4, table.width * fields
  return OVERHEAD * number * (width + state_floats(table.factors.kind, width))


def describe(passes: Sequence[PreparedPass], cfg: config.Config) -> JsonObject:
  """Returns statistics of passes.

  Returns:
    samples: their number.
    days: samples and label_rate of each day.
    slots: for each, blank (the share of samples without a feature), distinct (the number of
      features), seen_once (the share of features that occur once), features_per_sample, head (the
      share of occurrences of the HEAD most frequent features) and new_by_day (the share of a day's
      features that the previous day did not have).
    dense: for each, missing (the share of samples) and quantiles.
    table_bytes: the estimated bytes of all rows, as without_admission and with_admission.
    of_items: the columns of data.items; they are not in the log, and all else leaves them out.
  """
  of_items = cfg.columns_of_items()
  slots = {slot.name: _SlotFigures() for slot in cfg.ordered_slots}
  values: list[list[np.ndarray]] = [[] for _ in cfg.data.dense]
  missing, kept = np.zeros(len(cfg.data.dense)), 0
  days: dict[int, np.ndarray] = collections.defaultdict(lambda: np.zeros(2))
  for prepared in passes:
    for batch in prepared.batches(BATCH):
      n, f = len(batch.label), len(slots)
      label = np.nan_to_num(batch.label.reshape(n, -1)[:, 0])  # of the first task
      days[prepared.day] += [n, label.sum(dtype=np.float64)]
      is_flat = not len(batch.segments) and len(batch.keys)
      segments = np.arange(n * f) if is_flat else batch.segments
      for i, slot in enumerate(slots.values()):
        mine = segments % f == i
        samples = segments[mine] // f
        slot.add(prepared.day, batch.keys[mine], label[samples], n - len(np.unique(samples)))
      is_missing = np.isnan(batch.dense)
      missing += is_missing.sum(0)
      if kept < MAX_VALUES:
        kept += n
        for column, x, gone in zip(values, batch.dense.T, is_missing.T):
          column.append(x[~gone])
  total = int(sum(samples for samples, _ in days.values()))
  without = admitted = 0.0
  policy, ids = cfg.policy(), cfg.slot_ids()
  has_ffm = any(layer.kind == 'ffm' for layer in cfg.model.all_interactions().values())
  fields = len(slots) if has_ffm else 1
  for spec in cfg.ordered_slots:
    counts, row_bytes = slots[spec.name].counts, _row_bytes(cfg.sparse.tables[spec.table], fields)
    share = _admitted_share(counts, policy, ids[spec.name])
    without += len(counts) * (PROBATION_BYTES + row_bytes)
    admitted += len(counts) * (PROBATION_BYTES + share * row_bytes)
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
    'slots': {n: slot.described(total) for n, slot in slots.items() if n not in of_items},
    'dense': {n: figures for n, figures in dense.items() if n not in of_items},
    'table_bytes': {'without_admission': int(without), 'with_admission': int(admitted)},
    'of_items': sorted(of_items),
  }


def table(described: JsonObject) -> str:
  """Returns the result of `describe` as text, a line for each day, slot and dense column."""
  lines = [f'{described["samples"]:,} samples']
  for day, of in described['days'].items():
    lines.append(f'day {day}: {of["samples"]:,} samples, label rate {of["label_rate"]:.4f}')
  row = '{:20} {:>7} {:>12} {:>9} {:>10} {:>6} {:>9}'
  names = ('slot', 'blank', 'distinct', 'seen once', 'per sample', 'head', 'new a day')
  lines.append(row.format(*names))
  row = '{:20} {blank:7.1%} {distinct:12,} {seen_once:9.1%} {features_per_sample:10.2f} '
  row += '{head:6.1%} {}'
  for name, slot in described['slots'].items():
    new = list(slot['new_by_day'].values())
    share = f'{np.mean(new):9.1%}' if new else ' ' * 9
    lines.append(row.format(name[:20], share, **slot))
  for name, d in described['dense'].items():
    quantiles = ' '.join(f'{q:.4g}' for q in d['quantiles'])
    lines.append(f'{name[:20]:20} {d["missing"]:7.1%} missing; quantiles {quantiles}')
  memory = described['table_bytes']
  lines.append(
    f'tables: about {memory["without_admission"] / 2**20:,.0f} MiB with every feature admitted, '
    f'{memory["with_admission"] / 2**20:,.0f} MiB with the lifecycle of the config'
  )
  if described['of_items']:
    lines.append(f'not counted, because data.items has them: {", ".join(described["of_items"])}')
  return '\n'.join(lines)
