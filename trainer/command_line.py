"""What every command shares: flags, exit statuses, and one line for a user's mistake."""

import contextlib
import functools
import inspect
import io
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from ops.build import NotBuilt
from trainer import runtime
from trainer.errors import UserError, one_line

STOPPED = 143  # as a shell says of a process that SIGTERM ended: the job was stopped and saved


_LONGEST = 2000  # characters of an error's line
_WIDTH = 80  # of --help


def _help(main: Callable[..., int | None]) -> str:
  """Returns what a command does and what its own flags mean; --helpfull has the libraries' too."""
  module = sys.argv[0] if main.__module__ == '__main__' else main.__module__
  lines = [inspect.getdoc(inspect.getmodule(main)), '']
  for flag in flags.FLAGS.get_key_flags_for_module(module):
    value = '' if flag.boolean else f' {flag.name.upper()}'
    # Where several values are allowed, absl says so with a line break and spaces of its own.
    text = f'  --{flag.name}{value}: {flag.help.split(";" + chr(10))[0]}'
    text += f' Default: {flag.default}.' if flag.default else ''
    lines.append(textwrap.fill(text, _WIDTH, subsequent_indent=' ' * 6))
  return '\n'.join(lines)


def status(done: bool, troubles: Sequence[str]) -> int:
  """Returns the exit status of a training job, and says what its reports lack.

  Args:
    done: whether all was trained; False where the job was stopped and saved.
    troubles: what could not be written beside the training's own result.
  """
  for trouble in troubles:
    sys.stderr.write(f'error: the state is saved and whole, but the reports are not: {trouble}\n')
  return STOPPED if not done else 1 if troubles else 0


def _parse(argv: Sequence[str], main: Callable[..., int | None]) -> list[str]:
  if {'-h', '-help', '--help'} & set(argv[1:]):
    print(_help(main))
    sys.exit(0)
  try:
    rest = flags.FLAGS(argv)
    module = sys.argv[0] if main.__module__ == '__main__' else main.__module__
    for flag in flags.FLAGS.get_key_flags_for_module(module):
      if flag.present and flag.value in ('', ['']):  # as an unset variable of a shell gives it
        raise flags.Error(f'--{flag.name} is empty; wanted a value, or no such flag')
    return rest
  except flags.Error as e:
    missing = re.search(r'Flag (--\w+) must have a value other than None', str(e))
    text = f'{missing[1]} is missing; it is required, see --help' if missing else str(e)
    sys.stderr.write(f'error: {text}\n')
    sys.exit(2)


def entry(main: Callable[..., int | None]) -> None:
  """Runs `main` and ends the process with the status that it returns, None being 0.

  A user's mistake ends in one line, told by one rank, and status 2; any other failure in 1.

  Args:
    main: the command. Where it has a parameter, it is given the list of the arguments that are no
      flags; else there may be none.
  """
  for stream in (sys.stdout, sys.stderr):
    if isinstance(stream, io.TextIOWrapper):  # whose encoding may lack a letter of a name
      stream.reconfigure(errors='backslashreplace')
  takes_arguments = bool(inspect.signature(main).parameters)

  def guarded(argv: Sequence[str]) -> None:
    try:
      if len(argv) > 1 and not takes_arguments:
        raise UserError(f"unknown argument '{argv[1]}'; wanted flags only, see --help")
      status = main(argv[1:]) if takes_arguments else main()
    except (UserError, NotBuilt) as e:
      if runtime.rank() > 0:
        # Rank 0 has most likely made the same mistake. Once it has said so and ended, the launcher
        # ends this process.
        time.sleep(5)
      sys.stderr.write(f'error: {" ".join(str(e).split())[:_LONGEST]}\n')
      status = 2
    except Exception as e:
      if isinstance(e, MemoryError) or type(e).__name__ == 'ResourceExhaustedError':
        # TensorFlow's error is known by its name: not every command imports TensorFlow.
        sys.stderr.write(
          f'error: out of memory: {one_line(e)[:_LONGEST]}; wanted smaller layers, '
          'tables or batches, or more memory\n'
        )
        status = 2
      else:
        logging.exception('this process failed')
        status = 1
    with contextlib.suppress(OSError):  # who read it is gone, or its disk is full
      sys.stdout.flush()
      sys.stderr.flush()
    # Not sys.exit: Horovod's shutdown must neither delay nor change the status.
    os._exit(status or 0)

  app.run(guarded, flags_parser=functools.partial(_parse, main=main))


def command(main: Callable[..., int | None]) -> Callable[[], None]:
  """Makes `main` a command: the function of a console script (pyproject.toml)."""
  return functools.update_wrapper(functools.partial(entry, main), main)
