"""Exports of a run for serving: base, deltas and a SavedModel. `python -m trainer.export --run_dir DIR --kind base|delta|saved_model`.

    exports/000012-base/
      rows-00000-of-00002.parquet         what process 0 of 2 owns, one row a feature: key int64, slot int32 (its id), linear float32,
                                          factors list<float32> (empty before admission), by logical shard, then key
      tombstones-00000-of-00002.parquet   key int64: exported earlier, gone now (of deltas)
      dense.npz                           the dense variables
      MANIFEST.json  DONE                 as of checkpoints; kind, sequence, base, previous, position
    exports/000013-delta/ …

**What base + deltas is.** A base and the deltas after it form a *chain*; each delta's manifest names the chain's `base` and the `previous`
export. To *replay* a chain: take the base's rows; for each delta in order, drop the keys of its tombstones and put its rows in place of
those of the same key. Let B be the keys of `select base` at a moment, D those of `select delta`, both by the policy, and L the keys that
the replay of the chain holds. An export then writes

    base:   rows B
    delta:  rows D ∪ (B − L), tombstones L − (B ∪ D)

so that the replay holds exactly the keys B (D ⊆ B where delta_threshold ≥ 0): nothing that was evicted or has faded stays, and a feature
that faded, was dropped and now is back comes whole, however small its gain. Every row of the replay has the values that its feature
had when it was last written; it is written again as soon as it has gained delta_threshold, so that for all features with a gain since then
of less than delta_threshold, and for no others, the values may be older. With delta_threshold 0 the replay *is* the base of that moment.

L is read from the chain's own files, which makes it crash-safe without any state in the trainer: what is DONE has been exported. Where a
chain is broken (a directory was removed), the next delta starts another one from nothing: its `base` and `previous` are null.

**Exactly once.** An export is known by its kind and its position in the data. Written again after a crash, it is the same; where it is DONE
already, it is left alone, and only the gains of the features in it are taken from their delta_score, as after every export that is DONE.
A gain between selection and commit is kept. The command's own exports take their place in the chain too, but the trainer, which does not
know of them, keeps the gains and exports these rows once more.
"""
import os
import re
import time
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import flags, logging

from ops.row_store import shard_of
from trainer.checkpoint import file_entries, npz, shards_of
from trainer.features import HASH_BITS
from trainer.files import UNFINISHED, DataLoss, check_listed, is_done, publish, read_manifest, remove, together, write_synced
from trainer.sync.allreduce import Alone

KINDS = ('base', 'delta', 'saved_model')
ROWS_AT_ONCE = 1 << 16  # of one pull; a row group of a Parquet file
FACTORS = pa.list_(pa.field('item', pa.float32(), nullable=False))
SCHEMA = pa.schema([('key', pa.int64()), ('slot', pa.int32()), ('linear', pa.float32()), ('factors', FACTORS)])
_NAME = re.compile(r'(\d{6,})-(' + '|'.join(KINDS) + ')')


class Export(NamedTuple):
  path: str
  rows: int  # over all processes
  tombstones: int
  seconds: float


class _Plan(NamedTuple):
  """What process 0 found in the directory; the same on every process."""
  path: str
  sequence: int
  done: bool  # the export is there already
  chain: list  # paths, base first, whose replay the consumers hold


def exports(directory):
  """Exports that are DONE, in order: list of (sequence, kind, path)."""
  try:
    names = [_NAME.fullmatch(n) for n in os.listdir(directory)]
  except FileNotFoundError:
    return []
  return sorted((int(m[1]), m[2], os.path.join(directory, m[0])) for m in names if m and is_done(os.path.join(directory, m[0])))


def chain(directory):
  """Paths of the last base and the deltas after it, in order; a chain that is broken or not begun is []."""
  of_rows = [path for _, kind, path in exports(directory) if kind != 'saved_model']
  path, links = of_rows[-1] if of_rows else None, []
  while path:
    if path not in of_rows:
      logging.warning('%s: is missing, and %s names it as the one before; the next delta starts anew', path, links[0])
      return []
    links.insert(0, path)
    manifest = read_manifest(path)
    check_listed(path, manifest['files'])
    path = manifest['previous'] and os.path.join(directory, manifest['previous'])
  return links


