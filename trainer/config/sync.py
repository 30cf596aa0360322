"""The section `sync`: how the processes of a job work together."""

from typing import Literal

import pydantic

from trainer.config.section import Port, Positive, PositiveInt, Section, wrong


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

  @pydantic.model_validator(mode='after')
  def _check_ports(self) -> 'Sync':
    if self.ports and self.ports[0] > self.ports[1]:
      wrong('ports', f'found {list(self.ports)}; wanted [first, last] with first <= last')
    return self
