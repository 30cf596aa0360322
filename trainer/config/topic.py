"""The section `data.topic`: a log that is a topic of Kafka, in place of files."""

import contextlib
from typing import Annotated, Any, Literal

import pydantic

from trainer.config.section import NonNegative, Positive, PositiveInt, Rules, Section, wrong
from trainer.errors import SECRET, short
from trainer.plain_data import Json

_OURS = ('bootstrap.servers', 'auto.offset.reset', 'enable.auto.commit', 'enable.partition.eof')


def _start(value: Json) -> Json:
  if isinstance(value, dict):
    with contextlib.suppress(ValueError, TypeError):
      offsets = {int(p): int(n) for p, n in value.items()}
      if min([0, *offsets, *offsets.values()]) == 0:
        return offsets
  elif value in ('earliest', 'latest'):
    return value
  wrong('', f'found {short(value)}; wanted earliest, latest or offsets, as {{0: 1200, 1: 1180}}')


class TopicPass(Section):
  """What one pass of the topic is. It ends at whichever of its bounds comes first."""

  records: PositiveInt | None = 1_000_000
  """The most messages of a pass; null: any number."""
  seconds: Positive | None = None
  """The seconds from the end of one pass to the end of the next, which has the messages that have
  come by then; if there are none, it waits for the first. null: `records` alone ends a pass."""
  by: Literal['arrival', 'time'] = 'arrival'
  """What `seconds` are measured by. arrival: the trainer's clock. time: the messages' timestamps; a
  pass then lies in a window of so many seconds, and ends once the window is over, as
  `lateness_seconds` says."""


class Topic(Section):
  """A topic of Kafka that is trained on as it grows (docs/online.md)."""

  brokers: str
  """Addresses at which the cluster is found, such as host:9092,other:9092."""
  topic: str = pydantic.Field(pattern=r'^[A-Za-z0-9._-]{1,249}$')
  """The name of the topic."""
  format: Literal['jsonl', 'csv', 'arrow', 'tfrecord'] = 'jsonl'
  """What a message holds. jsonl: a JSON object; csv: a line of the fields in data.columns; arrow:
  an Arrow IPC stream of any number of records; tfrecord: a tf.Example."""
  start: Annotated[str | dict[int, int], pydantic.BeforeValidator(_start)] = 'earliest'
  """Where a new run begins: at the oldest message, behind the newest one, or at an offset for each
  partition, such as {0: 1200, 1: 1180}. Partitions that are not named, or are added later, begin
  with their oldest message."""
  cut: TopicPass = pydantic.Field(TopicPass(), alias='pass')
  """What one pass is."""
  days: bool = False
  """Whether the stream has days, by the messages' timestamps in UTC. Each pass then lies in one
  day; files of data.train want data.day_pattern for theirs."""
  lateness_seconds: NonNegative = 60.0
  """How late a message may come. A day or window is over once every partition has a message that is
  newer than its end by so many seconds, or has had no new message for so long. data.late says what
  becomes of messages that come after the end of their day."""
  on_expired: Literal['fail', 'skip'] = 'fail'
  """What to do where the broker has deleted messages that were not trained on yet. fail: the run
  ends; skip: it goes on with the oldest message there, and tells how many it has lost."""
  config: dict[str, bool | int | float | str] = {}
  """Settings of librdkafka, such as security.protocol. A text that begins with @ names a file that
  holds the value, which is never shown; passwords, secrets and keys must be given so."""

  def mistakes(self, cfg: Any) -> Rules:
    if self.cut.records is None and self.cut.seconds is None:
      yield 'pass', 'found neither records nor seconds; wanted one of them or both'
    if self.cut.by == 'time' and self.cut.seconds is None:
      yield 'pass.by', "found 'time' without seconds; wanted the length of a window"
    if self.format == 'csv' and cfg.data.columns is None:
      yield 'format', "found 'csv' without data.columns; wanted the names of the fields of a line"
    if not self.brokers.strip() or '@' in self.brokers:
      found = "an address with an '@'" if self.brokers.strip() else "''"
      yield 'brokers', f'found {found}; wanted one as host:9092; passwords belong in config'
    for key, value in self.config.items():
      if key in _OURS:
        yield 'config', f"found '{key}', which the trainer itself sets; wanted it left out"
      if SECRET.search(key) and not str(value).startswith('@'):
        told = f"found the value of '{key}', which the run_dir would keep"
        yield 'config', f"{told}; wanted '@FILE', where FILE holds it"
