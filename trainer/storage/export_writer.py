"""Writes a run's exports for serving: base, delta, saved_model, items.

    exports/000012-base/
      rows-00000-of-00002.parquet         what process 0 of 2 owns, one row a feature, by logical
                                          shard, then key: key int64, slot int32 (its id), linear
                                          float32, factors list<float32> (empty before admission;
                                          encoded byte by byte, so that the two zero bytes of
                                          numbers from bfloat16 take no space); show and click
                                          float32, if a slot has `counts`
      tombstones-00000-of-00002.parquet   only of deltas: key int64, the rows to delete
      dense.npz                           the dense variables
      config.yaml                         the resolved config
      MANIFEST.json  DONE                 as in checkpoints; kind, sequence, base, previous,
                                          position, made_of, checkpoint
    exports/000013-delta/ …
    exports/saved_model/14/             TensorFlow Serving's layout
    exports/items/15/                   a base of a run with model.retrieval: the rows that its
                                        query tower reads, and its items (trainer.retrieval.items)

**Chains.** A base and the deltas after it form a *chain*; each delta's manifest names the chain's
`base` and the `previous` export. To *replay* it: take the base's rows; for each delta in order,
delete the keys of its tombstones and let its rows replace those of the same key. Let B be the keys
that the policy selects for a base now, D those for a delta, and L those that the replay holds. An
export then writes

    base:   rows B
    delta:  rows D ∪ (B − L), tombstones L − (B ∪ D)

Afterwards the replay holds exactly the keys B. (D is a part of B if delta_threshold is 0 or more.)
Features that were evicted or fell below the base's threshold are deleted; one that comes back is
written, however little its score has grown. Any other is written again once its score has grown by
delta_threshold; until then the replay keeps its older values. With delta_threshold 0, the replay
equals a base of that moment. If the chain's last export is of the same position in the data, D is
empty.

L is read from the chain's own files. The next delta begins a new chain, with null for its `base`
and `previous`, if a directory of the chain was removed; if the run continues with other slots,
tables or interactions, which give keys and rows another meaning; or if the chain's last export is
not of a state that led to the present one.

**Which state an export is of.** A state knows its *ancestors*: the checksums of the manifests of
the last base or delta that the trainer wrote, and of each checkpoint since. A delta, which holds
what has changed since, may follow an export among the ancestors, or one by the command ctr-export
of a checkpoint among them (the manifest's `checkpoint`). Exports of a state that is gone, because
the run went back to an earlier checkpoint and trained otherwise from there, are of neither kind.

**Filters.** If `base_threshold` or `delta_keep_days` is set, the features outside B are in the
table but not in exports, so serving scores samples without them. The manifest holds their number
and share of all shows, and describes the features that a delta may leave at older values.

**Items.** A run with model.retrieval exports `items` in place of `base`. Its delta holds the items
whose vectors differ from those of the replay, and the keys of the items that left the catalogue. An
item that was drawn only as a negative gets another vector but no new shows, so its delta_score does
not select its rows; the delta holds these too if the query tower reads them.

**Exactly once.** If a process dies before the export is DONE, the continued run writes it again. If
it dies afterwards, before the next checkpoint, it comes to the same position in the data again,
writes the same kind of export under a temporary name, and compares: if rows, dense variables and
config are the same to the bit (`made_of` in the manifest), the export that is there counts; else
the new one takes its place and, if it is a delta, begins a new chain. In all cases the trainer then
lowers the delta_score of each exported feature by its value at the selection. Exports by ctr-export
belong to the chain too, but lower no delta_score.

**Retention.** `export.keep: n` keeps the newest n bases, the deltas after the oldest of these, and
n SavedModels.
"""

import contextlib
import functools
import os
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from ops.sharding import shards_of
from trainer import config, files
from trainer.comm.communicator import Communicator, SingleProcess
from trainer.embedding.row_table import RowTable
from trainer.errors import UserError, one_line
from trainer.plain_data import JsonObject
from trainer.storage import chain, export_rows, saved_model
from trainer.storage.chain import ROW_KINDS, name_of, part_name, path_of
from trainer.storage.row_files import COUNTED_SCHEMA, SCHEMA

LOCK = 'exports.lock'  # in the run_dir, held by the process that exports
PATIENCE = 600.0  # seconds that an export waits for another one


class Change(Protocol):
  """The items of a base, or those that differ from the items of the chain that a delta follows."""

  keys: np.ndarray  # int64 [n], theirs; a delta has the rows of these too

  def save(self, directory: str) -> None: ...


