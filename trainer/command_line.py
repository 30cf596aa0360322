"""What all commands share: --help, exit statuses, and a user's mistake reported in one line."""

import datetime
import functools
import inspect
import io
import json
import logging as standard_logging
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence

from absl import app, flags, logging

from ops.build import NotBuilt
from trainer import runtime
from trainer.errors import (
  UserError,
  fit_to_print,
  is_exhausted,
  one_line,
  printable,
  refuse_secrets,
)

SIGNALLED = 128  # a command that a signal ended has the status 128 + the number of the signal
_EXHAUSTED = 3  # as of a job that lost a rank: the same command continues

# What to use in place of flags that people expect to find.
_FLAGS_OF_OTHERS = {
  'describe': 'ctr-prepare --config FILE --out DIR --describe, or --dry_run of ctr-train',
  'resume': 'the same command again, which continues',
}
_LONGEST = 2000  # the most characters of a line about an error
_LOG_WIDTH = 100  # of a log line, in characters
_WIDTH = 80  # of the text of --help, in characters
_TIME = '%Y-%m-%d %H:%M:%S'


class LogLines(standard_logging.Formatter):
  """Formats log messages: time and level first, wrapped at `width`; as JSON with --log_json."""

  def __init__(self, width: int = _LOG_WIDTH):
    self._width = width
    super().__init__('%(asctime)s %(levelname)s: %(message)s', _TIME)

  def format(self, record: standard_logging.LogRecord) -> str:
    if Output.as_json:
      trace = {'trace': self.formatException(record.exc_info)} if record.exc_info else {}
      return _json_line(
        'message', record.levelname.lower(), text=fit_to_print(record.getMessage()), **trace
      )
    # The lines of a stack trace stay as they are.
    text, *trace = fit_to_print(super().format(record)).split('\n')
    return '\n'.join([wrapped(text, self._width), *trace])


def _json_line(event: str, level: str = 'info', **fields: object) -> str:
  now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='milliseconds')
  return json.dumps({'time': now, 'level': level, 'event': event, 'fields': fields})


def timed(text: str) -> str:
  """Returns a line that tells of an event of a long run, with the time in front as in the log."""
  return text if Output.as_json else f'{time.strftime(_TIME)} {text}'


def say(text: str, event: str = 'message', **fields: object) -> None:
  """Prints a line with the time or, with --log_json, an event with the text and these fields."""
  print(_json_line(event, text=text, **fields) if Output.as_json else timed(text), flush=True)


def say_event(event: str, **fields: object) -> None:
  """Prints an event with --log_json alone, without the lists and objects in it."""
  if Output.as_json:
    flat = {k: v for k, v in fields.items() if not isinstance(v, (list, dict))}
    print(_json_line(event, **flat), flush=True)


def wrapped(text: str, width: int = _LOG_WIDTH) -> str:
  """Breaks a text into lines of at most `width` characters, but does not break words or paths."""
  keep_words = {'break_long_words': False, 'break_on_hyphens': False}
  return textwrap.fill(text, width, subsequent_indent='  ', **keep_words)


class Output(io.TextIOWrapper):
  """A standard stream that ends the command if it cannot be written.

  If the reader is gone, as with `| head`, the command ends quietly, with the status of SIGPIPE. Any
  other failure, such as a full disk, ends it with one line and status 2. Unless `is_needed` it goes
  on: training and serving without standard output, every command without standard error.
  """

  is_needed = True
  as_json = False  # whether each line that is no JSON object yet becomes one; of all streams
  replaced: io.TextIOWrapper | None = None
  _is_lost = False
  _begun = threading.local()  # lines that a thread has begun, by stream, with `as_json`

  def write(self, text: str) -> int:
    if not Output.as_json:
      return self._write(text)
    begun = vars(self._begun)
    *lines, begun[self] = re.split('[\r\n]', begun.get(self, '') + text)
    for line in filter(None, map(str.rstrip, lines)):
      level = re.match('error|warning|', line)[0] or 'info'
      self._write(
        (line if line[:9] == '{"time": ' else _json_line('message', level, text=line)) + '\n'
      )
    return len(text)

  def _write(self, text: str) -> int:
    try:
      return super().write(text)
    except OSError as e:
      self._lose(e)
      return len(text)

  def flush(self) -> None:
    try:
      super().flush()
    except OSError as e:
      self._lose(e)

  def _lose(self, error: OSError) -> None:
    was_lost, self._is_lost = self._is_lost, True
    if was_lost or self is sys.stderr:
      return
    if self.is_needed and isinstance(error, BrokenPipeError):
      sys.exit(SIGNALLED + signal.SIGPIPE)
    what, then = ('error', '') if self.is_needed else ('warning', '; the work goes on')
    sys.stderr.write(f'{what}: cannot write to standard output: {error.strerror}{then}\n')
    if self.is_needed:
      sys.exit(2)


