"""`python tests/support/frozen_rank.py PLACE [flags of trainer.run]`: freezes itself on the way.

PLACE is FILE:FUNCTION:EVENT, such as trainer/runtime.py:start:call, of the first call or return
at which the process stops itself with SIGSTOP.
"""

import os
import runpy
import signal
import sys
from types import FrameType
from typing import Any


def _freeze_at(place: str) -> None:
  file, function, wanted = place.split(':')

  def profile(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if event == wanted and code.co_qualname == function and code.co_filename.endswith(file):
      os.kill(os.getpid(), signal.SIGSTOP)

  sys.setprofile(profile)


if __name__ == '__main__':
  _freeze_at(sys.argv.pop(1))
  sys.path.insert(0, os.getcwd())
  runpy.run_module('trainer.run', run_name='__main__', alter_sys=True)