class Items(Protocol):
  """The items that a model recommends, which exports hold beside rows.

  `told` tells the user what a base has of them; `since` returns how they differ from those of a
  chain, or all if `links` is empty; `save_index` writes an index to find them, if `has_index`.
  """

  told: str
  has_index: bool

  def since(self, links: Sequence[str], replay: chain.Replay) -> Change: ...
  def save_index(self, directory: str) -> None: ...


class WrittenExport(NamedTuple):
  """An export that `write` has written or, if the same export existed already, found."""

  path: str
  rows: int  # over all processes
  tombstones: int
  seconds: float
  slots: dict[str, int]  # rows by slot
  left_out: chain.LeftOut
  checksum: int  # of its manifest
  told: str | None  # a line for the user, if it takes the place of an export of another state


class _Plan(NamedTuple):
  """Where an export goes and what it continues. Process 0 decides this for all processes."""

  path: str
  sequence: int
  twin: str | None  # the path of an export of the same kind and position, which may be the same
  newest: str | None  # the path of the newest base or delta, if this export does not follow it
  # The chains that the export may continue, to be tried in this order: the one that the twin
  # continues, then the one that counts if the twin is not the same. Each is the paths of its
  # exports, base first, and whether the last of them has the same position in the data.
  chains: list[tuple[list[str], bool]]


def _place(position: JsonObject) -> JsonObject:
  """Returns the part of a position that says how far in the data it is, not how it is exported."""
  return {k: v for k, v in position.items() if k not in ('rules', 'integer_slots')}


def _begin(
  directory: str,
  kind: str,
  position: JsonObject,
  layout: JsonObject,
  ancestors: Collection[int],
  replay: chain.Replay,
) -> _Plan:
  """Plans an export, and makes its directory under a temporary name. Only process 0 calls this."""
  done, manifests, newest = replay.scan(directory)
  place = _place(position)
  # Of this place in the data, only the newest export counts, because scorers serve the newest. It
  # may have other rules or integer slots.
  twin = next(
    (
      export.path
      for export in reversed(done)
      if export.kind == kind and _place(manifests[export.path]['position']) == place
    ),
    None,
  )
  if twin and manifests[twin]['position'] != position:
    twin = None

  def may_follow(links: list[str]) -> bool:
    last = manifests[links[-1]]
    is_ancestor = last['checkpoint'] in ancestors or files.checksum(links[-1]) in ancestors
    return is_ancestor and all(last[name] == value for name, value in layout.items())

  chains: list[list[str]] = [[]]
  if kind == 'delta' and newest and may_follow(newest):
    chains = [newest]
  if kind == 'delta' and twin:
    before = manifests[twin]['previous']
    links = chain.links_of(directory, before, manifests)
    if before and not (links and may_follow(links)):
      twin = None
    elif links != chains[0]:
      chains.insert(0, links)
  sequence = 1 + max((export.sequence for export in done), default=0)
  path = path_of(directory, kind, sequence)
  os.makedirs(path + files.UNFINISHED)
  is_left = kind == 'delta' and newest and not chains[-1]
  return _Plan(
    path,
    sequence,
    twin,
    newest[-1] if is_left else None,
    [(links, bool(links) and manifests[links[-1]]['position'] == position) for links in chains],
  )


def _retire(directory: str, kind: str, keep: int) -> None:
  """Removes all but the newest `keep` exports of a kind, and the deltas before the oldest base."""
  done = chain.exports(directory)
  same = [export for export in done if export.kind == kind]
  if kind == 'delta' or len(same) < keep:
    return
  kinds = ROW_KINDS if kind in ROW_KINDS else [kind]
  for export in done:
    if export.kind in kinds and export.sequence < same[-keep].sequence:
      files.remove(export.path)