def _read_keys(path, kind, shards):
  """The keys of some logical shards in one export's `rows` or `tombstones`: int64 [n]."""
  keys, manifest = [np.zeros([0], np.int64)], read_manifest(path)
  for rank in range(manifest['parts']):
    own = shards_of(rank, manifest['parts'])
    name = _part(kind, rank, manifest['parts'])
    if name in manifest['files'] and own.start < shards.stop and shards.start < own.stop:
      try:
        found = pq.read_table(os.path.join(path, name), columns=['key'])['key'].to_numpy()
      except pa.ArrowInvalid as e:
        raise DataLoss(f'{os.path.join(path, name)}: is damaged: {e}') from None
      shard = shard_of(found)
      keys.append(found[(shard >= shards.start) & (shard < shards.stop)])
  return np.concatenate(keys)


def live_keys(links, shards):
  """The keys of some logical shards that the replay of a chain holds: int64 [n], ascending."""
  live = np.zeros([0], np.int64)
  for path in links:
    live = np.setdiff1d(live, _read_keys(path, 'tombstones', shards), assume_unique=True)
    live = np.union1d(live, _read_keys(path, 'rows', shards))
  return live


def _part(kind, rank, size):
  return f'{kind}-{rank:05d}-of-{size:05d}.parquet'


def _write_parquet(path, schema, tables):
  with open(path, 'wb') as f:
    with pq.ParquetWriter(f, schema, use_dictionary=['slot'] if 'slot' in schema.names else False) as writer:
      for table in tables:
        writer.write_table(table)
    f.flush()
    os.fsync(f.fileno())


def row_tables(store, keys):
  """Yields keys' rows as Parquet holds them.

  Args:
    store: has `pull(keys, train=False)` (ops.row_store.RowStore).
    keys: int64 [n], by logical shard, then key.
  """
  for begin in range(0, len(keys), ROWS_AT_ONCE):
    some = keys[begin:begin + ROWS_AT_ONCE]
    rows = store.pull(some, train=False)
    offsets, linear, factors = (pa.array(np.asarray(a)) for a in (rows.offsets, rows.linear, rows.factors))
    lists = pa.ListArray.from_arrays(offsets, factors, type=FACTORS)
    yield pa.Table.from_arrays([pa.array(some), pa.array((some >> HASH_BITS).astype(np.int32)), linear, lists], schema=SCHEMA)


def _by_shard(keys):
  return keys[np.lexsort((keys, shard_of(keys)))]


