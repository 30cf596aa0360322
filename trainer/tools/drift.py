"""Detects drift: compares the bins and dense columns of each day with those of the first one."""

from collections.abc import Sequence

import numpy as np
from absl import logging

from trainer import config
from trainer.data.columns import bins
from trainer.data.features import hash_keys, transform_dense
from trainer.data.prepared import PreparedPass
from trainer.plain_data import Json, JsonObject
from trainer.training.run_log import RunLog
from trainer.training.run_state import Progress

TOLD = 0.25  # a population stability index above it is usually called a significant change
TOLD_BEYOND = 0.25  # the share of a dense column's values that `standardise` cuts
_MOST_CHUNKS = 8  # how many chunks of a pass are counted


def count(
  cfg: config.Config, progress: Progress, prepared: PreparedPass, stats: np.ndarray
) -> None:
  """Adds a pass to the counts of the day: samples by bin, and dense values that are cut.

  The first are of each slot made of bins, the others of each dense column with a bound. Only the
  samples in the first chunks of the pass are counted. Every process calls it, reads the same
  samples, and keeps the same counts in `progress.bins`.

  Args:
    stats: float32 [3, >= Dn], a result of `dense_stats`.
  """
  _count_beyond(cfg.data.dense, progress.bins.setdefault('beyond', {}), prepared, stats)
  ids, today = cfg.slot_ids(), progress.bins.setdefault('today', {})
  for i, slot in enumerate(cfg.ordered_slots):
    is_read = slot.shares is None and slot.name not in cfg.columns_of_items()
    if not (is_read and isinstance(slot.made, config.Bins)):
      continue
    of_bins = hash_keys(bins.texts(slot.made), ids[slot.name]).numpy()
    order = np.argsort(of_bins)
    counts = np.array(today.get(slot.name, [0] * len(of_bins)))
    for chunk in range(prepared.num_chunks)[:_MOST_CHUNKS]:
      samples, features, keys = prepared.fields(chunk, i)
      places = order[np.searchsorted(of_bins[order], keys)]
      np.add.at(counts, places, np.repeat(samples, features))
    today[slot.name] = counts.tolist()


def _count_beyond(
  columns: Sequence[config.DenseColumn],
  counts: dict[str, list[int]],
  prepared: PreparedPass,
  stats: np.ndarray,
) -> None:
  """Adds a pass to `counts`, {column: [its values that are cut to its bound, all its values]}."""
  bounds = stats[2, : len(columns)]
  if not bounds.any():
    return
  values = prepared.dense(_MOST_CHUNKS)
  present = np.isfinite(values)
  cut = present & (np.abs(transform_dense(values, columns, stats)) >= bounds)
  for i in np.flatnonzero(bounds):
    name, of_pass = columns[i].name, [cut[:, i].sum(), present[:, i].sum()]
    counts[name] = np.add(counts.get(name, [0, 0]), of_pass).tolist()


def compare_day(progress: Progress, log: RunLog, warns: bool, **place: Json) -> None:
  """Compares a finished day's counts with those of the first day, and writes an event `drift`.

  The event has three figures for each slot:

    psi      the population stability index over the bins, Σ (p − q) ln(p / q). Here p is a bin's
             share of this day's samples, q its share of the first day's. A count below half a
             sample is taken as half a sample.
    first    the shares of the first day's samples.
    last     the shares of this day's samples.

  Its field `beyond` has {dense column: the share of its values that are cut to its bound}. On the
  first day there is nothing to compare; its counts are kept for later days. If `warns`, it warns of
  slots whose psi is above TOLD, and of columns whose share is above TOLD_BEYOND. `place` is the
  field `day` or, without days, `pass`.
  """
  today, cut_and_all = progress.bins.pop('today', {}), progress.bins.pop('beyond', {})
  first = progress.bins.setdefault('first', today)
  if first is today:
    return
  drifts = {n: _compared(first[n], counts) for n, counts in today.items() if n in first}
  beyond = {name: cut / total for name, (cut, total) in cut_and_all.items() if total}
  if drifts or beyond:
    log.write('drift', slots=drifts, beyond=beyond, **place)
  for name, of in drifts.items():
    if warns and of['psi'] > TOLD:
      logging.warning(
        "slot '%s': on %s its bins have other shares of the samples than on the first day: "
        'population stability index %.2f, above %g',
        *(name, next(iter(place.values())), of['psi'], TOLD),
      )
  for name, share in beyond.items():
    if warns and share > TOLD_BEYOND:
      logging.warning(
        "dense column '%s': on %s %.0f %% of its values are so far from those of the first pass "
        'that standardise cuts them, which makes them alike; a new run measures the column anew',
        *(name, next(iter(place.values())), 100 * share),
      )


def _compared(first: list[int], last: list[int]) -> JsonObject:
  q, p = (np.maximum(counts, 0.5) / max(sum(counts), 1) for counts in (first, last))

  def shares(counts: list[int]) -> list[float]:
    return [round(n / max(sum(counts), 1), 6) for n in counts]

  psi = float(np.sum((p - q) * np.log(p / q)))
  return {'psi': psi, 'first': shares(first), 'last': shares(last)}
