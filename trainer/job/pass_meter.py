"""Measures and reports the training on one pass."""

import collections
import math
import time
from collections.abc import Sequence

import numpy as np

from ops.sharding import shards_of
from trainer import config
from trainer.data.prepared import PreparedPass
from trainer.embedding.row_table import table_counts
from trainer.embedding.slot_statistics import SlotStatistics, shards_to_read
from trainer.model.metrics import State, result
from trainer.plain_data import JsonObject
from trainer.reporting.live_line import short_name
from trainer.training.inputs import Inputs
from trainer.training.run_log import RunLog, quality_text
from trainer.training.run_state import Progress

WAITING_TOLD = 0.1  # if input takes at least this share of the time, the live line says so
_MOST_CHUNKS_FOR_BLANKS = 8


def presence(
  slots: Sequence[config.Slot], prepared: PreparedPass, most_chunks: int | None = None
) -> dict[str, float]:
  """Returns {slot: share of a pass's samples that have a feature in the slot}.

  It reads at most `most_chunks` chunks of samples, from the first on. `slots` are
  Config.ordered_slots.
  """
  present, samples = collections.Counter(), 0
  for chunk in range(prepared.num_chunks)[:most_chunks]:
    for i, slot in enumerate(slots):
      of_fields, features, _ = prepared.fields(chunk, i)
      present[slot.name] += int(of_fields[features > 0].sum())
    samples += int(of_fields.sum())
  return {slot.name: present[slot.name] / max(samples, 1) for slot in slots}


def _dense(prepared: PreparedPass) -> dict[str, dict[str, float]]:
  """Returns figures of each dense column of a pass, {column: {missing, size}}.

  `missing` is the share of samples without a value, `size` the root mean square of the others,
  after log1p if the column's transform has it.
  """
  figures = {}
  for name, (count, mean, squares) in prepared.meta['dense'].items():
    size = math.sqrt(mean**2 + squares / max(count, 1))
    figures[name] = {'missing': 1 - count / max(prepared.num_samples, 1), 'size': size}
  return figures


