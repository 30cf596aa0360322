"""Shows what a checkpoint holds: layers, slots and features."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pandas as pd

from ops.chunks import Chunk
from ops.policy import Policy
from ops.row_store import to_float32
from ops.sharding import SHARDS, owner_of, shard_of, within
from trainer import config, files
from trainer.data.columns import cross
from trainer.data.features import HASH_BITS, hash_keys
from trainer.data.item_table import config_of_items
from trainer.data.schema import briefly
from trainer.data.texts import texts_of
from trainer.embedding.embedding import table_specs
from trainer.embedding.slot_statistics import SlotStatistics
from trainer.errors import UserError, nearest
from trainer.model.builder import build
from trainer.plain_data import JsonObject
from trainer.storage import chain, checkpoint
from trainer.storage.kept_texts import texts_by_key

_ALL = range(SHARDS)
_SHARDS_AT_ONCE = SHARDS // 16  # how many shards of two checkpoints are in memory at a time

MOST_COMPARED = 100_000  # features of a slot whose texts are compared with an unknown text
_COUNTS = ('key', 'show', 'click', 'unseen_days', 'admitted')


class Inspection:
  """Reads a checkpoint of a run.

  Args:
    which: 'best' or 'last'; 'best' means the last checkpoint if there is no best one.

  Attributes:
    path: the directory of the checkpoint.
    progress: the JSON of progress.json: the place in the data, and the ledger of passes.

  Raises:
    UserError: if there is no checkpoint.
  """

  def __init__(self, run_dir: str, which: str = 'last'):
    self.cfg, self.run_dir = config.load_of_run(run_dir), run_dir
    paths = []
    for folder in ('best', 'checkpoints') if which == 'best' else ('checkpoints',):
      candidates = checkpoint.candidates(os.path.join(run_dir, folder))
      paths += [path for path, serial in candidates.items() if serial is not None]
    if not paths:
      raise UserError(f'{run_dir}: no finished checkpoint there; wanted a run that was trained')
    self.path = paths[0]
    self._manifest = checkpoint.check(self.path)
    listed = self._manifest['files']
    self.progress = json.loads(files.read_checked(self.path, 'progress.json', listed))
    self._dense = files.from_npz(files.read_checked(self.path, 'dense.npz', listed))

  def rows(self, shards: range = _ALL) -> Iterator[Chunk]:
    """Yields the chunks of the checkpoint that have rows of these logical shards.

    A chunk may also have rows of other shards.
    """
    return checkpoint.read_rows(self.path, self._manifest, shards)

  def _widths(self) -> dict[str, int]:
    """Returns {table: the number of factors of a row}."""
    tables = table_specs(self.cfg, build(self.cfg).needs)
    return {table.name: table.width for table in tables}

  def layers(self) -> pd.DataFrame:
    """Returns the dense variables of the model, one in each row: shape, parameters and bytes."""
    rows = []
    for name, array in self._dense.items():
      variable = name.partition('/')[2] or name
      if variable == 'iter:0':  # the optimizer's variables follow
        break
      if not name.startswith('metrics'):
        rows.append((variable, list(array.shape), array.size, array.nbytes))
    return pd.DataFrame(rows, columns=['variable', 'shape', 'parameters', 'bytes'])

  def slots(self) -> pd.DataFrame:
    """Returns a table with statistics of each slot, such as features, admitted_share and bytes."""
    statistics = SlotStatistics(self.cfg, self._widths())
    for chunk in self.rows():
      statistics.add(chunk)
    state = statistics.state()
    table = pd.DataFrame(statistics.result(state)).T.infer_objects()
    table.insert(2, 'admitted_share', (table['admitted'] / table['features'].clip(lower=1)))
    table['bytes'] = state['bytes'].astype(np.int64)
    return table.rename_axis('slot')

  def made(self) -> pd.DataFrame:
    """Returns a table of the slots whose config has `from`: its kind, and `from` as JSON."""
    made = {s.name: s.made for s in self.cfg.ordered_slots if s.made is not None}
    rows = [(m.kind, json.dumps(briefly(m))) for m in made.values()]
    return pd.DataFrame(rows, pd.Index(made, name='slot'), ['kind', 'from'])

  def _slot_id(self, slot: str) -> int:
    ids = self.cfg.slot_ids()
    if slot not in ids:
      raise UserError(f"'{slot}' is no slot of this model{nearest(slot, ids)}")
    return ids[slot]

  def features(self, slot: str) -> pd.DataFrame:
    """Returns the features of a slot, one in each row.

    Columns: key, show, click, unseen_days, admitted and linear. If the slot's table has factors,
    also factors: float32 [width of the table], None before admission.
    """
    return pd.concat([self._features(chunk, slot) for chunk in self.rows()], ignore_index=True)

  def _features(self, chunk: Chunk, slot: str) -> pd.DataFrame:
    here = chunk['slot'] == self._slot_id(slot)
    table = next(s.table for s in self.cfg.data.slots if s.name == slot)
    columns = {name: chunk[name][here] for name in _COUNTS} | {'linear': chunk['linear'][here, 0]}
    width = self._widths()[table]
    if width and f'factors_{table}' in chunk:
      own = [self._slot_id(s.name) for s in self.cfg.data.slots if s.table == table]
      # Only admitted features have factors, in the order of the chunk.
      place = np.cumsum(chunk['admitted'] & np.isin(chunk['slot'], own)) - 1
      rows = to_float32(chunk[f'factors_{table}'])[:, :width]
      factors = zip(place[here], columns['admitted'])
      columns['factors'] = [rows[at] if admitted else None for at, admitted in factors]
    return pd.DataFrame(columns)

  def texts(self, slot: str, keys: np.ndarray) -> dict[int, str]:
    """Returns {key: text} of a slot's features.

    The result has all texts that data.keep_texts kept for the slot. For other keys, the passes of
    the run are searched; keys that are not found are left out.
    """
    self._slot_id(slot)  # checks its name
    texts = texts_by_key(self.cfg, checkpoint.read_texts(self.path, self._manifest), slot)
    if missing := set(keys.tolist()) - texts.keys():
      of_slot = next(s for s in self.cfg.data.slots if s.name == slot)
      cfg, paths = self.cfg, [entry['path'] for entry in self.progress['ledger']['entries']]
      if slot in cfg.columns_of_items():
        cfg, paths = config_of_items(cfg), [cfg.data.items]
      for some in texts_of(cfg, paths, of_slot, missing):
        texts |= some
    return texts

  def most_shown(self, slot: str, most: int | None = None) -> tuple[pd.DataFrame, int]:
    """Returns the features of a slot, those with the most shows first, and how many it has.

    Columns: text (None if it is not known), and those of `features`.

    Args:
      most: how many features the table has at most; None: all. Only these, and a chunk, are in
        memory at a time.
    """
    parts, count = [], 0
    for chunk in self.rows():
      parts.append(self._features(chunk, slot))
      count += len(parts[-1])
      if most is not None:
        parts = [_by_shows(parts)[:most]]
    table = _by_shows(parts)
    texts = self.texts(slot, table['key'].to_numpy())
    table.insert(0, 'text', [texts.get(key) for key in table['key']])
    return table, count

  def feature(self, slot: str, text: str) -> JsonObject:
    """Returns what the checkpoint has of a feature; `known` is False if it has no row for it.

    Args:
      text: the feature's value, as written in the log; for a cross its parts, 'a × b'.
    Raises:
      UserError: if there is no such slot.
    """
    key, made = self._key(slot, text), self.cfg.data.made.get(slot)
    shard = int(shard_of(np.array([key]))[0])
    owner = int(owner_of(shard, self._manifest['parts']))
    known: JsonObject = {'known': False}
    for chunk in self.rows(range(shard, shard + 1)):
      at = np.flatnonzero(chunk['key'] == key)
      if len(at):
        features = self._features(chunk, slot)
        row = features[features['key'] == key].iloc[0]
        known = self._lifecycle(row, chunk['age_days'][at[0]], slot)
    if not known['known']:
      known |= self._near(slot, text)
    place = {'slot': slot, 'text': text, 'key': key, 'shard': shard, 'owner': owner}
    place |= {'from': briefly(made)} if made else {}
    return place | known | {'last_export': self._export_of(key)}

  def _key(self, slot: str, text: str) -> int:
    slot_id, made = self._slot_id(slot), self.cfg.data.made.get(slot)
    hashed = cross.feature_of(text, made) if isinstance(made, config.SlotCross) else text
    return int(hash_keys(np.array([hashed]), slot_id)[0])

  def neighbours(self, slot: str, text: str, k: int) -> pd.DataFrame:
    """Returns the k features of a slot whose factors have the highest cosine with those of `text`.

    Columns: text (None if it is not known), key, show and cosine, the nearest first.
    """
    key, table = self._key(slot, text), self.features(slot)
    own = table[table['key'] == key]
    if not len(own):
      near = ', '.join(map(repr, self._near(slot, text).get('near', [])))
      also = f'; similar to it: {near}' if near else ''
      raise UserError(f"slot '{slot}': the run has no feature '{text}'{also}")
    if 'factors' not in table:
      raise UserError(f"slot '{slot}' has no factors; wanted a model with fm, dnn or the like")
    if own['factors'].iloc[0] is None:
      raise UserError(f"slot '{slot}': '{text}' has no factors, because it is not admitted yet")
    table = table[table['factors'].notna()]
    factors = np.stack(table['factors'].tolist()).astype(np.float64)
    factors /= np.maximum(np.linalg.norm(factors, axis=1, keepdims=True), 1e-30)
    cosine = factors @ factors[np.flatnonzero(table['key'] == key)[0]]
    table = table[['key', 'show']].assign(cosine=cosine)[(table['key'] != key).to_numpy()]
    table = table.nlargest(k, 'cosine').reset_index(drop=True)
    texts = self.texts(slot, table['key'].to_numpy())
    table.insert(0, 'text', [texts.get(of) for of in table['key']])
    return table

  def _near(self, slot: str, text: str) -> JsonObject:
    """Returns {'near': up to three texts of the slot's features that are similar to `text`}.

    Returns {} if no text is similar, or if the slot has more than MOST_COMPARED features.
    """
    keys = self.features(slot)['key'].to_numpy()
    if len(keys) > MOST_COMPARED:
      return {}
    near = difflib.get_close_matches(text, self.texts(slot, keys).values(), n=3)
    return {'near': near} if near else {}

  def _lifecycle(self, row: pd.Series, age_days: int, slot: str) -> JsonObject:
    policy = self.cfg.policy()
    limits = policy.for_slot(self._slot_id(slot))
    show, click = float(row['show']), float(row['click'])
    score = (show - click) * limits.nonclk_coeff + click * limits.clk_coeff
    known: JsonObject = {
      'known': True,
      'show': show,
      'click': click,
      'score': score,
      'unseen_days': int(row['unseen_days']),
      'age_days': int(age_days),
      'admitted': bool(row['admitted']),
      'linear': float(row['linear']),
    }
    if self.cfg.data.day_pattern and limits.decay < 1:
      known['decay'] = f'show and click × {limits.decay:g} at each end of a day, in every epoch'
    known['admission'] = f"lifecycle.admission is '{policy.admission}'"
    if policy.admission == 'score':
      sign = '≥' if score >= (threshold := limits.admission_threshold) else '<'
      known['admission'] = f'its score {score:.3f} {sign} admission_threshold {threshold:g}'
    if policy.eviction != 'none':
      known['evicted_in_days_unless_seen'] = _days_left(policy, limits, known)
    if row.get('factors') is not None:
      known['factors'] = row['factors'].tolist()
    return known

  def _export_of(self, key: int) -> str | None:
    """Returns the name of the newest base or delta with the key's row; None if there is none."""
    shard = int(shard_of(np.array([key]))[0])
    for entry in reversed(chain.exports(os.path.join(self.run_dir, 'exports'))):
      if entry.kind in chain.ROW_KINDS:
        export = chain.RowExport(entry.path)
        if key in export.keys('rows', range(shard, shard + 1)):
          return export.name
    return None

  def shared(self, slots: Iterable[str]) -> list[str]:
    """Returns a sentence for each of these slots that is shared: which features it also counts.

    Args:
      slots: names; one that `shares` another stands for the other.
    """
    sharing = {s.name: s.shares for s in self.cfg.data.slots if s.shares}
    told = []
    for slot in dict.fromkeys(sharing.get(name, name) for name in slots):
      if others := [repr(name) for name, of in sharing.items() if of == slot]:
        where = f'slot{"s" * (len(others) > 1)} {", ".join(others)}'
        told.append(f'{slot}: its impressions and clicks also count its features in {where}')
    return told

  def counted(self) -> str | None:
    """Returns a sentence that says which samples are counted in the shows and clicks of features.

    Returns:
      None if they are the samples of one epoch, without a decay.
    """
    progress = self.progress
    # An epoch that has just begun has no samples yet.
    epochs = max(1, progress['epoch'] + bool(progress['done'] or progress['batch']))
    began_with_another = progress.get('first_step', 0) > 0
    if self.cfg.counted_fields():  # counts are forgotten where an epoch ends
      began_with_another, epochs = began_with_another and progress['epoch'] == 0, 1
    decays = self.cfg.data.day_pattern is not None and self.cfg.policy().decay < 1
    if epochs == 1 and not began_with_another and not decays:
      return None
    told = f'Impressions and clicks are those of {epochs} epoch{"s" * (epochs > 1)}'
    told += ', and of the run of --init_from' * began_with_another
    return told + ', after the decay of every day that has ended' * decays + '.'

  def against(self, other: 'Inspection') -> pd.DataFrame:
    """Compares this checkpoint with another, and returns a table with a row for each slot.

    Slots are matched by name, because the ids of like-named slots may differ; a feature is in both
    if it has the same text. If ids differ, all keys of both checkpoints are in memory at a time.

    Columns: only_here, only_there and in_both, the numbers of features in this checkpoint alone, in
    the other alone, and in both; mean_change_of_linear, the mean absolute difference of the linear
    weights of the features in both.
    """
    ids = [of.cfg.own_slot_ids() for of in (self, other)]
    names = list(dict.fromkeys((*ids[0], *ids[1])))
    # A key's shard depends on its slot's id, so with other ids a feature lies in another shard.
    same = all(ids[0][name] == ids[1][name] for name in ids[0].keys() & ids[1].keys())
    at_once = _SHARDS_AT_ONCE if same else SHARDS
    sums = np.zeros([len(names), 4])
    for begin in range(0, SHARDS, at_once):
      shards = range(begin, begin + at_once)
      mine, theirs = (
        _joined(of.rows(shards), shards, {i: names.index(name) for name, i in own.items()})
        for of, own in zip((self, other), ids)
      )
      _, a, b = np.intersect1d(mine[0], theirs[0], assume_unique=True, return_indices=True)
      slots = len(sums)
      slot_here, slot_there = mine[0] >> HASH_BITS, theirs[0] >> HASH_BITS
      sums[:, 0] += np.bincount(np.delete(slot_here, a), minlength=slots)
      sums[:, 1] += np.bincount(np.delete(slot_there, b), minlength=slots)
      sums[:, 2] += np.bincount(slot_here[a], minlength=slots)
      sums[:, 3] += np.bincount(slot_here[a], np.abs(mine[1][a] - theirs[1][b]), minlength=slots)
    index, columns = pd.Index(names, name='slot'), ['only_here', 'only_there', 'in_both']
    table = pd.DataFrame(sums[:, :3].astype(np.int64), index, columns)
    return table.assign(mean_change_of_linear=sums[:, 3] / np.maximum(sums[:, 2], 1))


def _by_shows(parts: list[pd.DataFrame]) -> pd.DataFrame:
  table = pd.concat(parts, ignore_index=True)
  return table.sort_values('show', ascending=False, kind='stable', ignore_index=True)


def _days_left(policy: Policy, limits: Policy, row: JsonObject) -> int | None:
  """Returns after how many day ends a feature is evicted if it is not seen again.

  It is None if they are more than 1,000. `limits` are the thresholds of the feature's slot.
  """
  score, unseen, age = row['score'], row['unseen_days'], row['age_days']
  longest, youngest = limits.delete_after_unseen_days, limits.min_age_days
  for days in range(1, 1001):
    score *= limits.decay
    spared = policy.eviction != 'score' or (youngest is not None and age < youngest)
    if score < limits.delete_threshold and not spared:
      return days
    if longest is not None and unseen > longest:
      return days
    unseen, age = unseen + 1, age + 1
  return None


def _joined(
  chunks: Iterator[Chunk], shards: range, new_ids: Mapping[int, int]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the keys and linear weights of all rows in these shards, each [n].

  Args:
    new_ids: {slot id of a row: slot id in the returned key}; other slots are left out.
  """
  new_id = np.full([config.MAX_SLOTS + 2], -1, np.int64)
  new_id[list(new_ids)] = list(new_ids.values())
  parts = [(np.zeros(0, np.int64), np.zeros(0, np.float32))]
  for chunk in chunks:
    key, to = chunk['key'], new_id[chunk['key'] >> HASH_BITS]
    kept = within(key, shards) & (to >= 0)
    keys = (key & ((1 << HASH_BITS) - 1)) | (np.maximum(to, 0) << HASH_BITS)
    parts.append((keys[kept], chunk['linear'][kept, 0]))
  return tuple(map(np.concatenate, zip(*parts)))