def write(cfg, kind, position, *, store, model, dense_stats, integer_slots=(), peers=Alone()):
  """Writes an export into `run_dir/exports`, or finds it there; then, of a base or delta, commits it. Every process calls it.

  Args:
    kind: base, delta or saved_model.
    position: dict that JSON can hold, where in the data the run stands: the same when the run comes here again, else another.
    store: the rows that this process owns: `select`, `commit` and `pull` (ops.row_store.RowStore).
    model: trainer.model.CTRModel.
    dense_stats: float32 [2, Dn], what dense columns are standardised with.
    integer_slots: of a SavedModel, names of slots whose columns are int64.
  Returns: Export.
  Raises: UserError on every process where one could not write; nothing is committed then.
  """
  started, directory = time.monotonic(), os.path.join(cfg.run_dir, 'exports')
  what, shards = f'cannot export into {directory}', shards_of(peers.rank, peers.size)
  dense = {f'{i:03d}/{v.name}': v.numpy() for i, v in enumerate(model.variables)} | {'dense_stats': np.asarray(dense_stats)}

  def begin():
    if peers.rank:
      return None
    os.makedirs(directory, exist_ok=True)
    found = exports(directory)
    for name in os.listdir(directory):  # left by a crash
      path = os.path.join(directory, name)
      if _NAME.fullmatch(name.removesuffix(UNFINISHED)) and not is_done(path):
        remove(path)
    for sequence, _, path in (f for f in found if f[1] == kind):
      if read_manifest(path)['position'] == position:
        return _Plan(path, sequence, True, [])
    sequence = 1 + max((f[0] for f in found), default=0)
    path = os.path.join(directory, f'{sequence:06d}-{kind}')
    os.makedirs(path + UNFINISHED)
    return _Plan(path, sequence, False, chain(directory) if kind == 'delta' else [])
  plan = peers.broadcast(together(peers, what, begin))
  unfinished = plan.path + UNFINISHED

  def select():
    """Returns: keys to write, tombstones, and what to commit by kind of selection."""
    if kind == 'saved_model':
      return _by_shard(np.asarray(store.select('all'))), None, {}
    base = np.asarray(store.select('base'))
    delta = np.asarray(store.select('delta')) if kind == 'delta' else base[:0]
    tombstones = None
    if plan.done:
      written = _read_keys(plan.path, 'rows', shards)
      base, delta = np.intersect1d(base, written), np.intersect1d(delta, written)
    elif kind == 'delta':
      live = live_keys(plan.chain, shards)
      tombstones = _by_shard(np.setdiff1d(live, np.union1d(base, delta), assume_unique=True))
      base = np.setdiff1d(base, live, assume_unique=True)
    commits = {'delta': delta, 'base': np.setdiff1d(base, delta, assume_unique=True)}
    return _by_shard(np.union1d(base, delta)), tombstones, commits

  def write_part():
    rows, tombstones, commits = select()
    if plan.done:
      return 0, 0, commits
    _write_parquet(os.path.join(unfinished, _part('rows', peers.rank, peers.size)), SCHEMA, row_tables(store, rows))
    if tombstones is not None:
      keys = pa.table({'key': tombstones})
      _write_parquet(os.path.join(unfinished, _part('tombstones', peers.rank, peers.size)), keys.schema, [keys])
    return len(rows), 0 if tombstones is None else len(tombstones), commits

  def finish(counts):
    if peers.rank or plan.done:
      return
    if kind == 'saved_model':
      from trainer import serving
      parts = [os.path.join(unfinished, _part('rows', r, peers.size)) for r in range(peers.size)]
      serving.save(cfg, model, dense_stats, parts, unfinished, integer_slots)
      for part in parts:
        os.remove(part)
    else:
      write_synced(os.path.join(unfinished, 'dense.npz'), npz(dense))
    previous = [os.path.basename(p) for p in plan.chain]
    publish(unfinished, plan.path, {
        'kind': kind, 'sequence': plan.sequence, 'position': position, 'parts': peers.size,
        'base': previous[0] if previous and previous[0].endswith('base') else None, 'previous': previous[-1] if previous else None,
        'rows': int(sum(c[0] for c in counts)), 'tombstones': int(sum(c[1] for c in counts)),
        'slots': cfg.slot_ids(), 'widths': {name: t.width for name, t in cfg.sparse.tables.items()}, 'files': file_entries(unfinished)})

  rows, tombstones, commits = together(peers, what, write_part)
  counts = peers.gather((rows, tombstones))
  together(peers, what, lambda: finish(counts))
  for selection, keys in commits.items():
    if len(keys):
      store.commit(selection, keys)
  manifest = read_manifest(plan.path)
  return Export(plan.path, manifest['rows'], manifest['tombstones'], time.monotonic() - started)


def main():
  import trainer.serving as serving
  from trainer.entry import open_run
  kind = flags.FLAGS.kind
  job = open_run(flags.FLAGS.run_dir, flags.FLAGS.set, flags.FLAGS.checkpoint or ('best' if kind == 'saved_model' else 'last'))
  position = {'command': 'trainer.export', 'step': job.step.step, 'examples': job.progress.examples, 'day': job.progress.day}
  done = write(job.cfg, kind, position, store=job.step.store, model=job.step.model, dense_stats=job.step.embedding.stats,
               integer_slots=flags.FLAGS.integer_slots)
  print(f'{done.path}: {done.rows:,} rows, {done.tombstones:,} tombstones in {done.seconds:.1f} s')
  if kind == 'saved_model':
    size, seconds = serving.measure(done.path)
    print(f'{size / 1e6:.1f} MB, loaded in {seconds:.1f} s')


if __name__ == '__main__':
  from trainer.entry import entry
  flags.DEFINE_string('run_dir', None, 'A run of trainer.run.', required=True)
  flags.DEFINE_enum('kind', None, KINDS, 'What to write into RUN_DIR/exports.', required=True)
  flags.DEFINE_multi_string('set', [], 'Overrides a key of the config.')
  flags.DEFINE_list('integer_slots', [], 'Slots that a SavedModel takes as int64 tensors; the others are strings.')
  flags.DEFINE_enum('checkpoint', None, ['best', 'last'], 'The default is last; of a SavedModel best by validation, as of trainer.predict.')
  entry(main)
