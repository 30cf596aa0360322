"""Describes what a job would read and train, without training: `trainer.run --dry_run`."""

import collections
import itertools
import os
import textwrap
from collections.abc import Iterator, Mapping

import numpy as np

from trainer import config
from trainer.comm.communicator import SingleProcess
from trainer.data.features import HASH_BITS
from trainer.data.labels import nothing_to_learn
from trainer.data.passes import Pass, announced, in_order, passes
from trainer.data.prepared import PreparedPass, same_samples
from trainer.errors import BadPass
from trainer.evaluation.task import task_of
from trainer.evaluation.validation import SAME_SAMPLES
from trainer.model.calibration import SlotCalibration
from trainer.plain_data import JsonObject
from trainer.reporting.live_line import WIDTH
from trainer.reporting.metric_text import counted
from trainer.tools import columns
from trainer.training.advice import few_clicks
from trainer.training.inputs import TWICE, Inputs
from trainer.training.ledger import Ledger, entry_of
from trainer.training.step import Step

SHOWN_PASSES = 12  # the most passes of a split to list; those in the middle are left out
UNIQUE = 0.9  # a slot with more distinct values per sample teaches nothing
CHUNK = 65_536  # samples to count at once
LIFECYCLE_BYTES = 48  # about what a feature's key, counters and place in the index take


