"""The one line that shows how a run gets on."""

import sys


class LiveLine:
  """Shows each text in place of the one before; on processes other than the first nothing.

  Args:
    active: whether this process writes.
  """

  def __init__(self, active: bool):
    self._active, self._length = active, 0

  def show(self, text: str, keep: bool = False) -> None:
    """Shows `text`; `keep` leaves it standing and begins a new line."""
    if not self._active:
      return
    # The carriage return comes last: horovodrun forwards a rank's line when it sees one.
    sys.stdout.write(text.ljust(self._length) + ('\n' if keep else '\r'))
    sys.stdout.flush()
    self._length = 0 if keep else len(text)
