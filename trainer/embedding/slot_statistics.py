"""Statistics of each slot's rows: features, shows, norms and the effective rank of the factors."""

from collections.abc import Mapping, Sequence

import numpy as np

from ops.row_store import to_float32
from trainer.config import Slot

# A running job reads at most about this many features, over all processes, for these statistics.
MOST_FEATURES = 1 << 18
# Norms of rows are counted in octaves, from 2^-20 to 2^12.
_LEAST_OCTAVE, _OCTAVES = -20, 32
# A column is dead if its root mean square is at most this share of its slot's.
_DEAD = 1e-3


def shards_to_read(features: int, own: range) -> tuple[range, float]:
  """Chooses which of its logical shards, `own`, this process reads; returns them and their share.

  Each process owns nearly as many shards, and all together read about MOST_FEATURES of all
  `features`. A hash spreads the keys, so the features in some shards are a fair sample.
  """
  share = min(1.0, MOST_FEATURES / max(features, 1))
  count = max(1, round(share * len(own)))
  return range(own.start, own.start + count), count / len(own)


Figure = float | list[int] | None


class SlotStatistics:
  """Sums over the rows of each slot, which can be added over processes or parts.

  `ids` is Config.own_slot_ids(), `widths` is {name of a table: the number of factors in its rows,
  which is F·D for ffm}.
  """

  def __init__(self, ids: Mapping[str, int], slots: Sequence[Slot], widths: Mapping[str, int]):
    self._names = list(ids)
    self._tables = {s.name: s.table for s in slots}
    self._place = np.full(max(ids.values()) + 1, -1)
    self._place[list(ids.values())] = np.arange(len(ids))
    self._widths = dict(widths)
    count = len(self._names)
    self._sums = {'counts': np.zeros([count, 4]), 'bytes': np.zeros(count), 'norm': np.zeros(count)}
    self._sums['norms'] = np.zeros([count, _OCTAVES])
    for table, width in widths.items():
      if width:
        self._sums[f'gram_{table}'] = np.zeros([count, width, width])

  def add(self, chunk: Mapping[str, np.ndarray]) -> None:
    """Adds the rows of a chunk, which a store has exported or a checkpoint holds."""
    slots = len(self._names)
    place = self._place[chunk['slot']]
    admitted = chunk['admitted'].astype(bool)
    columns = np.ones(len(place)), admitted, chunk['show'], chunk['click']
    counts = [np.bincount(place, column, slots) for column in columns]
    self._sums['counts'] += np.stack(counts, 1)
    row_bytes = sum(
      a[0].nbytes for name, a in chunk.items() if np.ndim(a) and not name.startswith('factors_')
    )
    self._sums['bytes'] += counts[0] * row_bytes
    table_of = np.array([list(self._widths).index(self._tables[n]) for n in self._names])
    for i, (table, width) in enumerate(self._widths.items()):
      rows = chunk.get(f'factors_{table}')
      if not width or rows is None:
        continue
      of_rows = place[admitted & (table_of[place] == i)]
      self._sums['bytes'] += np.bincount(of_rows, minlength=slots) * (rows[:1].nbytes)
      weights = to_float32(rows[:, :width])
      norms = np.linalg.norm(weights, axis=1)
      self._sums['norm'] += np.bincount(of_rows, norms, slots)
      octave = np.floor(np.log2(np.maximum(norms, 2.0**_LEAST_OCTAVE))).astype(int)
      octave = np.clip(octave - _LEAST_OCTAVE, 0, _OCTAVES - 1)
      np.add.at(self._sums['norms'], (of_rows, octave), 1)
      for slot in np.unique(of_rows):
        own = weights[of_rows == slot].astype(np.float64)
        self._sums[f'gram_{table}'][slot] += own.T @ own

  def state(self) -> dict[str, np.ndarray]:
    """Returns the sums, {name: array}. The sum of two states is the state of the rows of both."""
    return self._sums

  def result(
    self, state: Mapping[str, np.ndarray], share: float = 1.0
  ) -> dict[str, dict[str, Figure]]:
    """Returns {slot: figures} from a `state`, or a sum of several, of a `share` of all features.

    These are features, admitted, shows, clicks, ctr, norm (the mean norm of a feature's factors),
    effective_rank, width, dead_columns (those of the factors that are almost 0 in all rows) and
    bytes_share (of the bytes of all slots).
    """
    figures: dict[str, dict[str, Figure]] = {}
    total_bytes = max(state['bytes'].sum(), 1)
    for i, name in enumerate(self._names):
      features, admitted, shows, clicks = state['counts'][i].tolist()
      row = {
        'features': round(features / share),
        'admitted': round(admitted / share),
        'shows': round(shows / share, 1),
        'clicks': round(clicks / share, 1),
        'ctr': _figure(clicks / shows) if shows else None,
        'bytes_share': float(state['bytes'][i] / total_bytes),
      }
      width = self._widths[self._tables[name]]
      if width and admitted:
        gram = state[f'gram_{self._tables[name]}'][i]
        power = np.diag(gram)
        row |= {
          'norm': _figure(state['norm'][i] / admitted),
          'width': width,
          'effective_rank': _figure(effective_rank(gram)),
          'dead_columns': np.flatnonzero(power <= _DEAD**2 * power.mean()).tolist(),
        }
      figures[name] = row
    return figures

  def norm_histograms(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns {slot: a histogram of the norms of its factors, [bins, 3]: left, right, rows}."""
    edges = 2.0 ** (_LEAST_OCTAVE + np.arange(_OCTAVES + 1))
    histograms = {}
    for name, counts in zip(self._names, state['norms']):
      used = np.flatnonzero(counts)
      if len(used):
        span = slice(used[0], used[-1] + 1)
        histograms[name] = np.stack([edges[:-1][span], edges[1:][span], counts[span]], 1)
    return histograms


def _figure(value: float) -> float:
  """Returns a value without the digits in which a sum depends on the order of the rows."""
  return float(f'{value:.6g}')


def effective_rank(gram: np.ndarray) -> float:
  """Returns the effective rank (Roy and Vetterli 2007) of vectors v, of which `gram` is Σ v vᵀ."""
  values = np.sqrt(np.maximum(np.linalg.eigvalsh(gram), 0))
  if not values.sum():
    return 0.0
  shares = values[values > 0] / values.sum()
  return float(np.exp(-(shares * np.log(shares)).sum()))
