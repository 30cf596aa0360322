"""Errors that end a process with one line, and the helpers that write such lines."""

import contextlib
import difflib
import errno
import re
import traceback
from collections.abc import Iterable, Iterator

_WANTED = dict.fromkeys([errno.ENOSPC, errno.EDQUOT], '; wanted free space') | dict.fromkeys(
  [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST],
  '; wanted a directory that can be written',
)
_NEAR = 0.4  # how alike (difflib's ratio) two names are of which one may be the other, misspelt
_UNPRINTABLE = re.compile('[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')
_LISTED = 200  # characters of a list of valid names
# What others call it.
_ELSEWHERE = {
  **dict.fromkeys(['dcn', 'dcnv2', 'dcn_v2', 'crossnet'], "'cross' beside 'dnn'"),
  **dict.fromkeys(['deepfm', 'deep_fm'], '[linear, fm, dnn]'),
  **dict.fromkeys(['wide_deep', 'wide_and_deep', 'widedeep'], '[linear, dnn]'),
  **dict.fromkeys(['deepffm', 'ffnn'], '[linear, ffm, dnn]'),
  **dict.fromkeys(['mlp', 'deep'], "'dnn'"),
  **dict.fromkeys(['lr', 'wide', 'logistic'], "'linear'"),
  'bias': "'linear', which has one",
  'early_stopping': 'train.plateau',
  **dict.fromkeys(
    ['vocab_size', 'vocabulary_size', 'num_embeddings', 'hash_bucket_size', 'num_buckets'],
    'none, because tables grow with their features',
  ),
  **dict.fromkeys(
    ['embedding_dim', 'embedding_size', 'embed_dim', 'output_dim'], 'sparse.tables.NAME.width'
  ),
  **dict.fromkeys(['hidden_units', 'layer_sizes', 'units'], "'hidden'"),
  'optimizer': 'train.dense_optimizer and sparse.tables.NAME.factors',
  'dropout_rate': "'dropout'",
}
# Lines of a TensorFlow message that say where in the graph it failed, not what failed.
_GRAPH_TRACE = ('Graph execution error', 'Detected at', 'Node:', 'File ', 'From /', '[')
_NODE = re.compile(r'\{\{[a-z]+_node [^}]*\}\} ')  # how TensorFlow names the op
# How Keras and AutoGraph begin the message of an error that they raise in place of a layer's own.
_WRAPPED = ('Exception encountered when calling', 'in user code:')


class UserError(Exception):
  """A user's mistake: the text is one line, and the process ends with status 2."""


class ConfigError(UserError):
  """A mistake in the configuration."""


class DataLoss(UserError):
  """Stored data cannot be trusted: a file is missing, cut short, changed or foreign."""


class BadPass(UserError):
  """A pass cannot be trained on: it is empty, damaged or holds too many bad records."""


def printable(text: str) -> str:
  """Returns a text that prints in one line: the name of a file may hold line ends, control
  characters and bytes that are not UTF-8, which are spelt out as \\n, \\x1b and \\xff.
  """

  def spelt(match: re.Match) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python represents a byte that is not UTF-8
      return f'\\x{code - 0xDC00:02x}'
    return match[0].encode('unicode_escape').decode()

  return _UNPRINTABLE.sub(spelt, text)


def one_line(error: BaseException) -> str:
  """Returns the exception's type and the telling line of its message.

  TensorFlow's messages begin with where in the graph they were raised; that part is left out. Of an
  error that Keras or AutoGraph has wrapped, what was raised first is told; of one without a
  message, where it was raised.
  """
  while error.__context__ and str(error).lstrip('"\'').startswith(_WRAPPED):
    error = error.__context__
  lines = [' '.join(line.split()) for line in str(error).splitlines() if line.strip()]
  telling = [line for line in lines if not line.startswith(_GRAPH_TRACE)]
  frames = traceback.extract_tb(error.__traceback__)
  nothing = f'at {frames[-1].filename}:{frames[-1].lineno}' if frames else ''
  return f'{type(error).__name__}: {_NODE.sub("", (telling or lines or [nothing])[0])}'


def nearest(name: object, valid: Iterable[object]) -> str:
  """Returns "; the nearest valid name is 'x'", or '' where there are no valid names.

  Where none is near, all are listed. Upper and lower case do not matter. Words of other systems are
  translated.
  """
  if (here := _ELSEWHERE.get(str(name).lower())) and name not in valid:
    return f'; here that is {here}'
  names = {str(one).lower(): str(one) for one in valid}
  cutoff = _NEAR if len(names) > 1 else 0
  close = difflib.get_close_matches(str(name).lower(), sorted(names), n=1, cutoff=cutoff)
  if close:
    return f"; the nearest valid name is '{names[close[0]]}'"
  listed = ', '.join(sorted(names.values()))
  if len(listed) > _LISTED:
    listed = listed[:_LISTED].rpartition(',')[0] + ', …'
  return f'; the valid names are {listed}' if listed else ''


def short(value: object, length: int = 120) -> str:
  """A value as messages show it: its repr, cut where it is long."""
  if isinstance(value, int) and value.bit_length() > 400:  # Python shows none of 4,300 digits
    return f'a number of {value.bit_length()} bits'
  text = repr(value)
  return text if len(text) <= length else text[: length - 1] + '…'


@contextlib.contextmanager
def plain_errors(what: str) -> Iterator[None]:
  """Turns an error of the operating system (full disk, read-only directory) into a UserError.

  Args:
    what: how the message starts.
  Raises:
    UserError: in place of an OSError.
  """
  try:
    yield
  except OSError as e:
    where = f'{e.filename}: ' if e.filename else ''
    wanted = _WANTED.get(e.errno, '')
    if wanted and what.startswith('cannot read'):
      wanted = '; wanted a file or a directory that can be read'
    raise UserError(f'{what}: {where}{e.strerror or e}{wanted}') from e