def need_no_output() -> None:
  """Lets this process go on if standard output is closed or fails."""
  if isinstance(sys.stdout, Output):
    sys.stdout.is_needed = False


def _open_standard_streams() -> None:
  """Replaces standard output and standard error by `Output`, even if they are closed."""
  while (opened := os.open(os.devnull, os.O_RDONLY)) <= 2:
    pass  # else the next opened file would get the number, and the output, of a closed stream
  os.close(opened)
  for number, name in enumerate(('stdout', 'stderr'), 1):
    stream = getattr(sys, name) or open(number, 'w', encoding='utf-8')
    if isinstance(stream, io.TextIOWrapper):
      # The encoding of the stream may lack a letter in the name of a file.
      of = stream.encoding, 'backslashreplace', None, stream.line_buffering, stream.write_through
      output = Output(stream.buffer, *of)
      # The old stream is kept, because log handlers may use it, and deleting it closes the buffer.
      output.replaced = stream
      stream = output
    setattr(sys, name, stream)


def _script(module: re.Match) -> str:
  """Returns the name of the command that `python -m trainer.NAME` runs."""
  return '`ctr-' + ('train' if module[1] == 'run' else module[1])


def _help(main: Callable[..., int | None]) -> str:
  """Returns the text of --help: the docstring of the command's module, and its flags."""
  module = sys.argv[0] if main.__module__ == '__main__' else main.__module__
  text = re.sub(r'`python -m trainer\.(\w+)', _script, inspect.getdoc(inspect.getmodule(main)))
  lines = [text, '']
  for flag in flags.FLAGS.get_key_flags_for_module(module):
    value = '' if flag.boolean else f' {flag.name.upper()}'
    # Where several values are allowed, absl says so with a line break and spaces of its own.
    text = f'  --{flag.name}{value}: {flag.help.split(";" + chr(10))[0]}'
    default = ','.join(flag.default) if isinstance(flag.default, list) else flag.default
    text += f' Default: {default}.' if default else ''
    lines.append(textwrap.fill(text, _WIDTH, subsequent_indent=' ' * 6))
  return '\n'.join(lines)


def status(stopped_by: int, troubles: Sequence[str]) -> int:
  """Returns a training job's exit status, after printing `troubles`, lines on failed reports.

  `stopped_by` is the number of the signal that stopped the job; 0 if it trained everything.
  """
  for trouble in troubles:
    sys.stderr.write(
      f'error: the state is saved and whole, but the reports are not: {printable(trouble)}\n'
    )
  return SIGNALLED + stopped_by if stopped_by else 1 if troubles else 0


def status_of_server(asked: Sequence[int]) -> int:
  """Returns the exit status of a server stopped by signals: 130 for SIGINT; SIGTERM is success."""
  return SIGNALLED + signal.SIGINT if signal.SIGINT in asked else 0


def _parse(argv: Sequence[str], main: Callable[..., int | None]) -> list[str]:
  if {'-h', '-help', '--help'} & set(argv[1:]):
    print(_help(main), flush=True)
    sys.exit(0)
  try:
    for argument in argv[1:]:
      if argument != argument.encode(errors='replace').decode():
        raise flags.Error(f'the argument {os.fsencode(argument)[:80]!r} is not UTF-8; wanted UTF-8')
      name = argument.partition('=')[0]
      refuse_secrets(argument, name if argument[:1] == '-' and name != argument else 'an argument')
    rest = flags.FLAGS(argv)
    module = sys.argv[0] if main.__module__ == '__main__' else main.__module__
    for flag in flags.FLAGS.get_key_flags_for_module(module):
      if flag.present and flag.value in ('', ['']):  # as an unset variable of a shell makes it
        raise flags.Error(f'--{flag.name} is empty; wanted a value, or no such flag')
      if isinstance(flag.value, str) and flag.value.startswith('~'):
        flag.value = os.path.expanduser(flag.value)  # shells leave --flag=~/path as it is
    return rest
  except (flags.Error, UserError) as e:
    missing = re.search(r'Flag (--\w+) must have a value other than None', str(e))
    text = f'{missing[1]} is missing; it is required, see --help' if missing else str(e)
    number = re.search(r'flag (--\w+)=(.*): (invalid literal for int|could not convert)', text)
    if number:
      wanted = 'a whole number' if 'int' in number[3] else 'a number'
      text = f'{number[1]}: found {number[2]!r}; wanted {wanted}'
    unknown = re.search(r"Unknown command line flag '(\w+)'", text)
    if unknown and (wanted := _in_place_of(unknown[1])):
      text = f'unknown flag --{unknown[1]}; wanted {wanted}'
    sys.stderr.write(f'error: {text}\n')
    sys.exit(2)


