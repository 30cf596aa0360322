"""Compiles the op library for the installed TensorFlow: `python -m ops.build`."""

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


class NotBuilt(ImportError):
  """The op library is missing or out of date; the message says in one line what to do."""


def library_path() -> str:
  """Returns the path of the op library; the file name contains TensorFlow's version."""
  import tensorflow as tf  # imported here because setup.py runs without TensorFlow until it builds

  return str(ROOT / 'ops' / f'_ctr_ops-tf{tf.__version__}.so')


def digest() -> str | None:
  """Returns the SHA-256 of the sources in ops/cc; None in an installed package without sources."""
  sources = ROOT / 'ops' / 'cc'
  sha = hashlib.sha256()
  for path in sorted(p for p in sources.rglob('*') if p.suffix in ('.cc', '.h', '.txt')):
    sha.update(str(path.relative_to(ROOT)).encode() + b'\0' + path.read_bytes())
  return sha.hexdigest() if sources.exists() else None


def build(library: str | None = None) -> str:
  """Builds the op library with CMake, changed files only; returns its path or raises SystemExit."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  import tensorflow as tf

  library = library or library_path()
  # TensorFlow's headers would trigger our warnings; the compiler is silent about system headers.
  flags = [f.replace('-I', '-isystem', 1) for f in tf.sysconfig.get_compile_flags()]
  folder = ROOT / 'build' / f'ops-tf{tf.__version__}'
  folder.mkdir(parents=True, exist_ok=True)
  configure = {
    'TENSORFLOW_COMPILE_FLAGS': ';'.join(flags),
    'TENSORFLOW_LINK_FLAGS': ';'.join(tf.sysconfig.get_link_flags()),
    'CTR_SOURCES': digest(),
  }
  with open(folder / 'lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time
    options = [f'-D{name}={value}' for name, value in configure.items()]
    for arguments in (
      ['-S', ROOT / 'ops' / 'cc', '-B', folder, *options],
      ['--build', folder, '--parallel', str(os.cpu_count())],
    ):
      if status := subprocess.run(['cmake', *arguments], stdout=sys.stderr).returncode:
        sys.exit(status)
    shutil.copy(folder / 'ctr_ops.so', library + '.new')
  os.replace(library + '.new', library)
  return library


if __name__ == '__main__':
  print(build())
