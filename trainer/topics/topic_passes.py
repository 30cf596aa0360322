"""Cuts a topic into passes, which are spans of offsets of each partition.

`Progress.topics`, and so each checkpoint, has the offset of each partition's next message, so that
every message is trained on once. It also has the last message read of each partition, by which a
topic made anew under the same name is told from the one trained on. Each cut is in cuts.json before
the pass is trained on, so that a run that goes on from an earlier checkpoint cuts the same passes.
"""

import contextlib
import functools
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from trainer import config
from trainer.data.passes import Pass
from trainer.data.spans import Span, Spans
from trainer.errors import UserError
from trainer.files import whole_file
from trainer.job.ready_passes import Source
from trainer.plain_data import Json, JsonObject
from trainer.topics.topic import DAY_MS, Away, Expired, Known, Topic, another, expired
from trainer.training.run_state import RunState

FILE = 'cuts.json'
MOST_READY = 16  # passes that are cut ahead
_KEPT_CUTS = 1000
_LEAST_PAUSE, _MOST_PAUSE = 0.1, 30.0  # seconds between questions to the cluster


def _name(topic: str, offsets: Mapping[str, int]) -> str:
  """Returns the name of the pass that begins with these offsets: the topic, and their sum."""
  return f'{topic}-{sum(offsets.values())}'