def _in_place_of(flag: str) -> str:
  """Returns what to type in place of an unknown flag; '' if no replacement is known."""
  if flag in _FLAGS_OF_OTHERS or 'set' not in flags.FLAGS:
    return _FLAGS_OF_OTHERS.get(flag, '')
  from trainer import config  # slow to import

  keys = config.settings_named(flag.replace('-', '_'))
  return f'--set KEY=VALUE, with the key {keys}' if keys else ''


def entry(main: Callable[..., int | None]) -> None:
  """Runs `main`, and ends the process with the status that it returns; None counts as 0.

  A user's mistake ends the process with status 2 and one line, printed by one rank. Any other
  failure ends it with status 1. After a signal the status is 128 + its number: 130 for Ctrl-C, 143
  for SIGTERM. `main`'s parameter, if it has one, receives the arguments that are not flags, which
  are else refused.
  """
  if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set while trainer/__init__.py imports
    signal.signal(signal.SIGINT, signal.default_int_handler)
  _open_standard_streams()
  logging.get_absl_handler().setFormatter(LogLines())
  takes_arguments = bool(inspect.signature(main).parameters)

  def guarded(argv: Sequence[str]) -> None:
    try:
      if len(argv) > 1 and not takes_arguments:
        raise UserError(f"unknown argument '{argv[1]}'; wanted flags only, see --help")
      if 'log_json' in flags.FLAGS and flags.FLAGS['log_json'].value:
        Output.as_json = True
      status = main(argv[1:]) if takes_arguments else main()
      sys.stdout.flush()
    except KeyboardInterrupt:
      status = SIGNALLED + signal.SIGINT
    except SystemExit as e:
      status = e.code
    except (UserError, NotBuilt) as e:
      if isinstance(e.__cause__, BrokenPipeError):  # --out may be a pipe whose reader is gone
        status = SIGNALLED + signal.SIGPIPE
      else:
        if runtime.rank() > 0:
          # Rank 0 has most likely found the same mistake. Once it has printed it and ended, the
          # launcher ends this process, so that the line appears once.
          time.sleep(5)
        sys.stderr.write(f'error: {printable(" ".join(str(e).split()))[:_LONGEST]}\n')
        status = _EXHAUSTED if is_exhausted(e) else 2
    except Exception as e:
      status = 2
      if str(e) == "can't start new thread" or 'failed to map segment' in str(e):
        what, wanted = 'out of memory or threads', 'higher limits (ulimit -v, ulimit -u)'
      elif is_exhausted(e):
        what, wanted = 'out of file descriptors or memory', 'a higher limit, as with ulimit -n 4096'
        status = _EXHAUSTED
      # TensorFlow's errors are recognised by name: not every command imports TensorFlow.
      elif isinstance(e, MemoryError) or type(e).__name__ == 'ResourceExhaustedError':
        what, wanted = 'out of memory', 'smaller layers, tables or batches, or more memory'
      else:
        logging.exception('this process failed')
        os._exit(1)
      sys.stderr.write(f'error: {what}: {printable(one_line(e))[:_LONGEST]}; wanted {wanted}\n')
    # Not sys.exit: Horovod's shutdown must neither delay nor change the status.
    os._exit(status or 0)

  app.run(guarded, flags_parser=functools.partial(_parse, main=main))


def end_by_sigterm() -> None:
  """Lets SIGTERM end this command as Ctrl-C does, so that it cleans up first."""
  signal.signal(signal.SIGTERM, lambda number, _: sys.exit(SIGNALLED + number))


def command(main: Callable[..., int | None]) -> Callable[[], None]:
  """Returns the function of a console script (pyproject.toml) that runs `main`."""
  return functools.update_wrapper(functools.partial(entry, main), main)
