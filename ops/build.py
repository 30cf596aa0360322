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
  """The op library is missing, or is not the one that is wanted; the message is one line."""


def library_path() -> str:
  """Returns the path of the op library, which has the version of TensorFlow in its name."""
  import tensorflow as tf  # here: setup.py imports this file where TensorFlow may be missing

  return str(ROOT / 'ops' / f'_ctr_ops-tf{tf.__version__}.so')


def digest() -> str | None:
  """Returns the SHA-256 of the sources in ops/cc, or None where an installed package has none."""
  sources = ROOT / 'ops' / 'cc'
  sha = hashlib.sha256()
  for path in sorted(p for p in sources.rglob('*') if p.suffix in ('.cc', '.h', '.txt')):
    sha.update(str(path.relative_to(ROOT)).encode() + b'\0' + path.read_bytes())
  return sha.hexdigest() if sources.exists() else None


def build(library: str | None = None) -> str:
  """Builds the op library with CMake; it compiles only what has changed.

  Args:
    library: the path to write; None for `library_path()`.
  Returns:
    The path.
  Raises:
    SystemExit: where the compiler fails; its output was printed.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  import tensorflow as tf

  library = library or library_path()
  # TensorFlow's headers do not pass our warnings; those of system headers are not shown.
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
    commands = (
      [
        'cmake',
        '-S',
        ROOT / 'ops' / 'cc',
        '-B',
        folder,
        *(f'-D{k}={v}' for k, v in configure.items()),
      ],
      ['cmake', '--build', folder, '--parallel', str(os.cpu_count())],
    )
    for command in commands:
      if status := subprocess.run(command, stdout=sys.stderr).returncode:
        sys.exit(status)
    shutil.copy(folder / 'ctr_ops.so', library + '.new')
  os.replace(library + '.new', library)
  return library


if __name__ == '__main__':
  print(build())