def shared(available: Mapping[str, int], total: int) -> dict[str, int]:
  """Shares `total` messages among partitions: equally, except where one has fewer available."""
  shares: dict[str, int] = {}
  for p in sorted(available, key=available.__getitem__):
    left = len(available) - len(shares)
    shares[p] = min(available[p], -(-(total - sum(shares.values())) // left))
  return shares


class _Place(NamedTuple):
  """Where a pass begins: the next offset of each partition, and when the last window began.

  `known` has each partition's last message that was read; `cluster` is the id of their cluster.
  """

  offsets: dict[str, int] = {}
  time: int | None = None
  known: Mapping[str, Sequence[int]] = {}
  cluster: str | None = None


class _Ahead(NamedTuple):
  """A partition's messages that were read ahead, to its offset `end`."""

  end: int
  messages: np.ndarray = np.zeros([0, 2], np.int64)  # their offsets and times

  def within(self, low: float, high: float) -> tuple[int, int] | None:
    """Returns, of the messages with low <= time < high, the first offset and the earliest time."""
    times = self.messages[:, 1]
    chosen = self.messages[(times >= low) & (times < high)]
    return (int(chosen[0, 0]), int(chosen[:, 1].min())) if len(chosen) else None


def _crc32(cuts: JsonObject) -> int:
  return zlib.crc32(json.dumps(cuts).encode())  # the order counts: the oldest cut is first


class TopicPasses(Source):
  """Finds the passes of data.topic that are ready."""

  def __init__(self, data: config.Data, state: RunState, clock: Callable[[], float]):
    super().__init__(data, state, clock)
    self._topic, self._days_ahead = data.topic, data.max_days_ahead
    self._path = os.path.join(state.run_dir, FILE)
    self._client: Topic | None = None
    self._ahead: dict[str, _Ahead] = {}
    self._bounds: dict[str, Span] = {}
    self._grew: dict[str, float] = {}  # when partitions had a new end
    self._look_again, self._pause, self._is_away = -math.inf, _LEAST_PAUSE, False
    self._since = clock()  # when the last pass was cut
    self._committed: dict[str, int] = {}
    self._checked: str | None = ''  # the cluster in which the topic was found to be the same
    # Where messages begin that are not trained on yet, and when the oldest of these came.
    self._oldest: tuple[dict[str, int], float | None] = {}, None
    self.waiting_for = f'records of {data.stream}'

  def look(self) -> list[Pass]:
    """Returns the passes that are ready, in order, and cuts as many as there are."""
    place = self._place()
    self._ask(place)
    ready, is_same = dict[str, Pass](), False
    while len(ready) < MOST_READY:
      name = _name(self._topic.topic, place.offsets)
      cut = self._file['cuts'].get(name)
      if cut is None or cut['after'] != place.offsets:
        try:
          if (spans := self._cut(place)) and not is_same:
            self._check_same(self._place(), most=1)
            is_same = True
        except Away as e:
          spans = self._wait_for_it(e)
        if spans is None:
          break
        cut = {'after': place.offsets, 'path': spans.path, 'at': self._clock()}
        self._file['cuts'][name] = cut
        self._write()
        self._since = self._clock()
      spans = Spans.of(cut['path'])
      for p, span in spans.parts.items() if self._bounds else ():
        if span.end > (end := self._bounds.get(p, Span(0, 0)).end):
          told = f'wants the messages of partition {p} to offset {span.end}, which has {end}'
          raise self._damaged(f'its pass {name} {told}')
      ready[name] = Pass(name, cut['path'], spans.day if self._topic.days else 0)
      place = _Place(place.offsets | spans.ends, spans.time)
    return list(ready.values())

  def since(self, ready: Sequence[Pass]) -> float | None:
    """Does what `Source.since` does, by the timestamps of the next messages."""
    spans = next((p.spans.parts for p in ready if p.spans), None)
    if spans is None:
      begins = self._starts(self._place()) if self._bounds else {}
      spans = {p: Span(start, self._bounds[p].end) for p, start in begins.items()}
    starts = {p: span.start for p, span in spans.items() if span.start < span.end}
    if starts != self._oldest[0] and self._client:
      with contextlib.suppress(Away):  # it is asked again
        times = [t / 1000 for t in self._client.times(starts) if t >= 0]
        self._oldest = starts, min(times, default=None)
    return self._oldest[1]

  def messages(self) -> int | None:
    begin = self._place().offsets or self._file['begin'] or {}
    left = [max(0, span.end - begin.get(p, span.start)) for p, span in self._bounds.items()]
    return sum(left) if left else None

  def figures(self, data_pass: Pass) -> JsonObject:
    """Returns fields of a pass's event: how many messages follow it, and were lost before it."""
    if (spans := data_pass.spans) is None:
      return {}
    offsets = self._place().offsets
    ends = offsets | spans.ends
    lag = {p: max(0, span.end - ends.get(p, span.start)) for p, span in self._bounds.items()}
    lost = sum(span.start - offsets.get(p, span.start) for p, span in spans.parts.items())
    return {'lag': sum(lag.values()), 'lag_by_partition': lag, 'lost_messages': lost}

  def settled(self) -> None:
    """Moves the run's offsets past the passes that were trained on, refused or left out."""
    topics, topic = self._state.progress.topics, self._topic.topic
    place = topics.get(topic, {'offsets': {}, 'time': None})
    settled = {e.name: e.data_pass for e in self._state.ledger if e.fate != 'entered'}
    while data_pass := settled.get(_name(topic, place['offsets'])):
      spans = data_pass.spans
      place = place | {'offsets': place['offsets'] | spans.ends, 'time': spans.time}
    topics[topic] = place

  def trained(self, meta: Mapping[str, Json]) -> None:
    """Notes, from a pass's `meta`, what later shows whether the topic is still the same one."""
    topics, topic = self._state.progress.topics, self._topic.topic
    known = topics[topic].get('known', {}) | meta.get('known', {})  # a pass of 0.2.0 has none
    topics[topic] = topics[topic] | {'known': known, 'cluster': meta.get('cluster')}

  def _place(self) -> _Place:
    """Returns the place after the passes that were trained on, refused or left out (`settled`)."""
    return _Place(**self._state.progress.topics.get(self._topic.topic, {}))

  @functools.cached_property
  def _file(self) -> JsonObject:
    """What cuts.json has: `begin`, offsets or None, and `cuts` by name; UserError if damaged."""
    if not os.path.exists(self._path):
      return {'begin': None, 'cuts': {}}
    try:
      with open(self._path, 'rb') as f:
        read = json.load(f)
      crc32 = read.pop('crc32', None)  # 0.2.0 wrote none
      is_whole = crc32 in (None, _crc32(read))
      for name, cut in read['cuts'].items():
        spans, after = Spans.of(cut['path']), cut['after']
        joins = [after.get(p, start) == start <= end for p, (start, end) in spans.parts.items()]
        is_whole &= all(joins) and name == _name(spans.topic, after) and cut['at'] >= 0
      begin = read['begin'] and {p: int(n) for p, n in read['begin'].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
      is_whole = False
    if not is_whole:
      raise self._damaged('is damaged')
    return read | {'begin': begin}

  def _damaged(self, what: str) -> UserError:
    wanted = 'wanted it removed: the run then cuts the messages behind its checkpoint anew'
    late = '; a run with start: latest that has trained no pass yet then begins later'
    return UserError(f'{self._path}: {what}; {wanted}{late * (self._topic.start == "latest")}')

  def _write(self) -> None:
    self._file['cuts'] = dict([*self._file['cuts'].items()][-_KEPT_CUTS:])
    with whole_file(self._path) as f:
      f.write(json.dumps(self._file | {'crc32': _crc32(self._file)}).encode())

  def _starts(self, place: _Place) -> dict[str, int]:
    """Returns {partition: the first offset of the pass that begins at `place`}.

    A run without offsets yet begins as data.topic.start says; cuts.json keeps where. If messages
    have expired, data.topic.on_expired decides: an error, or the oldest message that is left.
    """
    topic, starts, begin = self._topic, {}, place.offsets
    if not begin:  # a run begins with the same offsets, however often it is started
      if self._file['begin'] is None:
        ends = {p: span.end for p, span in self._bounds.items()}
        given = {str(p): n for p, n in topic.start.items()} if type(topic.start) is dict else {}
        self._file['begin'] = ends if topic.start == 'latest' else given
        self._write()
      begin = self._file['begin']
    for p, there in self._bounds.items():
      starts[p] = wanted = begin.get(p, there.start)
      if not there.start <= wanted <= there.end:
        error = expired(topic.topic, p, wanted, there)
        if topic.on_expired == 'fail' or not isinstance(error, Expired):
          raise error
        self.say(f'{error}: {there.start - wanted:,} messages are lost')
        starts[p] = there.start
    return starts

  def _cut(self, place: _Place) -> Spans | None:
    """Returns the pass that begins at a place, or None if it is not complete yet.

    A window of time or a day ends, in each partition, before the first message that is at least
    `lateness_seconds` newer than its end.
    """
    if not self._bounds:
      return None
    starts, cut, time = self._starts(place), self._topic.cut, place.time
    if not self._topic.days and cut.by == 'arrival':
      return self._spans(place, starts, {p: span.end for p, span in self._bounds.items()})
    length = round(1000 * cut.seconds) if cut.by == 'time' else DAY_MS
    lateness, latest = self._topic.lateness_seconds, math.inf
    ahead = {p: self._read_ahead(p, start) for p, start in starts.items()}
    if self._days_ahead is not None:
      latest = (self._clock() * 1000 if time is None else time) + (self._days_ahead + 1) * DAY_MS

    def earliest(low: float) -> float:
      found = (read.within(low, latest) for read in ahead.values())
      return min((time for _, time in filter(None, found)), default=math.inf)

    for p, read in ahead.items():
      if beyond := read.within(latest, math.inf):
        far = f'its time is over {self._days_ahead} days ahead (data.max_days_ahead)'
        self.say(f'{self._topic.topic}:{p}:{beyond[0]}: {far}; it counts for the open window')
    if time is None:
      if (first := earliest(0)) == math.inf:
        return None
      time = first // length * length
    while True:
      until = (time // length + 1) * length
      if self._topic.days:
        until = min(until, (time // DAY_MS + 1) * DAY_MS)
      passed = {p: read.within(until + 1000 * lateness, latest) for p, read in ahead.items()}
      ends = {p: found[0] if found else ahead[p].end for p, found in passed.items()}
      is_complete = any(passed.values()) and all(
        found or (ends[p] >= self._bounds[p].end and self._clock() - self._grew[p] >= lateness)
        for p, found in passed.items()
      )
      spans = self._spans(place, starts, ends, time, is_complete)
      if spans is not None or not is_complete:
        return spans
      # No message is of the windows before.
      time = max(until, earliest(until) // length * length)

  def _spans(
    self,
    place: _Place,
    starts: Mapping[str, int],
    ends: Mapping[str, int],
    time: int | None = None,
    is_complete: bool = False,
  ) -> Spans | None:
    """Returns the pass of messages from `starts` to at most `ends`; None if it is not due yet.

    `is_complete` says that the window that begins at `time` gets no more messages.
    """
    cut, available = self._topic.cut, {p: ends[p] - start for p, start in starts.items()}
    found, topic = sum(available.values()), self._topic.topic
    is_due = cut.seconds and cut.by == 'arrival' and self._clock() - self._since >= cut.seconds
    if cut.records is not None and found >= cut.records:
      available = shared(available, cut.records)
    elif not found or not (is_complete or is_due):
      wanted = f' of {cut.records:,}' if cut.records else ''
      self.waiting_for = f'records of topic {topic}: {found:,}{wanted} are there'
      return None
    parts = {p: Span(start, start + available[p]) for p, start in starts.items()}
    # All partitions of the first pass, so that those without messages keep their beginning.
    parts = {p: span for p, span in parts.items() if place.offsets.get(p) != span.end}
    return Spans(topic, time, parts)

  def _read_ahead(self, partition: str, start: int) -> _Ahead:
    """Reads a partition's messages ahead from offset `start` on, as many as a pass may need."""
    read, topic = self._ahead.get(partition, _Ahead(start)), self._topic
    read = _Ahead(max(start, read.end), read.messages[read.messages[:, 0] >= start])
    most = math.inf if topic.cut.records is None else start + topic.cut.records
    end = int(min(most, self._bounds[partition].end))
    if read.end < end:
      found = [read.messages]
      for some in self._client.messages(partition, Span(read.end, end)):
        found.append(np.array([(m.offset(), m.timestamp()[1]) for m in some], np.int64))
      read = _Ahead(end, np.concatenate(found))
      for offset, _ in read.messages[read.messages[:, 1] < 0][:1]:
        where = f'topic {topic.topic}:{partition}:{offset}'
        raise UserError(f'{where}: has no timestamp; wanted one, for data.topic.days and pass.by')
    self._ahead[partition] = read
    return read

  def _ask(self, place: _Place) -> None:
    """Asks the cluster for its partitions and their ends, unless it did so a moment ago."""
    began = self._clock()
    if self._look_again - _MOST_PAUSE <= began < self._look_again:
      return
    try:
      if self._client is None:
        self._client = Topic(self._topic)
      bounds = self._client.bounds()
      if self._is_away:
        logging.warning('%s: the cluster answers again', self._client.what)
      if not bounds:
        self.waiting_for = f'records of topic {self._topic.topic}, which is not there yet'
      elif gone := self._bounds.keys() - bounds.keys():
        raise UserError(f'{self._client.what}: its partition {min(gone)} is gone')
      for p, span in bounds.items():
        if p not in self._bounds or self._bounds[p].end != span.end:
          self._grew[p] = self.arrived = self._clock()
      self._bounds, self._is_away, self._pause = bounds or self._bounds, False, _LEAST_PAUSE
      cluster = self._client.cluster()
      if bounds and cluster != self._checked:
        self._check_same(place)
      self._checked = cluster if bounds else ''
      if place.offsets != self._committed:
        self._client.commit(place.offsets)
        self._committed = dict(place.offsets)
      self._look_again = self._clock() + self._pause
    except Away as e:
      self._wait_for_it(e)

  def _check_same(self, place: _Place, most: int | None = None) -> None:
    """Raises a UserError if the topic is not the one whose messages `place` knows.

    It compares the last message read, of all partitions or of the `most` with the newest ones.
    """
    topic, cluster, same = self._topic.topic, self._client.cluster(), 0
    newest = sorted(place.known.items(), key=lambda item: -item[1][1])
    for p, known in newest[:most]:
      known, there = Known(*known), self._bounds.get(p, Span(0, 0))
      was = f'partition {p}: was made anew: its message of offset {known.offset}, which was read'
      if known.offset >= there.end:
        raise another(topic, f'{was}, is not there yet')
      if known.offset < there.start:
        continue
      with contextlib.suppress(Expired):
        for messages in self._client.messages(p, Span(known.offset, known.offset + 1)):
          if Known.of(messages[0]) != known:
            raise another(topic, f'{was}, is another one now')
          same += 1
    if most or not newest:
      return
    is_other = None not in (cluster, place.cluster) and cluster != place.cluster
    told = f'the id of its cluster was {place.cluster} and is {cluster}'
    gone = 'none of the messages that were read last is there any more'
    if is_other and not same:
      raise another(topic, f'which was made anew: {told}, and {gone}')
    if is_other:
      self.say(f'topic {topic}: {told}; goes on, because the messages read last are the same')
    elif not same:
      relied = 'its name' if None in (cluster, place.cluster) else f"its cluster's id, {cluster},"
      self.say(f'topic {topic}: {gone}; goes on, because {relied} is the same')

  def _wait_for_it(self, error: Away) -> None:
    self._checked = ''
    if not self._is_away:
      logging.warning('%s; waiting for the cluster', error)
    self._is_away, self._pause = True, min(2 * self._pause, _MOST_PAUSE)
    self.waiting_for = f'the cluster of topic {self._topic.topic}, which does not answer'
    self._look_again = self._clock() + self._pause
