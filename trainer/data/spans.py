"""Spans of a topic: the messages of a pass, and the text by which ledgers and states name them."""

import datetime
from collections.abc import Mapping
from typing import NamedTuple

_SCHEME = 'kafka://'
_UTC = datetime.timezone.utc


class Span(NamedTuple):
  """The messages of a partition from the offset `start` on, before `end`."""

  start: int
  end: int


class Spans(NamedTuple):
  """The messages of a pass.

  Attributes:
    time: the beginning of its window, in ms since 1970; None if the topic has neither windows nor
      days.
    parts: {partition: its messages}.
  """

  topic: str
  time: int | None
  parts: Mapping[str, Span]

  @property
  def path(self) -> str:
    """A text that identifies the pass, as kafka://clicks/2024-01-31T10:00:00/0:17-29,1:0-8."""
    when = '-' if self.time is None else self._moment.replace(tzinfo=None).isoformat()
    parts = ','.join(f'{p}:{start}-{end}' for p, (start, end) in self.parts.items())
    return f'{_SCHEME}{self.topic}/{when}/{parts}'

  @classmethod
  def of(cls, path: str) -> 'Spans | None':
    """Returns the messages that a path names; None for the path of a file."""
    if not path.startswith(_SCHEME):
      return None
    topic, when, parts = path.removeprefix(_SCHEME).split('/')
    moment = None if when == '-' else datetime.datetime.fromisoformat(when).replace(tzinfo=_UTC)
    named = (part.split(':') for part in parts.split(','))
    spans = {p: Span(*map(int, span.split('-'))) for p, span in named}
    return cls(topic, moment and round(moment.timestamp() * 1000), spans)

  @property
  def _moment(self) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(self.time / 1000, _UTC)

  @property
  def day(self) -> int:
    """The day of its window as YYYYMMDD; 0 without a window."""
    return 0 if self.time is None else int(f'{self._moment:%Y%m%d}')

  @property
  def ends(self) -> dict[str, int]:
    return {partition: span.end for partition, span in self.parts.items()}

  @property
  def messages(self) -> int:
    return sum(span.end - span.start for span in self.parts.values())
