"""Compares how samples share the bins of numbers with how they did on the first day."""

from collections.abc import Mapping

import numpy as np

from trainer import config
from trainer.data.columns import bins
from trainer.data.features import HASH_BITS, hash_keys
from trainer.data.prepared import PreparedPass
from trainer.plain_data import JsonObject
from trainer.training.run_state import Progress

TOLD = 0.25  # a population stability index above it is usually called a significant change
_SAMPLES_AT_ONCE, _MOST_SAMPLES = 65536, 1 << 19  # of a pass, from its first sample on


def count(cfg: config.Config, progress: Progress, prepared: PreparedPass) -> None:
  """Adds the bins of a pass's samples to those of today; the same on every process."""
  ids, today = cfg.slot_ids(), progress.bins.setdefault('today', {})
  keys = {
    s.name: hash_keys(bins.texts(s.made), ids[s.name]).numpy()
    for s in cfg.slots
    if isinstance(s.made, config.Bins) and s.shares is None
  }
  if not keys:
    return
  samples = 0
  for batch in prepared.batches(_SAMPLES_AT_ONCE):
    slots = batch.keys >> HASH_BITS
    for name, of_bins in keys.items():
      order = np.argsort(of_bins)
      places = np.searchsorted(of_bins[order], batch.keys[slots == ids[name]])
      counts = np.bincount(order[places], minlength=len(of_bins))
      today[name] = (counts + today.get(name, 0)).tolist()
    samples += len(batch.dense)
    if samples >= _MOST_SAMPLES:
      break


def end_day(progress: Progress) -> JsonObject:
  """Begins a new day; the first one is what later ones are compared with.

  Returns:
    By slot: `psi`, the population stability index Σ (p − q) ln(p / q) over its bins, with p the
    shares of the day's samples and q those of the first day's, each of them at least half a sample;
    `first` and `last`, the shares.
  """
  first, today = progress.bins.get('first'), progress.bins.pop('today', {})
  if first is None:
    if today:
      progress.bins['first'] = today
    return {}
  return {name: _compared(first[name], counts) for name, counts in today.items() if name in first}


def _compared(first: list[int], last: list[int]) -> JsonObject:
  q, p = (np.maximum(counts, 0.5) / max(sum(counts), 1) for counts in (first, last))
  psi = float(np.sum((p - q) * np.log(p / q)))
  shares = {'first': first, 'last': last}
  return {'psi': psi} | {
    name: [round(n / max(sum(counts), 1), 6) for n in counts] for name, counts in shares.items()
  }


def told(drifts: Mapping[str, JsonObject]) -> list[str]:
  """Returns a line for each slot that has drifted."""
  return [
    f"slot '{name}': its bins are not shared as on the first day: population stability index "
    f'{of["psi"]:.2f}, above {TOLD}'
    for name, of in drifts.items()
    if of['psi'] > TOLD
  ]
