"""The line in the terminal that shows the progress of a run."""

import sys
import time

from absl import logging

from trainer.command_line import timed
from trainer.errors import printable

WIDTH = 80
SECONDS_BETWEEN_LINES = 10  # without a terminal


class LiveLine:
  """Shows each new text in place of the last one, in one line of the terminal.

  Without a terminal it prints a line with the time, at most every 10 s. Only the first process of a
  job is active.
  """

  def __init__(self, active: bool, terminal: bool = True):
    self._active, self._terminal, self._length = active, terminal, 0
    self._next = 0.0  # when the next line may be written without a terminal

  def show(self, text: str, keep: bool = False) -> None:
    """Shows `text`. With `keep`, the text stays, and the next one gets a new line."""
    if not self._active:
      return
    if not keep and not self._terminal:
      if time.monotonic() < self._next:
        return
      self._next = time.monotonic() + SECONDS_BETWEEN_LINES
    text = printable(text)
    in_place = self._terminal and not keep
    text = shortened(text, WIDTH - 1) if in_place else text if self._terminal else timed(text)
    # The carriage return comes last: horovodrun forwards a rank's line when it sees one.
    try:
      sys.stdout.write(text.ljust(self._length) + ('\r' if in_place else '\n'))
      sys.stdout.flush()
    except OSError as e:  # the reader of the output is gone, or the disk is full
      self._active = False
      logging.warning('cannot write to standard output: %s; the training goes on', e.strerror)
    self._length = len(text) if in_place else 0


def shortened(text: str, width: int) -> str:
  """Returns the text in one line of at most `width` characters; its end is cut off."""
  text = printable(text)
  return text if len(text) <= width else text[: width - 1] + '…'


def short_name(name: str, width: int, shared: str = '') -> str:
  """Returns the name in one line of at most `width` characters, cut in its middle.

  The end is kept, because it often has the date. `shared` is the prefix of all names in the same
  table; if it is enough to cut the prefix, nothing else is cut.
  """
  name = printable(name)
  cut = len(name) - width + 1
  left = 0 if len(shared) >= cut else width // 3
  return name if len(name) <= width else f'{name[:left]}…{name[left + cut :]}'
