"""Errors that end a process with one line, and the helpers that write such lines."""

import contextlib
import difflib
import errno
import os
import re
import traceback
from collections.abc import Collection, Iterable, Iterator

_WANTED = dict.fromkeys([errno.ENOSPC, errno.EDQUOT], '; wanted free space') | dict.fromkeys(
  [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST],
  '; wanted a directory that can be written',
)
_EXHAUSTED = tuple(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)))
_NEAR = 0.55  # a name counts as a misspelling of another from this difflib ratio on
_UNPRINTABLE = re.compile('[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')
_LISTED = 200  # the most characters of a list of valid names
# Our words for layers and their arguments -> the names in other systems.
_WORDS = {
  "'cross' beside 'dnn'": 'dcn dcnv2 dcn_v2 crossnet',
  '[linear, fm, dnn]': 'deepfm deep_fm',
  '[linear, dnn]': 'wide_deep wide_and_deep widedeep',
  '[linear, ffm, dnn]': 'deepffm ffnn',
  "'dnn'": 'mlp deep',
  "'linear'": 'lr wide logistic',
  "'linear', which has one": 'bias',
  "'hidden'": 'hidden_units layer_sizes units',
  "'dropout'": 'dropout_rate',
}
_ELSEWHERE = {word: ours for ours, words in _WORDS.items() for word in words.split()}
# Beginnings of lines in TensorFlow's messages that say where in the graph an op failed.
_GRAPH_TRACE = ('Graph execution error', 'Detected at', 'Node:', 'File ', 'From /', '[')
_NODE = re.compile(r'\{\{[a-z]+_node [^}]*\}\} ')  # how TensorFlow names the op
# Beginnings of messages in which Keras and AutoGraph wrap the error of a layer.
_WRAPPED = ('Exception encountered when calling', 'in user code:')


# What may not stand in an address, behind its ://. A password, as in s3://KEY:SECRET@bucket, but no
# port; and what signs an address or lets in, as in https://host/log.csv?X-Amz-Signature=….
_IN_ADDRESS = re.compile(
  r'^(?:[^/:@,]*:\d+,)*[^/:@,]*:(?!\d+(?:[/,?]|$))\S*@'
  r'|(?<=[?&])[^=&/]*(?:sig|secret|token|passw|pwd|credential|key)[^=&/]*=[^&\'"]+',
  re.IGNORECASE,
)
# Names of settings whose values are secret: those that librdkafka calls sensitive, but for the name
# of a user and of a file, and others that sound so.
SECRET = re.compile(
  r'passw|passphrase|secret|\.pem\b|ssl_key|jaas|oauthbearer\.config|topic\.config|brokers=.*@',
  re.IGNORECASE,
)


class UserError(Exception):
  """A user's mistake. The process prints its text, one line, and ends with status 2."""


class ConfigError(UserError):
  """A mistake in the configuration."""


class DataLoss(UserError):
  """Stored data cannot be trusted: a file is missing, cut short, changed, or of another run."""


class OtherModel(UserError):
  """A run holds another model than that of the config, or checkpoints of another version."""


class BadPass(UserError):
  """A pass cannot be trained on: it is empty or damaged, or holds too many bad records."""


class Exhausted(UserError):
  """The machine has no descriptor or memory left: nobody's mistake, and the status is 3."""


class Stopped(UserError):
  """The process was asked to stop while it waited for another machine."""


def is_exhausted(error: BaseException | None) -> bool:
  """Returns whether an error is or comes from one of a machine without descriptors or memory."""
  while error and not isinstance(error, Exhausted):
    if any(text in str(error) for text in _EXHAUSTED):
      return True
    error = error.__cause__ or error.__context__
  return error is not None


def printable(text: str) -> str:
  """Returns a text in one printable line, with \\n, \\x1b and \\xff spelt out; `fit_to_print`."""

  def spelt(match: re.Match) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python represents a byte that is not UTF-8
      return f'\\x{code - 0xDC00:02x}'
    return match[0].encode('unicode_escape').decode()

  return _UNPRINTABLE.sub(spelt, fit_to_print(text))


