"""Detects drift: compares the bins and dense columns of each day with those of the first one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from trainer import config
from trainer.plain_data import Json, JsonObject
from trainer.reporting.listener import Listener
from trainer.tools.sentences import Finding, found

if TYPE_CHECKING:  # importing TensorFlow takes seconds, which a report does not have
  from trainer.data.prepared import PreparedPass
  from trainer.training.inputs import Inputs
  from trainer.training.run_log import RunLog
  from trainer.training.run_state import RunState

DRIFTED = 0.25  # a population stability index above it is usually called a significant change
BEYOND = 0.25  # the share of a dense column's values that `standardise` cuts
_MOST_CHUNKS = 8  # how many chunks of a pass are counted


class Drift(Listener):
  """Compares days or, without days, passes of the first epoch."""

  def __init__(self, cfg: config.Config, inputs: 'Inputs', state: 'RunState', log: 'RunLog'):
    self._cfg, self._inputs, self._state, self._log = cfg, inputs, state, log

  def trained(self, prepared: 'PreparedPass', name: str) -> None:
    if self._state.progress.epoch == 0:
      self._count(prepared)
      if not self._cfg.data.has_days:
        self._compare(name, **{'pass': name})

  def day_ended(self, day: int, is_empty: bool) -> None:
    if not is_empty:
      self._compare(f'day {day}', day=day)

  def _count(self, prepared: 'PreparedPass') -> None:
    """Adds a pass to the counts of the day: samples by bin, and dense values that are cut.

    Counted are, for each slot made of bins, the samples in each bin, and, for each dense column
    with a bound, the values cut to it; of a long pass, only in its first chunks. Every process
    calls it, reads the same samples, and keeps the same counts.
    """
    from trainer.data.columns import bins
    from trainer.data.features import hash_keys

    cfg, counted = self._cfg, self._state.progress.bins
    stats = self._inputs.step.dense.embedding.stats.numpy()
    _count_beyond(cfg.data.dense, counted.setdefault('beyond', {}), prepared, stats)
    ids, today = cfg.slot_ids(), counted.setdefault('today', {})
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

  def _compare(self, when: str, **place: Json) -> None:
    """Compares the finished day, or pass, with the first one, and writes an event `drift`.

    On process 0 it warns of slots and columns that have drifted far.
    """
    slots, beyond = compared(self._state.progress.bins)
    if not slots and not beyond:
      return
    self._log.write('drift', slots=slots, beyond=beyond, **place)
    if self._inputs.communicator.rank == 0:
      for finding in drifted(when, slots, beyond):
        logging.warning('%s', finding.sentence)


def _count_beyond(
  columns: Sequence[config.DenseColumn],
  counts: dict[str, list[int]],
  prepared: 'PreparedPass',
  stats: np.ndarray,
) -> None:
  """Adds a pass to `counts`, {column: [number of values cut to its bound, number of all values]}.

  `stats` is float32 [3, >= Dn], a result of `dense_stats`.
  """
  from trainer.data.features import transform_dense

  bounds = stats[2, : len(columns)]
  if not bounds.any():
    return
  values = prepared.dense(_MOST_CHUNKS)
  present = np.isfinite(values)
  cut = present & (np.abs(transform_dense(values, columns, stats)) >= bounds)
  for i in np.flatnonzero(bounds):
    name, of_pass = columns[i].name, [cut[:, i].sum(), present[:, i].sum()]
    counts[name] = np.add(counts.get(name, [0, 0]), of_pass).tolist()


def compared(bins: JsonObject) -> tuple[JsonObject, dict[str, float]]:
  """Compares the counts of today in `bins`, which it removes, with those of the first day.

  On the first day there is nothing to compare; its counts are kept for later days.

  Returns:
    {slot: figures}, and {dense column: the share of its values that are cut to its bound}. The
    figures of a slot are

    psi      the population stability index over the bins, Σ (p − q) ln(p / q). Here p is a bin's
             share of this day's samples, q its share of the first day's. A count below half a
             sample is taken as half a sample.
    first    the shares of the first day's samples.
    last     the shares of this day's samples.
  """
  today, cut_and_all = bins.pop('today', {}), bins.pop('beyond', {})
  first = bins.setdefault('first', today)
  if first is today:
    return {}, {}
  slots = {n: _compared(first[n], counts) for n, counts in today.items() if n in first}
  beyond = {name: cut / total for name, (cut, total) in cut_and_all.items() if total}
  return slots, beyond


def drifted(
  when: str, slots: Mapping[str, JsonObject], beyond: Mapping[str, float]
) -> Iterator[Finding]:
  """Yields a finding for each slot and dense column that has drifted far; see `compared`."""
  for slot, of in slots.items():
    if of['psi'] > DRIFTED:
      yield found('drifted', slot, psi=of['psi'], when=when)
  for column, share in beyond.items():
    if share > BEYOND:
      yield found('left_range', column, share=share, when=when)


def _compared(first: list[int], last: list[int]) -> JsonObject:
  q, p = (np.maximum(counts, 0.5) / max(sum(counts), 1) for counts in (first, last))

  def shares(counts: list[int]) -> list[float]:
    return [round(n / max(sum(counts), 1), 6) for n in counts]

  psi = float(np.sum((p - q) * np.log(p / q)))
  return {'psi': psi, 'first': shares(first), 'last': shares(last)}
