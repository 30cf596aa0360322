"""What every command shares: flags, exit statuses, and one line for a user's mistake."""

import os
import sys
import time
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from trainer import runtime
from trainer.errors import UserError

STOPPED = 143  # as a shell says of a process that SIGTERM ended: the job was stopped and saved


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as e:
    sys.stderr.write(f'error: {e}\n')
    sys.exit(2)


def entry(main: Callable[[], int | None]) -> None:
  """Runs `main()` and ends the process with the status that it returns, None being 0.

  A user's mistake ends in one line, told by one rank, and status 2; any other failure in 1.
  """

  def guarded(argv: Sequence[str]) -> None:
    try:
      if len(argv) > 1:
        raise UserError(f"unknown argument '{argv[1]}'; wanted flags only, see --help")
      status = main()
    except UserError as e:
      if runtime.rank() > 0:
        # Rank 0 has most likely made the same mistake. Once it has said so and ended, the launcher
        # ends this process.
        time.sleep(5)
      sys.stderr.write(f'error: {e}\n')
      status = 2
    except Exception:
      logging.exception('this process failed')
      status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: Horovod's shutdown must neither delay nor change the status.
    os._exit(status or 0)

  app.run(guarded, flags_parser=_parse)
