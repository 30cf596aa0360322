"""Finds the few crosses of slots that tell more of the label than their parts."""

import contextlib
import itertools
from collections.abc import Sequence

import numpy as np

from ops.keys import NO_FEATURE
from trainer import config
from trainer.data.conversion import blocks_of_pass
from trainer.data.parse import parse
from trainer.data.passes import Pass, passes
from trainer.data.prepared import is_prepared
from trainer.data.schema import wanted_columns
from trainer.errors import BadPass

MOST_CROSSES = 4
MOST_SAMPLES, MOST_VALUES = 1_000_000, 5_000_000  # samples, and features in them, of a split
CELLS = 1_000_003  # combinations are counted in so many cells; two may share one
SHRINK = 5.0  # what a cell's Hessian is raised by, so that a rare combination moves little
ROUNDS, DAMPING = 3, 0.7  # of fitting the additive model of all slots
LEAST_GAIN = 0.002  # the share of data.valid's logloss that a cross takes off, beyond its parts
KEPT_CANDIDATES = 20  # the best other pairs, which are tried again for the next cross


def found(cfg: config.Config) -> list[list[str]]:
  """Returns at most MOST_CROSSES crosses of slots with one feature a sample, the best first.

  An additive model of these slots is fitted to the first samples of data.train. Each pair of slots
  is tried in it by one Newton step. The one that lowers the logloss of data.valid most is added to
  the model; then the next is looked for, also among those that join a further slot to a cross that
  was found. [] if there is none, or the log cannot be read.
  """
  has_one = [
    f
    for f, s in enumerate(cfg.ordered_slots)
    if not s.may_hold_several and s.shares is None and not isinstance(s.made, config.Bins)
  ]
  of_valid = passes(cfg.data, cfg.data.valid, 'data.valid')
  is_raw = not any(is_prepared(cfg.data, data_pass.path) for data_pass in of_valid)
  if len(has_one) < 2 or cfg.labels[0].loss == 'squared_error' or not is_raw:
    return []
  try:
    of_train = passes(cfg.data, cfg.data.train, 'data.train')
    (values, y), (others, y_valid) = (_samples(cfg, of, has_one) for of in (of_train, of_valid))
  except BadPass:  # the run refuses it, and says why
    return []
  if not len(y_valid) or y.min(initial=1) >= y.max(initial=0):
    return []
  names = [cfg.ordered_slots[f].name for f in has_one]
  given = {frozenset(s.made.cross) for s in cfg.data.slots if isinstance(s.made, config.SlotCross)}
  crosses = _greedy(names, np.concatenate([values, others], 1), y, y_valid)
  return [cross for cross in crosses if frozenset(cross) not in given]


def _samples(
  cfg: config.Config, listed: Sequence[Pass], fields: list[int]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the features, int64 [F, n], of the first samples of passes, and their labels, [n]."""
  keys, labels = [np.empty([len(fields), 0], np.int64)], [np.empty([0])]
  left, wanted = min(MOST_SAMPLES, MOST_VALUES // len(fields)), wanted_columns(cfg)
  for data_pass in listed:
    with contextlib.closing(blocks_of_pass(cfg.data, data_pass.path, wanted)) as blocks:
      for block in blocks if left > 0 else ():
        parsed = parse(cfg, block)
        own = [parsed.keys[f] for f in fields]
        if parsed.counts is not None:  # of each slot, one where there is any
          has = parsed.counts.T[fields] > 0
          own, of_slots = np.full(has.shape, NO_FEATURE), own
          for to, here, keys_of_slot in zip(own, has, of_slots):
            to[here] = keys_of_slot
        is_known = ~np.isnan(parsed.label[:, 0])
        keys.append(np.stack(own)[:, is_known][:, :left])
        labels.append(parsed.label[is_known, 0][:left])
        left -= len(labels[-1])
        if left <= 0:
          break
  return np.concatenate(keys, 1), np.concatenate(labels)


def _greedy(
  names: list[str], values: np.ndarray, y: np.ndarray, y_valid: np.ndarray
) -> list[list[str]]:
  """Returns crosses as `found` does, of `values`, [F, n + m], for labels y [n] and y_valid [m]."""
  n, columns = len(y), [np.unique(own, return_inverse=True)[1].astype(np.int64) for own in values]
  parts = [(f,) for f in range(len(names))]

  def joined(a: int, b: int) -> np.ndarray:
    return (columns[a] * (columns[b].max() + 1) + columns[b]) % CELLS

  def moved(cells: np.ndarray, z: np.ndarray, steps: int = 1) -> np.ndarray:
    """Returns z, [n + m], after Newton steps of a weight for each cell, fitted to y."""
    size = cells.max() + 1
    weight = np.zeros([size])
    for _ in range(steps):
      p = 1 / (1 + np.exp(-z[:n] - weight[cells[:n]]))
      gradient = np.bincount(cells[:n], y - p, size) - SHRINK * weight
      weight += gradient / (np.bincount(cells[:n], p * (1 - p), size) + SHRINK)
    return z + weight[cells]

  def lost(z: np.ndarray) -> float:
    return float(np.mean(np.logaddexp(0, z[n:]) - y_valid * z[n:]))

  z = np.full([n + len(y_valid)], np.log(y.mean() / (1 - y.mean())))
  for _, cells in itertools.product(range(ROUNDS), list(columns)):
    z = z + DAMPING * (moved(cells, z) - z)
  candidates = list(itertools.combinations(range(len(names)), 2))
  while len(columns) < len(names) + MOST_CROSSES and candidates:
    losses = {pair: lost(moved(joined(*pair), z)) for pair in candidates}
    best, *others = sorted(candidates, key=losses.get)
    if losses[best] > (1 - LEAST_GAIN) * lost(z):
      break
    cells = joined(*best)
    z = moved(cells, z, ROUNDS)
    columns.append(np.unique(cells, return_inverse=True)[1].astype(np.int64))
    parts.append(tuple(sorted({*parts[best[0]], *parts[best[1]]})))
    new = [(len(parts) - 1, f) for f in range(len(names)) if f not in parts[-1]]
    seen = set(parts[len(names) :])
    candidates = [
      (a, b)
      for a, b in others[:KEPT_CANDIDATES] + new
      if tuple(sorted({*parts[a], *parts[b]})) not in seen
    ]
  return [[names[f] for f in cross] for cross in parts[len(names) :]]
