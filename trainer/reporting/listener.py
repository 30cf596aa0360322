"""The interface of listeners, which are told what happens in a run: TensorBoard and tools."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainer.plain_data import Json

if TYPE_CHECKING:  # importing TensorFlow takes seconds
  from trainer.data.prepared import PreparedPass


class Listener:
  """Is told what happens in a run. A subclass overrides the methods that it needs.

  Process 0 alone calls `begin`, `wrote`, `scalars`, `histograms` and `close`, and tells the user
  once if one of them raises an error. All processes call the others, which may communicate.
  """

  what = ''  # names what it writes, for the user

  def begin(self) -> None:
    """Called before the first event; again if this process becomes process 0 anew."""

  def wrote(self, record: Mapping[str, Json]) -> None:
    """Called after an event was written; `record` is without fields that are None."""

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    """Called with the metrics of an event; `kind` is a split or the name of the event."""

  def histograms(self, kind: str, step: int, histograms: Mapping[str, np.ndarray]) -> None:
    """Called with {name: float64 [n, 3]}: the left edge, right edge and count of each bin."""

  def predicted(self, prepared: 'PreparedPass', values: Mapping[str, Json]) -> str | None:
    """Called before the model trains on a pass, with the metrics of its predictions for this pass.

    It is called only with train.progressive_validation, and not before the model's first step.
    Returns why exports must be withheld until the next pass is judged; None if they need not be.
    """

  def trained(self, prepared: 'PreparedPass', name: str) -> None:
    """Called after the model has trained on a pass, whose name is `name`."""

  def day_ended(self, day: int, is_empty: bool) -> None:
    """Called after the end of a day; an empty one had no pass."""

  def finished(self, prepared: Sequence['PreparedPass'], split: str) -> None:
    """Called with the passes of data.valid or, without them, of data.test, for the kept state.

    What a user may choose by must not be measured on data.test, which reports the result.
    """

  def close(self, has_trained: bool) -> None:
    """Called at the very end; `has_trained` is False if nothing was left to train."""
