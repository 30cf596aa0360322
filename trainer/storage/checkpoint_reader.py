"""Reads what a checkpoint holds: layers, slots and features."""

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
from trainer.data.conversion import config_of_items
from trainer.data.features import HASH_BITS, hash_keys
from trainer.data.schema import briefly
from trainer.data.texts import texts_of
from trainer.embedding.embedding import table_specs
from trainer.embedding.slot_statistics import SlotStatistics
from trainer.errors import UserError, nearest
from trainer.model.builder import build
from trainer.plain_data import JsonObject
from trainer.storage import chain, checkpoint, checkpoint_rows
from trainer.storage.kept_texts import texts_by_key

_ALL = range(SHARDS)
_SHARDS_AT_ONCE = SHARDS // 16  # how many shards of two checkpoints are in memory at a time

MOST_COMPARED = 100_000  # features of a slot whose texts are compared with an unknown text
_COUNTS = ('key', 'show', 'click', 'unseen_days', 'admitted')


class CheckpointReader:
  """Reads the best or the last checkpoint of a run; the last one if there is no best one."""

  def __init__(self, run_dir: str, which: str = 'last'):
    self.cfg, self.run_dir = config.load_of_run(run_dir), run_dir
    paths = []
    for folder in ('best', 'checkpoints') if which == 'best' else ('checkpoints',):
      candidates = checkpoint.candidates(os.path.join(run_dir, folder))
      paths += [path for path, serial in candidates.items() if serial is not None]
    if not paths:
      raise UserError(f'{run_dir}: no finished checkpoint there; wanted a run that was trained')
    self.path = paths[0]  # the directory of the checkpoint
    self._manifest = checkpoint.check(self.path)
    listed = self._manifest['files']
    # The JSON of progress.json: the place in the data, and the ledger of passes.
    self.progress = json.loads(files.read_checked(self.path, 'progress.json', listed))
    self._dense = files.from_npz(files.read_checked(self.path, 'dense.npz', listed))

  def rows(self, shards: range = _ALL) -> Iterator[Chunk]:
    """Yields the chunks that have rows of these logical shards, and maybe of others."""
    return checkpoint_rows.read_rows(self.path, self._manifest, shards)

  def _widths(self) -> dict[str, int]:
    """Returns {table: the number of factors of a row}."""
    cfg = self.cfg
    specs = table_specs(cfg.sparse.tables, len(cfg.data.slots), build(cfg).needs)
    return {table.name: table.width for table in specs}

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
    slots, ids = self.cfg.data.slots, self.cfg.own_slot_ids()
    statistics = SlotStatistics(ids, slots, self._widths())
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
    """Returns {key: text}: all kept texts of a slot and, of `keys`, those found in the passes."""
    dumps = checkpoint.read_texts(self.path, self._manifest)
    texts = texts_by_key(dumps, slot, self._slot_id(slot))
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

    Columns: text (None if it is not known), and those of `features`. With `most`, the table has at
    most so many; only these, and a chunk, are in memory at a time.
    """
    parts, count = [], 0
    for chunk in self.rows():
      parts.append(self._features(chunk, slot))
      count += len(parts[-1])
      if most is not None:
        parts = [_by_shows(parts)[:most]]
    return self._with_texts(slot, _by_shows(parts)), count

  def _with_texts(self, slot: str, table: pd.DataFrame) -> pd.DataFrame:
    """Returns a table of features with a first column `text`; None if it is not known."""
    texts = self.texts(slot, table['key'].to_numpy())
    table.insert(0, 'text', [texts.get(key) for key in table['key']])
    return table

  def feature(self, slot: str, text: str) -> JsonObject:
    """Returns what the checkpoint has of a feature; `known` is False if it has no row for it.

    `text` is the feature's value, as written in the log; for a cross its parts, 'a × b'.
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

  def neighbours(self, slot: str, text: str, k: int, least_shows: float = 0) -> pd.DataFrame:
    """Returns the k features of a slot whose factors have the highest cosine with those of `text`.

    Features with fewer shows than `least_shows` are left out. Columns: text (None if it is not
    known), key, show and cosine, the nearest first.
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
    table = table[['key', 'show']].assign(cosine=cosine)
    table = table[(table['key'] != key) & (table['show'] >= least_shows)]
    return self._with_texts(slot, table.nlargest(k, 'cosine').reset_index(drop=True))

  def _near(self, slot: str, text: str) -> JsonObject:
    """Returns {'near': up to three similar texts}; {} if there is none, or too much to compare."""
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
    if self.cfg.data.has_days and limits.decay < 1:
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
    """Returns a sentence for each of these slots that is shared: which features it also counts."""
    sharing = {s.name: s.shares for s in self.cfg.data.slots if s.shares}
    told = []
    for slot in dict.fromkeys(sharing.get(name, name) for name in slots):
      if others := [repr(name) for name, of in sharing.items() if of == slot]:
        where = f'slot{"s" * (len(others) > 1)} {", ".join(others)}'
        told.append(f'{slot}: its impressions and clicks also count its features in {where}')
    return told

  def counted(self) -> str | None:
    """Returns a text on what shows and clicks count; None if simply the samples of one epoch."""
    progress = self.progress
    # An epoch that has just begun has no samples yet.
    epochs = max(1, progress['epoch'] + bool(progress['done'] or progress['batch']))
    began_with_another = progress.get('first_step', 0) > 0
    if self.cfg.counted_fields():  # counts are forgotten where an epoch ends
      began_with_another, epochs = began_with_another and progress['epoch'] == 0, 1
    decays = self.cfg.data.has_days and self.cfg.policy().decay < 1
    if epochs == 1 and not began_with_another and not decays:
      return None
    told = f'Impressions and clicks are those of {epochs} epoch{"s" * (epochs > 1)}'
    told += ', and of the run of --init_from' * began_with_another
    return told + ', after the decay of every day that has ended' * decays + '.'

  def against(self, other: 'CheckpointReader') -> pd.DataFrame:
    """Returns how many features of each slot only one of two checkpoints has, and how both differ.

    Slots are matched by name, because the ids of like-named slots may differ; a feature is in both
    if it has the same text. If ids differ, all keys of both checkpoints are in memory at a time.

    Columns: only_here, only_there, in_both (numbers of features), and mean_change_of_linear, the
    mean absolute difference of the linear weights of the features in both.
    """
    ids = [reader.cfg.own_slot_ids() for reader in (self, other)]
    names = list(dict.fromkeys((*ids[0], *ids[1])))
    # A key's shard depends on its slot's id, so with other ids a feature lies in another shard.
    same = all(ids[0][name] == ids[1][name] for name in ids[0].keys() & ids[1].keys())
    at_once = _SHARDS_AT_ONCE if same else SHARDS
    table = pd.DataFrame(0.0, range(len(names)), ['only_here', 'only_there', 'in_both', 'change'])
    for begin in range(0, SHARDS, at_once):
      shards = range(begin, begin + at_once)
      here, there = (
        _linear_weights(of.rows(shards), shards, {i: names.index(name) for name, i in own.items()})
        for of, own in zip((self, other), ids)
      )
      both = pd.DataFrame({'here': here, 'there': there})
      change = (both['here'] - both['there']).abs()
      is_in = {'only_here': both['there'].isna(), 'only_there': both['here'].isna()}
      sums = pd.DataFrame(is_in | {'in_both': change.notna(), 'change': change})
      table = table.add(sums.groupby(both.index.to_numpy() >> HASH_BITS).sum(), fill_value=0)
    table['mean_change_of_linear'] = table.pop('change') / table['in_both'].clip(lower=1)
    counts = dict.fromkeys(('only_here', 'only_there', 'in_both'), np.int64)
    return table.astype(counts).set_axis(pd.Index(names, name='slot'))


def _by_shows(parts: list[pd.DataFrame]) -> pd.DataFrame:
  table = pd.concat(parts, ignore_index=True)
  return table.sort_values('show', ascending=False, kind='stable', ignore_index=True)


def _days_left(policy: Policy, limits: Policy, row: JsonObject) -> int | None:
  """Returns after how many day ends an unseen feature is evicted; None if more than 1,000."""
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


def _linear_weights(chunks: Iterator[Chunk], shards: range, ids: Mapping[int, int]) -> pd.Series:
  """Returns the linear weights of all rows in these shards, by key.

  `ids` is {slot id of a row: slot id in the returned key}; other slots are left out.
  """
  new_id = np.full([config.MAX_SLOTS + 2], -1, np.int64)
  new_id[list(ids)] = list(ids.values())
  parts = [pd.Series(np.zeros(0), np.zeros(0, np.int64))]
  for chunk in chunks:
    key, to = chunk['key'], new_id[chunk['key'] >> HASH_BITS]
    kept = within(key, shards) & (to >= 0)
    keys = (key & ((1 << HASH_BITS) - 1)) | (np.maximum(to, 0) << HASH_BITS)
    parts.append(pd.Series(chunk['linear'][kept, 0].astype(float), keys[kept]))
  return pd.concat(parts)