def write(
  cfg: config.Config,
  kind: str,
  position: JsonObject,
  *,
  store: RowTable,
  model: tf.keras.Model,
  dense_stats: tf.Variable,
  integer_slots: Sequence[str] = (),
  communicator: Communicator = SingleProcess(),
  folder: str | None = None,
  items: Items | None = None,
  ancestors: Collection[int] = (),
  checkpoint: int | None = None,
  replay: chain.Replay | None = None,
) -> WrittenExport:
  """Writes an export, if the same one does not exist yet; every process calls it.

  Once a base or delta is written, the delta_score of each exported feature, which it has gained
  since it was last written, is lowered by its value at the selection.

  Args:
    kind: base, delta, saved_model or items.
    position: how far in the data the run is. An export of the same kind, position and content is
      not written again.
    integer_slots: the slots whose columns are int64 in a SavedModel. With others than the newest
      SavedModel has, a new one is written.
    folder: the directory to write into; it has a chain of its own. None: `run_dir/exports`.
    items: on process 0 of a run with model.retrieval, all its items: kind 'items' writes all of
      them, 'delta' those that changed.
    ancestors: what led to the exported state, as this module's docstring says; those of process 0
      count. A delta that follows none of them has all rows.
    checkpoint: the checksum of the checkpoint that is exported; None for the state of a trainer.
    replay: the caller's cache of earlier exports; None: they are read again.
  Raises:
    UserError: on every process, if any cannot write, or an integer slot does not exist; no
      delta_score is lowered then.
  """
  slots = cfg.slot_ids()
  for name in integer_slots:
    if name not in slots:
      raise UserError(
        f"integer slot '{name}': is not among data.slots; wanted one of {', '.join(sorted(slots))}"
      )
  of_items = cfg.only_of_items()  # which serving does not look up
  served = [slots[name] for name in slots if name not in of_items] if of_items else None
  layout = {  # the settings that determine keys and rows
    'slots': slots,
    'widths': {name: t.width for name, t in cfg.sparse.tables.items()},
    'interactions': sorted({layer.kind for layer in cfg.model.all_interactions().values()}),
  }
  is_kept, replay = replay is not None, replay or chain.Replay()
  started, directory = time.monotonic(), folder or os.path.join(cfg.run_dir, 'exports')
  what, shards = f'cannot export into {directory}', shards_of(communicator.rank, communicator.size)
  # Other settings of the lifecycle select other rows.
  position = position | {'rules': store.policy.serialize()}
  if integer_slots:
    position['integer_slots'] = sorted(set(integer_slots))

  with contextlib.ExitStack() as turn:

    def begin() -> JsonObject:
      os.makedirs(directory, exist_ok=True)
      # A command and the trainer may export at the same time; one waits for the other.
      lock = turn.enter_context(
        files.exclusive(os.path.join(folder or cfg.run_dir, LOCK), PATIENCE)
      )
      with contextlib.suppress(OSError):  # on a full disk the file names nobody
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), f'process {os.getpid()} on host {os.uname().nodename}'.encode())
      return _begin(directory, kind, position, layout, ancestors, replay)._asdict()

    plan = _Plan(**communicator.on_first(what, begin))
    touched, noted = None, replay.noted
    if kind in ROW_KINDS and is_kept:
      touched, replay.noted = store.take_changes(), None
    unfinished = plan.path + files.UNFINISHED
    none = np.zeros([0], np.int64)

    def attempt(links: list[str], unchanged: bool) -> tuple[str | None, dict[str, np.ndarray]]:
      """Writes the export as one that continues a chain; returns its path and `Selection.commits`.

      The path is its twin's if that is the same; None if not and another chain is to be tried.
      """

      changed = none
      change = communicator.together(what, lambda: items and items.since(links, replay))
      if kind == 'delta':
        changed = communicator.broadcast(none if change is None else change.keys)

      def write_part() -> tuple[export_rows.Part, dict[str, np.ndarray]]:
        is_noted = links and chain.stamp_of(links[-1]) == noted
        selection = export_rows.select(
          served,
          store,
          kind,
          links,
          unchanged,
          shards,
          replay,
          changed,
          touched if is_noted else None,
        )
        schema = COUNTED_SCHEMA if cfg.counted_fields() else SCHEMA
        part = export_rows.write_part(served, store, selection, schema, unfinished, communicator)
        return part, selection.commits

      def finish() -> str | None:
        # An export is the same wherever its run lies.
        text = config.dump(cfg.model_copy(update={'run_dir': ''}))
        files.write(os.path.join(unfinished, chain.CONFIG), text.encode())
        dense = {f'{i:03d}/{v.name}': v.numpy() for i, v in enumerate(model.variables)}
        dense['dense_stats'] = np.asarray(dense_stats)
        files.write(os.path.join(unfinished, chain.DENSE), files.to_npz(dense))
        if change is not None:
          change.save(unfinished)
        contents = {name: entry['crc32'] for name, entry in files.entries(unfinished).items()}
        made_of = zlib.crc32(files.to_json(contents))
        if plan.twin and files.read_manifest(plan.twin)['made_of'] == made_of:
          files.remove(unfinished)
          return plan.twin
        if links != plan.chains[-1][0]:
          return None
        if kind == 'items':
          items.save_index(unfinished)
        if kind == 'saved_model':
          serving = functools.partial(saved_model.Serving, cfg, model, dense_stats, integer_slots)
          _write_model(serving, unfinished, len(parts))
        manifest = _manifest(cfg, kind, plan.sequence, links, parts, files.entries(unfinished))
        manifest |= layout | {'position': position, 'made_of': made_of, 'checkpoint': checkpoint}
        files.publish(unfinished, plan.path, manifest)
        if cfg.export.keep is not None:
          _retire(directory, kind, cfg.export.keep)
        return plan.path

      part, commits = communicator.together(what, write_part)
      parts = [export_rows.Part(*fields) for fields in communicator.gather(tuple(part))]
      return communicator.on_first(what, finish), commits

    for links, unchanged in plan.chains:
      path, commits = attempt(links, unchanged)
      if path:
        break
    for selection, keys in commits.items():
      if len(keys):
        store.commit(selection, keys)
  if kind in ROW_KINDS and not unchanged:  # else the table may hold gains that it did not write
    replay.noted = chain.stamp_of(path)
  manifest, other, told = files.read_manifest(path), plan.twin or plan.newest, None
  if other and other != path:
    told = (
      f'{name_of(other)} is of a state or config that the run no longer has: {name_of(path)} takes '
      f'its place{" and begins a new chain" if kind in ROW_KINDS else ""}'
    )
  return WrittenExport(
    path,
    manifest['rows'],
    manifest['tombstones'],
    time.monotonic() - started,
    manifest['slot_rows'],
    chain.LeftOut(**manifest['left_out']),
    files.checksum(path),
    told,
  )


