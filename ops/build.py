"""Compiles the op library: `python -m ops.build`.

Flags come from `tf.sysconfig`; only what changed is compiled again. `--only GLOB … --out FILE`
compiles a part, for a test of its own.
"""

import argparse
import concurrent.futures
import fcntl
import glob
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SOURCES = (
  'ops/cc/data/*.cc',
  'ops/cc/dense/*.cc',
  'ops/cc/lifecycle/*.cc',
  'ops/cc/comm/*.cc',
  'ops/cc/rows/*.cc',
  'ops/cc/kernels/*.cc',
  'ops/cc/ops/*.cc',
)
TENSORFLOW_HEADERS = """
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/util/work_sharder.h"
"""


class NotBuilt(ImportError):
  """There is no op library, or not the one that is wanted; the message is one line."""


def _headers(source: str, seen: set[str]) -> set[str]:
  """Adds the headers of ours that `source` includes, directly or not, to `seen`; returns it."""
  with open(source, encoding='utf-8') as f:
    for name in re.findall(r'#include "(ops/[^"]+)"', f.read()):
      path = os.path.join(ROOT, name)
      if path not in seen and os.path.exists(path):
        seen.add(path)
        _headers(path, seen)
  return seen


def library_path() -> str:
  """Returns where the op library lies: each TensorFlow has its own, side by side in one tree."""
  import tensorflow as tf  # here: setup.py imports this file where TensorFlow may be missing

  return os.path.join(ROOT, 'ops', f'_ctr_ops-tf{tf.__version__}.so')


def digest(patterns: Sequence[str] = SOURCES) -> str | None:
  """Returns what tells the sources from others; None where they lie not beside the library, as in
  an installed package.
  """
  paths = sorted(s for p in patterns for s in glob.glob(os.path.join(ROOT, p)))
  headers: set[str] = set()
  for path in paths:
    _headers(path, headers)
  found = hashlib.sha256()
  for path in [*paths, *sorted(headers)]:
    with open(path, 'rb') as f:
      found.update(os.path.relpath(path, ROOT).encode() + b'\0' + f.read())
  return found.hexdigest() if paths else None


def build(patterns: Sequence[str] = SOURCES, library: str | None = None) -> str:
  """Builds a library from sources.

  Args:
    patterns: of the sources, from the project's root.
    library: the path to write; None for the installed TensorFlow's own.
  Returns:
    The path.
  Raises:
    SystemExit: with the compiler's output.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  import tensorflow as tf

  library = library or library_path()
  # TensorFlow's own headers do not pass our warnings: they are system headers to the compiler.
  compile_flags = [
    f.replace('-I', '-isystem', 1) if f.startswith('-I') else f
    for f in tf.sysconfig.get_compile_flags()
  ]
  compile_flags += ['-O3', '-g1', '-fPIC', '-Wall', '-Wextra', '-Werror', '-I' + ROOT]
  compiler = os.environ.get('CXX', 'g++')
  objects = os.path.join(ROOT, 'build', 'objs')
  os.makedirs(objects, exist_ok=True)
  sources = sorted(s for p in patterns for s in glob.glob(os.path.join(ROOT, p)))

  def precompile() -> list[str]:
    """Compiles TensorFlow's headers, which take six of a kernel's seven seconds, once for all.

    Returns:
      The flags that use them.
    """
    key = hashlib.sha256(
      ' '.join([compiler, tf.__version__, *compile_flags, TENSORFLOW_HEADERS]).encode()
    ).hexdigest()[:16]
    header = os.path.join(objects, f'tensorflow-{key}.h')
    if not os.path.exists(header + '.gch'):
      with open(header, 'w', encoding='utf-8') as f:
        f.write(TENSORFLOW_HEADERS)
      subprocess.run(
        [compiler, *compile_flags, '-x', 'c++-header', header, '-o', header + '.new'], check=True
      )
      os.replace(header + '.new', header + '.gch')
    return ['-include', header]

  def compile_one(source: str) -> tuple[str | None, str | None]:
    """Returns the object file, or the compiler's output where it failed."""
    digest = hashlib.sha256(' '.join([compiler, tf.__version__, *compile_flags]).encode())
    for path in [source, *sorted(_headers(source, set()))]:
      with open(path, 'rb') as f:
        digest.update(f.read())
    target = os.path.join(
      objects, f'{os.path.relpath(source, ROOT).replace("/", "_")}.{digest.hexdigest()[:16]}.o'
    )
    if not os.path.exists(target):
      temporary = f'{target}.{os.getpid()}'
      uses_tensorflow = os.path.basename(os.path.dirname(source)) in ('kernels', 'ops')
      flags = [*compile_flags, *(with_tensorflow if uses_tensorflow else [])]
      command = [compiler, *flags, '-c', source, '-o', temporary]
      done = subprocess.run(command, capture_output=True, text=True)
      if done.returncode:
        return None, done.stderr
      os.replace(temporary, target)
    return target, None

  # One build at a time: the next finds this one's objects.
  with (
    open(os.path.join(objects, 'lock'), 'w') as lock,
    concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
  ):
    fcntl.flock(lock, fcntl.LOCK_EX)
    built_from = digest(patterns)
    with_tensorflow = precompile()
    results = list(pool.map(compile_one, sources))
  errors = [error for _, error in results if error]
  if errors:
    sys.exit('\n'.join(errors))
  temporary = f'{library}.{os.getpid()}'
  objects = [path for path, _ in results]
  # `ops.library` compares it with the sources: an old library may take the same arguments and give
  # other results.
  constant = f'extern "C" {{ extern const char ctr_sources[] = "{built_from}"; }}'
  link = [compiler, '-shared', '-fPIC', '-o', temporary, *objects, *tf.sysconfig.get_link_flags()]
  subprocess.run([*link, '-x', 'c++', '-'], check=True, input=constant, text=True)
  os.replace(temporary, library)
  return library


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--only', nargs='*', default=SOURCES)
  parser.add_argument('--out')
  options = parser.parse_args()
  print(build(options.only, options.out))
