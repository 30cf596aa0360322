"""What a checkpoint holds: parameters, slots, single features; read a block at a time."""

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from ops.chunks import Chunk
from ops.policy import Policy
from ops.row_store import to_float32
from ops.sharding import SHARDS, owner_of, shard_of
from trainer import config, files
from trainer.data.features import hash_keys
from trainer.embedding.embedding import Embedding
from trainer.embedding.slot_statistics import SlotStatistics
from trainer.errors import UserError, nearest
from trainer.model.builder import build
from trainer.storage import chain, checkpoint

_ALL = range(SHARDS)
_SHARDS_AT_ONCE = 16  # of two checkpoints, of which all keys are in memory

_COUNTS = ('key', 'show', 'click', 'unseen_days', 'admitted')  # of each feature


class Inspection:
  """A checkpoint of a run.

  Args:
    run_dir: of the run.
    which: best, where there is one, or last.

  Attributes:
    path: of the checkpoint.
    cfg: the run's config.
    progress: where the run stood.
  Raises:
    UserError: where there is none.
  """

  def __init__(self, run_dir: str, which: str = 'last'):
    self.cfg, self.run_dir = config.load_of_run(run_dir), run_dir
    found = []
    for folder in ('best', 'checkpoints') if which == 'best' else ('checkpoints',):
      candidates = checkpoint.candidates(os.path.join(run_dir, folder))
      found += [one for one, serial in candidates.items() if serial is not None]
    if not found:
      raise UserError(f'{run_dir}: no finished checkpoint there; wanted a run that was trained')
    self.path = found[0]
    self._manifest = checkpoint.check(self.path)
    listed = self._manifest['files']
    self.progress = json.loads(files.read_checked(self.path, 'progress.json', listed))
    self._dense = files.from_npz(files.read_checked(self.path, 'dense.npz', listed))

  def rows(self, shards: range = _ALL) -> Iterator[Chunk]:
    """Yields the blocks that hold rows of some logical shards."""
    return checkpoint.read_rows(self.path, self._manifest, shards)

  def _widths(self) -> dict[str, int]:
    """The factors of a row, by table, as the model asks for them."""
    tables = Embedding(self.cfg, build(self.cfg).needs).tables
    return {table.name: table.width for table in tables}

  def layers(self) -> pd.DataFrame:
    """The dense variables of the model: shape, parameters and bytes."""
    rows = []
    for name, array in self._dense.items():
      variable = name.partition('/')[2] or name
      if variable == 'iter:0':  # those of the optimizer follow
        break
      if not name.startswith('metrics'):
        rows.append((variable, list(array.shape), array.size, array.nbytes))
    return pd.DataFrame(rows, columns=['variable', 'shape', 'parameters', 'bytes'])

  def slots(self) -> pd.DataFrame:
    """Of each slot: features, admitted share, shows, clicks, norms, effective rank, bytes."""
    statistics = SlotStatistics(self.cfg, self._widths())
    for chunk in self.rows():
      statistics.add(chunk)
    state = statistics.state()
    table = pd.DataFrame(statistics.result(state)).T.infer_objects()
    table.insert(2, 'admitted_share', (table['admitted'] / table['features'].clip(lower=1)))
    table['bytes'] = state['bytes'].astype(np.int64)
    return table.rename_axis('slot')

  def made(self) -> pd.DataFrame:
    """Of each slot that is made of other columns: how, bins with their boundaries."""
    made = {s.name: s.made for s in self.cfg.slots if s.made is not None}
    rows = [(m.kind, json.dumps(m.model_dump(exclude_defaults=True))) for m in made.values()]
    return pd.DataFrame(rows, pd.Index(made, name='slot'), ['kind', 'from'])

  def features(self, slot: str) -> pd.DataFrame:
    """The features of a slot: key, shows, clicks, days, whether admitted, weight and factors.

    Raises:
      UserError: where there is no such slot.
    """
    ids = self.cfg.slot_ids()
    if slot not in ids:
      raise UserError(f"found slot '{slot}'{nearest(slot, ids)}")
    table = next(s.table for s in self.cfg.slots if s.name == slot)
    own = [ids[s.name] for s in self.cfg.slots if s.table == table]
    width, parts = self._widths()[table], []
    for chunk in self.rows():
      here = chunk['slot'] == ids[slot]
      part = {name: chunk[name][here] for name in _COUNTS}
      part['linear'] = chunk['linear'][here, 0]
      if width and f'factors_{table}' in chunk:
        # Only admitted features have factors, in the order of the chunk.
        place = np.cumsum(chunk['admitted'] & np.isin(chunk['slot'], own)) - 1
        rows = to_float32(chunk[f'factors_{table}'])[:, :width]
        factors = [
          rows[at] if admitted else None for at, admitted in zip(place[here], part['admitted'])
        ]
        part['factors'] = factors
      parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True)

  def feature(self, slot: str, text: str) -> dict[str, Any]:
    """All that is known of one feature.

    Args:
      slot: its slot.
      text: its value, as the log has it.
    Raises:
      UserError: where there is no such slot.
    """
    ids = self.cfg.slot_ids()
    if slot not in ids:
      raise UserError(f"--feature: found slot '{slot}'{nearest(slot, ids)}")
    key = int(hash_keys(np.array([text]), ids[slot])[0])
    shard = int(shard_of(np.array([key]))[0])
    owner = int(owner_of(shard, self._manifest['parts']))
    told: dict[str, Any] = {'slot': slot, 'text': text, 'key': key, 'shard': shard, 'owner': owner}
    for chunk in self.rows(range(shard, shard + 1)):
      at = np.flatnonzero(chunk['key'] == key)
      if len(at):
        return told | self._row(chunk, int(at[0]), slot) | {'last_export': self._export_of(key)}
    return told | {'known': False, 'last_export': self._export_of(key)}

  def _row(self, chunk: Chunk, at: int, slot: str) -> dict[str, Any]:
    policy = self.cfg.policy()
    limits = vars(policy.for_slot(self.cfg.slot_ids()[slot]))
    show, click = float(chunk['show'][at]), float(chunk['click'][at])
    score = (show - click) * limits['nonclk_coeff'] + click * limits['clk_coeff']
    told = {
      'known': True,
      'show': show,
      'click': click,
      'score': score,
      'unseen_days': int(chunk['unseen_days'][at]),
      'age_days': int(chunk['age_days'][at]),
      'admitted': bool(chunk['admitted'][at]),
      'linear': float(chunk['linear'][at, 0]),
    }
    if policy.admission == 'score':
      threshold = limits['admission_threshold']
      sign = '≥' if score >= threshold else '<'
      told['admission'] = f'its score {score:.3f} {sign} admission_threshold {threshold:g}'
    else:
      told['admission'] = f"lifecycle.admission is '{policy.admission}'"
    if policy.eviction != 'none':
      told['evicted_in_days_unless_seen'] = _days_left(policy, limits, told)
    if told['admitted']:
      table = next(s.table for s in self.cfg.slots if s.name == slot)
      rows, width = chunk.get(f'factors_{table}'), self._widths()[table]
      if rows is not None and width:
        ids = self.cfg.slot_ids()
        own = [ids[s.name] for s in self.cfg.slots if s.table == table]
        before = chunk['admitted'][:at] & np.isin(chunk['slot'][:at], own)
        told['factors'] = to_float32(rows[int(before.sum()), :width]).tolist()
    return told

  def _export_of(self, key: int) -> str | None:
    """The name of the newest base or delta that holds a key."""
    folder = os.path.join(self.run_dir, 'exports')
    shard = int(shard_of(np.array([key]))[0])
    for found in reversed(chain.exports(folder)):
      if found.kind in chain.ROW_KINDS:
        export = chain.RowExport(found.path)
        if key in export.keys('rows', range(shard, shard + 1)):
          return export.name
    return None

  def against(self, other: 'Inspection') -> pd.DataFrame:
    """What differs between this checkpoint and another, by slot; some logical shards at a time."""
    ids = self.cfg.own_slot_ids()
    sums = np.zeros([max(ids.values()) + 1, 4])
    for begin in range(0, SHARDS, _SHARDS_AT_ONCE):
      shards = range(begin, begin + _SHARDS_AT_ONCE)
      mine, theirs = (_joined(one.rows(shards), shards) for one in (self, other))
      both, a, b = np.intersect1d(mine[0], theirs[0], assume_unique=True, return_indices=True)
      slots = len(sums)
      sums[:, 0] += np.bincount(np.delete(mine[1], a), minlength=slots)
      sums[:, 1] += np.bincount(np.delete(theirs[1], b), minlength=slots)
      sums[:, 2] += np.bincount(mine[1][a], minlength=slots)
      sums[:, 3] += np.bincount(mine[1][a], np.abs(mine[2][a] - theirs[2][b]), minlength=slots)
    table = pd.DataFrame(
      sums[list(ids.values()), :3].astype(np.int64),
      index=pd.Index(list(ids), name='slot'),
      columns=['only_here', 'only_there', 'in_both'],
    )
    change = sums[list(ids.values()), 3] / np.maximum(sums[list(ids.values()), 2], 1)
    return table.assign(mean_change_of_linear=change)


def _days_left(policy: Policy, limits: dict[str, Any], row: dict[str, Any]) -> int | None:
  """Day ends until a feature that is not seen again is deleted; None: not within 1,000."""
  score, unseen, age = row['score'], row['unseen_days'], row['age_days']
  longest, youngest = limits['delete_after_unseen_days'], limits['min_age_days']
  for days in range(1, 1001):
    score *= limits['decay']
    spared = policy.eviction != 'score' or (youngest is not None and age < youngest)
    if score < limits['delete_threshold'] and not spared:
      return days
    if longest is not None and unseen > longest:
      return days
    unseen, age = unseen + 1, age + 1
  return None


def _joined(chunks: Iterator[Chunk], shards: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns keys, slot ids and linear weights of all rows of some logical shards."""
  keys, slots, linear = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
  for chunk in chunks:
    kept = np.isin(shard_of(chunk['key']), shards)
    keys.append(chunk['key'][kept])
    slots.append(chunk['slot'][kept].astype(np.int64))
    linear.append(chunk['linear'][kept, 0])
  return np.concatenate(keys), np.concatenate(slots), np.concatenate(linear)