def _manifest(
  cfg: config.Config,
  kind: str,
  sequence: int,
  links: Sequence[str],
  parts: Sequence[export_rows.Part],
  entries: dict[str, dict[str, int]],
) -> JsonObject:
  """Returns what an export's manifest says of its rows and files.

  `entries` is {file: its size and checksum}. This adds `keys_crc32`, the checksum of a file's keys,
  to the entries of files that have keys.
  """
  for name, crc in (item for part in parts for item in part.keys_crc32.items()):
    if name in entries:
      entries[name]['keys_crc32'] = crc
  previous = [name_of(path) for path in links]
  features, shows = sum(p.features for p in parts), sum(p.shows for p in parts)
  share_left_out = 1 - sum(p.shows_kept for p in parts) / shows if shows > 0 else 0.0
  left_out = chain.LeftOut(features - sum(p.kept for p in parts), features, share_left_out)
  if left_out.rows or (kind == 'delta' and previous):
    left_out = left_out._replace(older=list(_older(cfg)))
  return {
    'kind': kind,
    'sequence': sequence,
    'parts': len(parts),
    'base': previous[0] if previous and not previous[0].endswith('delta') else None,
    'previous': previous[-1] if previous else None,
    'rows': sum(part.rows for part in parts),
    'tombstones': sum(part.tombstones for part in parts),
    'left_out': left_out._asdict(),
    'slot_rows': {
      slot: sum(part.slots.get(str(i), 0) for part in parts)
      for slot, i in cfg.own_slot_ids().items()
    },
    'files': entries,
  }


def _older(cfg: config.Config) -> Iterator[str]:
  """Yields texts that say which features may keep older values after a delta is applied."""
  lifecycles = [cfg.lifecycle, *(slot.lifecycle for slot in cfg.data.slots if slot.lifecycle)]
  threshold = max(part.delta_threshold or 0.0 for part in lifecycles)
  if threshold > 0:
    yield (
      f'features whose score has grown by less than lifecycle.delta_threshold ({threshold:g}) '
      'since they were last written (null: none of these)'
    )
  if any(optimizer.l2_mode == 'catch_up' for _, optimizer, _ in cfg.sparse.optimizers()):
    yield 'features that were in no sample, which l2_mode catch_up changes too'
  fades = cfg.data.has_days and cfg.lifecycle.decay < 1
  if fades and any(slot.counts for slot in cfg.data.slots):
    yield 'counts of features that were in no sample, which fade at the end of a day'


def _write_model(
  serving_of: Callable[[chain.Rows], saved_model.Serving], unfinished: str, processes: int
) -> None:
  """Makes a SavedModel of what all processes wrote into `unfinished`."""
  parts = [os.path.join(unfinished, part_name('rows', r, processes)) for r in range(processes)]
  rows = chain.concatenate([rows for part in parts for rows in chain.read_rows(part)])
  for name in os.listdir(unfinished):
    os.remove(os.path.join(unfinished, name))
  try:
    serving_of(rows).save(unfinished)
  except (OSError, UserError):
    raise
  except Exception as e:  # such as a layer of the user's that cannot be traced
    raise UserError(f'cannot write a saved_model: {one_line(e)}') from e
