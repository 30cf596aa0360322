"""Answers requests with one version of a model, and switches to new versions without a pause."""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from absl import logging

from trainer.data.arrays import places
from trainer.errors import UserError, one_line
from trainer.plain_data import Json
from trainer.serving.limits import BadRequest, Refused
from trainer.serving.requests import Request, Signature
from trainer.serving.scorer import Scorer, Scores
from trainer.serving.versioned_store import Version, VersionedStore, VersionGone, View

# What costs as much as a sample: to search so many items; and how many samples cost as much as a
# query of few items.
_ITEMS_A_SAMPLE, _QUERY_SAMPLES = 1000, 20


class FoundItems(NamedTuple):
  """The items that were found for the B queries of a request."""

  column: str  # of the item's id in the log
  items: list[tuple[list[str], list[float]]]  # [B], the items of each query and their scores
  unknown: Mapping[str, int]  # slot -> its number of distinct features without a row


class _Served:
  """A loaded version, and the number of its users: the requests under way, plus the service."""

  def __init__(self, view: View, text: str, scorer: Scorer):
    self.view, self.text, self.scorer = view, text, scorer
    self.users = 1


class Service:
  """A model that is served from a store.

  A new version is loaded while the old one is served. A request keeps the version that it began
  with; if the store no longer holds that, it begins again with the new one. Methods that answer
  requests raise Refused if there is no version yet. `advance` is called before each refresh to
  update the store, unless another process does so. `own_layers` are as in Scorer.
  """

  def __init__(
    self,
    store: VersionedStore,
    advance: Callable[[], object] | None = None,
    own_layers: Collection[str] = (),
  ):
    self._store, self._advance, self._own_layers = store, advance, own_layers
    self._served: _Served | None = None
    self._may_load = True  # until a look at the store finds nothing
    self._lock = threading.Lock()  # guards _served, its users and _idle
    self._refreshing = threading.Lock()
    self._idle: list[tuple[str, Scorer]] = []  # (config, scorer), free for another version
    self._logged = ''  # the last error
    self._logged_filter = False

  @property
  def version(self) -> Version | None:
    """The version that is served; None if there is none yet."""
    served = self._served
    return served and served.view.version

  @property
  def not_ready(self) -> str | None:
    """Why no version is served yet; None if one is."""
    if self._served:
      return None
    if self._may_load or self._store.is_applying:
      return 'the server is loading its first version'
    return 'no version is published yet'

  def predict(self, request: Request) -> tuple[Scores, int]:
    """Returns a request's scores and their version; refused if the run has model.retrieval."""
    while True:
      with self._use() as served:
        if served.view.items is not None:
          raise Refused(404, 'found a run with model.retrieval; wanted :recommend')
        samples = served.scorer.columns.read(request.columns, request.size, request.shared)
        try:
          scores = served.scorer.score(samples, served.view)
          return scores, served.view.version.sequence
        except VersionGone:
          gone = served
      self.refresh(gone)

  @property
  def item_column(self) -> str | None:
    """The column of the log that holds the items to find; None if the model computes scores."""
    with self._use() as served:
      return served.scorer.columns.item_column

  def cost_of_query(self, k: int) -> int:
    """Returns what it costs to find k items for a query, in samples."""
    with self._use() as served:
      items = served.view.items
      if items is None:
        return k
      k = min(k, len(items.items.keys))
      return max(_QUERY_SAMPLES, k, items.searched(k) // _ITEMS_A_SAMPLE)

  def find(
    self, request: Request, k: int, seen: Sequence[Sequence[Json]] | None, candidates: int = 0
  ) -> tuple[FoundItems, int]:
    """Returns the best items for each query of a request, and the number of their version.

    Args:
      k: how many items to find for each query; BadRequest above the number of items.
      seen: for each query, the items to leave out; None for the items in its histories.
      candidates: if larger than k, how many items to find instead; at most all items are found.
    """
    with self._use() as served:
      if served.view.items is None:
        raise Refused(404, 'found a run without model.retrieval; wanted :predict')
      columns, search = served.scorer.columns, served.view.items
      samples = columns.read(request.columns, request.size, request.shared)
      if (empty := columns.is_empty(samples)).any():
        wanted = ', '.join(columns.names)
        raise BadRequest(f'sample {empty.argmax()}: an empty query; wanted a value of {wanted}')
      count = len(search.items.keys)
      if k > count:
        raise BadRequest(f'k: found {k}; wanted at most {count:,}, the items of the catalogue')
      k = min(max(k, candidates), count)
      of_samples = columns.histories(samples) if seen is None else map(columns.item_keys, seen)
      scores = served.scorer.score(samples, served.view)
      answers = []
      for vector, keys in zip(scores.outputs['vector'], of_samples):
        left_out = places(search.items.keys, keys)
        # A query of vector 0 finds nothing: none of its features has a row, and no bias was added.
        found = search.best(vector, k if vector.any() else 0, left_out[left_out >= 0])
        answers.append((search.items.texts[found[0]].tolist(), found[1].tolist()))
      found = FoundItems(columns.item_column, answers, scores.unknown)
      return found, served.view.version.sequence

  def unknown_columns(self, request: Request) -> list[str]:
    """Returns the names of a request's columns that the model does not read."""
    with self._use() as served:
      return served.scorer.columns.unknown(request.columns)

  def signature(self) -> Signature:
    """Returns the columns and outputs of a request."""
    with self._use() as served:
      return Signature(*served.scorer.signature(), served.view.version.sequence)

  @contextlib.contextmanager
  def _use(self) -> Iterator[_Served]:
    with self._lock:
      served = self._served
      if served is None:
        raise Refused(503, self.not_ready)
      served.users += 1
    try:
      yield served
    finally:
      self._leave(served)

  def _leave(self, served: _Served) -> None:
    with self._lock:
      served.users -= 1
      ended = not served.users
    if ended:
      served.view.close()
      with self._lock:
        if served.text == (self._served or served).text:
          self._idle.append((served.text, served.scorer))

  def refresh(self, gone: _Served | None = None) -> None:
    """Switches to the store's version; on a UserError the earlier one is still served.

    `gone` is a served version that a request no longer found in the store: another thread may have
    replaced it already. Without it, it switches if the store has another version.
    """
    with self._refreshing:
      if gone is not None and self._served is not gone:
        return  # another thread was here first
      if self._advance:
        self._advance()
      is_whole = self._served and gone is None and not self._served.view.is_damaged
      if is_whole and self._store.version() == self.version:
        return
      view = self._store.view()
      if view is None and self._served and gone is None:
        raise UserError('the store holds no version that this server reads')
      self._may_load = view is not None
      served = view and self._load(view)
      with self._lock:
        before, self._served = self._served, served
        if served:
          self._idle = [pair for pair in self._idle if pair[0] == served.text]
      if served:
        version = served.view.version
        logging.info('version %d (%s) is served', version.sequence, version.export)
      if before:
        self._leave(before)

  def _load(self, view: View) -> _Served:
    try:
      text = view.config
      with self._lock:
        idle = next((pair for pair in self._idle if pair[0] == text), None)
        if idle:
          self._idle.remove(idle)
      if idle:
        scorer = idle[1]
        scorer.load(view.dense)
      else:
        # A new config: build the next version's scorer too, because later requests would wait.
        # Warm them up when both are built: building one makes TensorFlow prepare the other again.
        count = 1 if self._served and self._served.text == text else 2
        scorer, *spare = new = [Scorer(text, self._own_layers) for _ in range(count)]
        for one in new:
          one.load(view.dense)
          one.warm_up(view)
        # Later collections then skip TensorFlow's many objects, which would take 0.1 s or more.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        with self._lock:
          self._idle += [(text, one) for one in spare]
      if view.version.left_out and not self._logged_filter:
        logging.warning('version %d: %s', view.version.sequence, view.version.left_out)
        self._logged_filter = True
      return _Served(view, text, scorer)
    except BaseException:
      view.close()
      raise

  def follow(self, stop: threading.Event, seconds_between_looks: float) -> None:
    """Calls `refresh` until `stop` is set; an error that repeats is logged only once."""
    while not stop.is_set():
      pause, started = seconds_between_looks, time.monotonic()
      try:
        self.refresh()
        text = ''
        if not self._served:
          why = self._store.absent() or 'no base was exported (export.base: true) or published'
          text = f'nothing is served yet: {why}'
      except Exception as e:
        version = self.version
        served = (
          f'version {version.sequence} ({version.export}) is still' if version else 'nothing is'
        )
        text = f'{served} served: {e if isinstance(e, UserError) else one_line(e)}'
        pause = max(pause, time.monotonic() - started)  # a load that fails may take seconds
      if text and text != self._logged:
        logging.warning(text)
      self._logged = text
      stop.wait(pause)
