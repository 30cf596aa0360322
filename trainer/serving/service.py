"""Serves one version of a model, and switches to a new version without a pause."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

from absl import logging

from trainer.errors import UserError, one_line
from trainer.serving.rest import Request, Signature
from trainer.serving.scorer import Scorer, Scores
from trainer.serving.versioned_store import Version, VersionedStore, VersionGone, View


class NotReady(UserError):
  """The store has no version yet."""

  status = 503


class _Served:
  """A version with the number of its users: requests under way, and the service itself."""

  def __init__(self, view: View, text: str, scorer: Scorer):
    self.view, self.text, self.scorer = view, text, scorer
    self.users = 1


class Service:
  """A model that is served from a store.

  A new version is loaded while the old one is served. A request keeps the version that it began
  with. If the store can no longer show that version, the request begins again with the new one.

  Args:
    store: rows, dense part and config of a version.
    advance: updates the store before each refresh; None: another process updates it.
    own_layers: dotted paths of layers that the config of a version may import.
  """

  def __init__(
    self,
    store: VersionedStore,
    advance: Callable[[], object] | None = None,
    own_layers: Collection[str] = (),
  ):
    self._store, self._advance, self._own_layers = store, advance, own_layers
    self._served: _Served | None = None
    self._lock = threading.Lock()  # of _served, users and _idle
    self._refreshing = threading.Lock()
    self._idle: list[tuple[str, Scorer]] = []  # free for another version of the same config
    self._logged = ''  # the last error
    self._logged_filter = False

  @property
  def version(self) -> Version | None:
    """The version that is served; None if there is none yet."""
    served = self._served
    return served and served.view.version

  def predict(self, request: Request) -> tuple[Scores, int]:
    """Returns the scores of a request, and the number of their version.

    Raises:
      BadRequest: for a client's mistake.
      NotReady: if there is no version yet.
      UserError: if the store cannot be read.
    """
    while True:
      with self._use() as served:
        samples = served.scorer.parse(request.columns, request.size)
        try:
          scores = served.scorer.score(samples, served.view.look_up)
          return scores, served.view.version.sequence
        except VersionGone:
          gone = served
      self.refresh(gone)

  def unknown_columns(self, request: Request) -> list[str]:
    """Returns the names of a request's columns that the model does not read.

    Raises:
      NotReady: if there is no version yet.
    """
    with self._use() as served:
      return served.scorer.unknown(request.columns)

  def signature(self) -> Signature:
    """Returns the names in requests and answers. Raises: NotReady if there is no version yet."""
    with self._use() as served:
      return Signature(*served.scorer.signature(), served.view.version.sequence)

  @contextlib.contextmanager
  def _use(self) -> Iterator[_Served]:
    with self._lock:
      served = self._served
      if served is None:
        raise NotReady('no version is published yet')
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
        self._idle = [(text, s) for text, s in self._idle if text == served.text]
        self._idle.append((served.text, served.scorer))

  def refresh(self, gone: _Served | None = None) -> None:
    """Serves the version that the store holds now.

    Args:
      gone: a version that the store can no longer show.
    Raises:
      UserError: if the store cannot be read, or holds no valid model; the earlier version is still
        served.
    """
    with self._refreshing:
      if gone is not None and self._served is not gone:
        return  # another thread was here first
      if self._advance:
        self._advance()
      if self._served and gone is None and self._store.version() == self.version:
        return
      view = self._store.view()
      served = view and self._load(view)
      with self._lock:
        before, self._served = self._served, served
      if before:
        self._leave(before)

  def _load(self, view: View) -> _Served:
    try:
      text = view.config
      with self._lock:
        idle = next((pair for pair in self._idle if pair[0] == text), None)
        if idle:
          self._idle.remove(idle)
      scorer = idle[1] if idle else Scorer(text, self._own_layers)
      scorer.load(view.dense)
      if not idle:
        scorer.warm_up()
      if view.version.left_out and not self._logged_filter:
        logging.warning('version %d: %s', view.version.sequence, view.version.left_out)
        self._logged_filter = True
      return _Served(view, text, scorer)
    except BaseException:
      view.close()
      raise

  def follow(self, stop: threading.Event, seconds_between_looks: float) -> None:
    """Refreshes until asked to stop; logs each error once."""
    while not stop.is_set():
      try:
        self.refresh()
        self._logged = ''
      except Exception as e:
        text = str(e) if isinstance(e, UserError) else one_line(e)
        if text != self._logged:
          logging.warning('version %s is still served: %s', self.version, text)
        self._logged = text
      stop.wait(seconds_between_looks)
