"""The section `sync`: how the processes of a job work together."""

from typing import Any, Literal

from trainer.config.section import Port, Positive, PositiveInt, Rules, Section
from trainer.errors import short


class Sync(Section):
  """How the processes of a job work together, and when one of them counts as lost."""

  mode: Literal['allreduce', 'ps', 'ps_async', 'ps_geo'] = 'allreduce'
  """allreduce: Horovod's ranks; the others: parameter servers (README.md)."""
  row_exchange: Literal['connections', 'horovod'] = 'connections'
  """allreduce: what carries rows between ranks: our own connections, or Horovod's all-to-all, for
  clusters where only Horovod's network may be used."""
  ports: tuple[Port, Port] | None = None
  """The first and the last port that a process may listen at; null: any port. A host needs one for
  each of its ranks, and one more where rank 0 runs; of parameter servers, only server 0 needs one
  more than the ports in TF_CONFIG."""
  lost_peer_seconds: Positive = 60
  """The job ends when a process has been silent for this time, or has not joined within this
  time after another one did."""
  stalled_peer_seconds: Positive = 1800
  """The job ends when a process is alive but has made no progress for this time."""
  max_staleness: PositiveInt | None = None
  """ps_async: how many steps a worker may be ahead of the slowest; null: any number."""
  geo_steps: PositiveInt = 10
  """ps_geo: a worker's steps between merges."""
  on_lost_worker: Literal['end', 'wait'] = 'end'
  """ps: whether a lost worker ends the job or is waited for."""

  def mistakes(self, cfg: Any) -> Rules:
    if self.ports and self.ports[0] > self.ports[1]:
      yield 'ports', f'found {list(self.ports)}; wanted [first, last] with first <= last'
    if cfg.model.retrieval is not None and self.mode != 'allreduce':
      yield 'mode', f"found '{self.mode}'; model.retrieval wants 'allreduce'"
    # What a mode does not support; docs/runbook.md has a table of all modes.
    schedule, exact = cfg.train.schedule, ('allreduce', 'ps')
    kind = schedule and schedule.kind
    by_steps = *exact, 'ps_async'
    refused = [
      ('data.keep_texts', cfg.data.keep_texts, exact, 'whose workers may leave with their texts'),
      ('train.schedule', kind, by_steps, 'whose workers count their own steps'),
    ]
    for i, slot in enumerate(cfg.data.slots):
      why = 'whose workers keep copies of rows without counts'
      refused.append((f'data.slots.{i}.counts', slot.counts, by_steps, why))
    for key, interaction in cfg.model.all_interactions().items():
      if interaction.args.get('batch_norm') == 'sync':
        refused.append((f'{key}.batch_norm', 'sync', exact, 'where no two workers share a step'))
    for key, value, modes, why in refused:
      if value and self.mode not in modes:
        found = f"found {short(value)} with sync.mode '{self.mode}', {why}"
        others = ' or '.join(map(repr, modes))
        yield f'/{key}', f'{found}; wanted it left out, or mode {others}'

  def idle(self, cfg: Any) -> Rules:
    for key, mode in (
      ('row_exchange', 'allreduce'),
      ('max_staleness', 'ps_async'),
      ('geo_steps', 'ps_geo'),
      ('on_lost_worker', 'ps'),
    ):
      if self.mode != mode:
        yield key, f"with sync.mode '{self.mode}': it is of '{mode}'"