def fit_to_print(text: str) -> str:
  """Returns a text in which no address has a password, or what signs it."""
  return re.sub(r'(?<=://)\S+', lambda match: _IN_ADDRESS.sub(_hidden, match[0]), text)


def _hidden(secret: re.Match) -> str:
  return '…@' if secret[0].endswith('@') else f'{secret[0].partition("=")[0]}=…'


def refuse_secrets(text: str, where: str) -> None:
  """Raises UserError if a text, from `where`, has an address with a secret: it would be kept."""
  fit = fit_to_print(text)
  for word, shown in zip(text.split(), fit.split()):
    if word != shown:
      raise UserError(
        f'{where}: found a secret in {short(shown)}; wanted the address without it: credentials '
        'come from the environment (docs/data.md), from --password_file, or from @FILE of a '
        "setting of Kafka's client"
      )


def one_line(error: BaseException) -> str:
  """Returns an exception's type and the line of its message that says what is wrong.

  Lines of TensorFlow's messages that only name a place in the graph are skipped. An error that
  Keras or AutoGraph wrapped is described in their place; without a message, its file and line.
  """
  while error.__context__ and str(error).lstrip('"\'').startswith(_WRAPPED):
    error = error.__context__
  lines = [' '.join(line.split()) for line in str(error).splitlines() if line.strip()]
  telling = [line for line in lines if not line.startswith(_GRAPH_TRACE)]
  frames = traceback.extract_tb(error.__traceback__)
  nothing = f'at {frames[-1].filename}:{frames[-1].lineno}' if frames else ''
  return f'{type(error).__name__}: {_NODE.sub("", (telling or lines or [nothing])[0])}'


def closest(name: object, valid: Iterable[object], near: float = _NEAR) -> str | None:
  """Returns the valid name that `name` is a misspelling of, in any case, or None.

  `near` is the least difflib ratio of the two; of more names, more are near by chance.
  """
  names = {str(one).lower(): str(one) for one in valid}
  cutoff = near if len(names) > 1 else 0
  close = difflib.get_close_matches(str(name).lower(), sorted(names), n=1, cutoff=cutoff)
  return names[close[0]] if close else None


def nearest(name: object, valid: Collection[object]) -> str:
  """Returns the end of a message about a wrong name: "; the nearest valid name is 'x'".

  If none is similar, all are listed, without those that are no text, as a damaged file has. Other
  systems' names for our layers and their arguments are recognised.
  """
  valid = [one for one in map(str, valid) if printable(one) == one and '\ufffd' not in one]
  if (here := _ELSEWHERE.get(str(name).lower())) and name not in valid:
    return f'; here that is {here}'
  if close := closest(name, valid):
    return f"; the nearest valid name is '{close}'"
  listed = ', '.join(sorted(valid))
  if len(listed) > _LISTED:
    listed = listed[:_LISTED].rpartition(',')[0] + ', …'
  return f'; the valid names are {listed}' if listed else ''


def short(value: object) -> str:
  """Returns a value as messages show it: its repr, up to 120 characters, but null as in YAML."""
  if value is None or isinstance(value, bool):
    return {None: 'null', True: 'true', False: 'false'}[value]
  # Python refuses to print more than 4,300 digits.
  if isinstance(value, int) and value.bit_length() > 400:
    return f'a number of {value.bit_length()} bits'
  text = repr(value)
  return text if len(text) <= 120 else text[:119] + '…'


@contextlib.contextmanager
def renamed(pattern: str, name: str) -> Iterator[None]:
  """Writes `name` for what matches a regular expression in UserErrors that the block raises."""
  try:
    yield
  except UserError as e:
    raise type(e)(re.sub(pattern, lambda _: name, str(e))) from e.__cause__


@contextlib.contextmanager
def plain_errors(what: str) -> Iterator[None]:
  """Turns the block's OSError, such as a full disk, into a UserError that begins with `what`."""
  try:
    yield
  except OSError as e:
    where = f'{e.filename}: ' if e.filename else ''
    wanted = _WANTED.get(e.errno, '')
    if wanted and what.startswith('cannot read'):
      wanted = '; wanted a file or a directory that can be read'
    kind = Exhausted if is_exhausted(e) else UserError
    raise kind(f'{what}: {where}{e.strerror or e}{wanted}') from e