class PassMeter:
  """Reports the training on one pass. Every process calls each method; metrics cover all processes.

  `name` is the name of the pass in the reports; `items` is the table data.items.
  """

  def __init__(
    self,
    cfg: config.Config,
    inputs: Inputs,
    progress: Progress,
    log: RunLog,
    prepared: PreparedPass,
    name: str,
    items: PreparedPass | None = None,
  ):
    self._cfg, self._communicator, self._step = cfg, inputs.communicator, inputs.step
    self._inputs, self._progress, self._log = inputs, progress, log
    self._prepared, self._name, self._items = prepared, name, items
    self._place = {'pass': name, 'epoch': progress.epoch, 'day': progress.day}
    self._began = self._window_began = time.monotonic()
    self._steps = 0
    self._window_sums = self._sums()
    self._window_waited = log.clock.waited
    self._samples_before = result(self._window_sums)['samples']
    self._exchanged_before = self._step.exchange_seconds

  def on_step(self) -> None:
    """Counts a step. Every train.log_every_steps steps, it reports on these steps."""
    self._inputs.progress_made()
    self._steps += 1
    if self._steps % self._cfg.train.log_every_steps:
      return
    sums, now, waited = self._sums(), time.monotonic(), self._log.clock.waited
    window = result({name: array - self._window_sums[name] for name, array in sums.items()})
    seconds = max(now - self._window_began, 1e-9)
    waiting = (waited - self._window_waited) / seconds
    self._window_began, self._window_sums, self._window_waited = now, sums, waited
    window['examples_per_second'] = round(window['samples'] / seconds, 1)
    self._log.status.set(step_seconds=seconds / self._cfg.train.log_every_steps)
    self._log.write('window', **window, **self._counts(), **self._place, **self._rate())
    batches = max(1, self._prepared.num_batches(self._cfg.train.batch_size))
    left = (batches - self._progress.batch) * (now - self._began) / self._steps
    told = f'{left:,.0f} s left' if waiting < WAITING_TOLD else f'waits for input {waiting:.0%}'
    epoch = f'epoch {self._progress.epoch} · ' if self._cfg.train.epochs > 1 else ''
    self._log.show(
      f'{epoch}{short_name(self._name, 12)} {self._progress.batch / batches:4.0%} · {told} · '
      f'{quality_text(window)} · {self._per_second(result(sums)["samples"]):,.0f}/s'
    )

  def finish(self, further: JsonObject) -> JsonObject:
    """Reports the pass by a line and an event `train` with `further` fields; returns all fields."""
    if exchanged := self._step.exchange_seconds - self._exchanged_before:
      self._log.clock.move(exchanged, 'exchange', within='step')
    values = result(self._sums()) | self._counts()
    rate = self._per_second(values['samples'])
    self._log.status.set(step_seconds=(time.monotonic() - self._began) / max(self._steps, 1))
    self._progress.examples += values['samples']
    told = f'{self._name} · {quality_text(values)} · {rate:,.0f} samples/s'
    if 'late' in (meta := self._prepared.meta):  # of a topic
      lost = further.get('lost_messages', 0) + meta['lost']
      further = further | {'late_messages': meta['late'], 'lost_messages': lost}
      further['absent_offsets'] = meta['absent']
    found, there = values['samples'], self._prepared.num_samples
    if self._cfg.sync.mode in ('ps_async', 'ps_geo') and found < there:
      told += (
        f' · of {found:,} of {there:,} samples: a lost worker took the figures of its own along'
      )
    if further.get('lag'):
      told += f' · {further["lag"]:,} messages behind'
    self._log.show(f'epoch {self._progress.epoch} · {told}', keep=True)
    slots = self._slot_statistics(values['features'])
    slots_of_log = self._cfg.ordered_slots
    present = presence(slots_of_log, self._prepared, _MOST_CHUNKS_FOR_BLANKS)
    dense = _dense(self._prepared)
    if self._items is not None:
      # The log does not have these columns.
      of_items = self._cfg.columns_of_items()
      in_table = presence(slots_of_log, self._items, _MOST_CHUNKS_FOR_BLANKS)
      present |= {slot: share for slot, share in in_table.items() if slot in of_items}
      dense |= {name: of for name, of in _dense(self._items).items() if name in of_items}
    for slot, share in present.items():
      slots.setdefault(slot, {})['blank'] = 1 - share
    fields = values | self._step.traffic() | self._place | self._rate() | further
    fields |= {
      'examples_per_second': round(rate, 1),
      'slots': slots,
      'dense': dense,
      'bad': self._prepared.meta.get('bad', {}).get('records', 0),
      'seconds': self._log.clock.lap(),
    }
    self._log.write('train', **fields)
    return fields

  def _per_second(self, samples: int) -> float:
    seconds = max(time.monotonic() - self._began, 1e-9)
    return (samples - self._samples_before) / seconds

  def _sums(self) -> State:
    return self._communicator.sum_arrays(self._step.dense.metrics.state())

  def _counts(self) -> dict[str, int]:
    return table_counts(self._step.store, self._communicator)

  def _rate(self) -> dict[str, float]:
    """Returns the factor of all learning rates in the last step, as a field of an event."""
    rate = self._step.dense.rates.at(max(0, self._step.steps - 1))
    return {'learning_rate_factor': round(float(rate), 6)}

  def _slot_statistics(self, features: int) -> dict[str, JsonObject]:
    """Returns {slot: statistics of its rows}, estimated from a sample of the rows.

    It also writes histograms of the norms of the rows to TensorBoard. `features` is the number of
    features on all processes.
    """
    slots, ids = self._cfg.data.slots, self._cfg.own_slot_ids()
    widths = {t.name: t.width for t in self._step.store.tables}
    statistics = SlotStatistics(ids, slots, widths)
    own = shards_of(self._communicator.rank, self._communicator.size)
    shards, share = shards_to_read(features, own)
    for chunk in self._step.store.export_state(shards=shards):
      statistics.add(chunk)
    state = statistics.state() | {'share': np.array([share, 1.0])}
    state = self._communicator.sum_arrays(state)
    share, processes = state.pop('share')
    norms = {f'norm/{slot}': bins for slot, bins in statistics.norm_histograms(state).items()}
    self._log.events.histograms('train', self._step.steps, norms)
    return statistics.result(state, share / processes)