def tell(cfg: config.Config) -> Iterator[str]:
  """Yields lines for the user about passes, slots, parameters and memory.

  Raw passes are converted into run_dir/prepared, where the run itself then finds them.
  """
  step = task_of(cfg).step(SingleProcess())
  folder = os.path.join(cfg.run_dir, 'prepared')
  inputs = Inputs(cfg, SingleProcess(), step, lambda: None, folder)
  distinct: dict[int, np.ndarray] = {}
  samples, ledger, trained, unknown = 0, Ledger(), [], {}
  for split in ('train', 'valid', 'test'):
    may_refuse = cfg.data.max_refused_passes if split == 'train' else 0
    wrong: dict[str, str] = {}
    patterns = getattr(cfg.data, split)
    listed = passes(cfg.data, patterns, f'data.{split}', wrong if may_refuse else None)
    yield from map(_refused, wrong.values())
    opened: list[PreparedPass] = []
    rows, told, seen, in_a_row = [], [], [], 0  # told: on the first pass with labels all alike
    if split == 'train' and cfg.data.watch:
      watched, troubles = _announced(cfg.data)
      yield from troubles
      listed = in_order({p.path: p for p in (*watched, *listed)}.values())
    for data_pass in listed:
      try:
        (prepared,) = inputs.prepared([data_pass], split)
        alike = nothing_to_learn(cfg, prepared)
        if alike and alike.is_refused and split == 'train':
          raise BadPass(alike.text)
        in_a_row = 0
      except BadPass as e:
        if not may_refuse:
          raise
        yield _refused(str(e))
        in_a_row += 1
        if in_a_row == may_refuse + 1:
          yield f'a run ends here: data.max_refused_passes allows {may_refuse} refused in a row'
        continue
      if split == 'train':
        entry = entry_of(data_pass, 0)
        if how := ledger.trained_before(entry, by_name=cfg.data.has_days):
          seen.append(f'{data_pass.path}: a run does not train on it: {how}')
          continue
        entry.fate = 'trained'
        ledger.put(entry)
      opened.append(prepared)
      if not told and alike:
        told.append(f'  {alike.text}')
      known, _ = prepared.labels(0)
      rows.append((data_pass.name, prepared.day, prepared.num_samples, known.sum(), len(known)))
      if split == 'train':
        samples += prepared.num_samples
        _count(prepared, distinct)
    yield from _pass_lines(cfg.data, split, rows)
    yield from (*seen, *told)
    if split == 'train':
      trained = opened
    else:
      if opened and distinct:
        names, known = [slot.name for slot in cfg.ordered_slots], [*distinct.values()]
        unknown[split] = _by_slot(names, opened, np.concatenate(known))
      for one, other in same_samples(itertools.product(trained, opened)):
        yield SAME_SAMPLES % (one, other, split)
      for one, other in same_samples(itertools.combinations(opened, 2)):
        yield TWICE % (other, one)
    if split == 'valid' and (few := few_clicks(cfg, opened)):
      yield from textwrap.wrap(few, WIDTH, initial_indent='  ', subsequent_indent='    ')
  of_items = cfg.columns_of_items()
  if (items := inputs.items()) is not None:
    yield f'data.items: {items.num_samples:,} items'
    _count(items, distinct)
  if not samples and cfg.data.stream:
    return  # the passes that will come are not known
  yield 'slots (distinct values in the passes to train on):'
  ids = cfg.slot_ids()
  for slot in cfg.ordered_slots:
    own = '' if not slot.shares else f', with those of {slot.shares}'
    count = len(distinct.get(ids[slot.name], ()))
    if slot.name in of_items:
      own += ', in data.items'
    elif items is not None and slot == cfg.item_slot:
      own = ', with those of data.items'
    elif not own and not slot.made and count > UNIQUE * samples:
      own = ', nearly one a sample: new samples have others'
    new = [(split, of.get(slot.name, {}).get('unknown', 0)) for split, of in unknown.items()]
    if any(share >= 0.005 for _, share in new) and slot.name not in of_items:
      own += f', new in {" and ".join(f"{share:.0%} of data.{split}" for split, share in new)}'
    yield f'  {slot.name:24} {count:>12,}{own}'
  for finding in columns.cold(cfg, unknown, 'ctr-tune --columns' if cfg.data.valid else ''):
    yield from textwrap.wrap(finding.sentence, WIDTH)
  by_table = collections.Counter()
  for table, i in {(slot.table, ids[slot.name]) for slot in cfg.data.slots}:
    by_table[table] += len(distinct.get(i, ()))
  yield from _parameter_lines(step, by_table)
  batches = -(-samples // cfg.train.batch_size)
  yield f'an epoch: about {batches:,} steps of {cfg.train.batch_size:,} samples'
  yield f'train.epochs: {cfg.train.epochs}' + (', with early stopping' if cfg.train.plateau else '')


def _announced(data: config.Data) -> tuple[list[Pass], list[str]]:
  """Returns the passes announced in data.watch, and lines about those absent or refused."""
  try:
    watched, missing, wrong = announced(data)
  except OSError as e:
    return [], [f'{data.watch}: {e.strerror}; a run waits for it']
  told = [f'{path}: is announced but not there; a run waits for it' for path in missing]
  told += map(_refused, wrong.values())
  if not watched:
    told.append(f'{data.watch}: no pass is announced there; a run waits for one')
  return watched, told


def _refused(reason: str) -> str:
  return f'{reason}; a run refuses it'


def _count(prepared: PreparedPass, distinct: dict[int, np.ndarray]) -> None:
  """Adds the keys of a pass to `distinct`, {slot id: distinct keys, ascending}."""
  for batch in prepared.batches(CHUNK):
    keys = np.unique(batch.keys)
    ids, starts = np.unique(keys >> HASH_BITS, return_index=True)
    for slot_id, of_slot in zip(ids.tolist(), np.split(keys, starts[1:])):
      distinct[slot_id] = np.union1d(distinct.get(slot_id, keys[:0]), of_slot)


def _by_slot(names: list[str], prepared: list[PreparedPass], known: np.ndarray) -> JsonObject:
  """Returns the share of samples with unknown features of each slot, of `known` keys."""
  found, known = SlotCalibration(names), np.sort(known)
  for batch in (batch for one in prepared for batch in one.batches(CHUNK)):
    places = np.minimum(np.searchsorted(known, batch.keys), len(known) - 1)
    found.update(batch, known[places] == batch.keys, np.zeros(len(batch.label)))
  return found.result(found.state())


def _pass_lines(data: config.Data, split: str, rows: list) -> Iterator[str]:
  """Yields lines on passes; a row is (name, day, samples, sum of first labels, labels known)."""
  if not rows:
    return
  total, labels, known = (sum(row[i] for row in rows) for i in (2, 3, 4))
  rate = labels / max(1, known)
  where = 'data.train and data.watch' if split == 'train' and data.watch else f'data.{split}'
  yield f'{where}: {counted(len(rows), "pass")}, {total:,} samples, mean label {rate:.4f}'
  day_text = 'day {}'.format if data.has_days else lambda _: ''
  lines = [
    f'  {name:24} {day_text(day):>10} {count:>12,}   label {labels / max(1, known):.4f}'
    for name, day, count, labels, known in rows
  ]
  half, more = SHOWN_PASSES // 2, len(rows) - SHOWN_PASSES
  yield from lines if more <= 0 else [*lines[:half], f'  … {more:,} more', *lines[-half:]]


def _parameter_lines(step: Step, features: Mapping[str, int]) -> Iterator[str]:
  """Yields lines on layers and tables; `features` is {table: its number of features}."""
  layers = collections.Counter()
  for variable in step.dense.trainable:
    layers[variable.name.partition('/')[0].partition(':')[0]] += int(np.prod(variable.shape))
  yield 'parameters of the layers:'
  for name, count in layers.items():
    yield f'  {name:24} {count:>12,}'
  yield 'parameters of the tables, once every feature is admitted:'
  total = 4 * 3 * sum(layers.values())  # with an optimizer's two moments
  for table in step.dense.embedding.tables:
    count = features[table.name]
    size = count * (4 * table.floats + LIFECYCLE_BYTES)
    total += size
    yield (
      f'  {table.name:24} {count * (1 + table.width):>12,}   {count:,} features × '
      f'(1 + {table.width}), {size / 1e6:,.1f} MB with optimizer state'
    )
  yield f'memory of the model: about {total / 1e6:,.1f} MB, without the free room in its tables'
