"""Compiles the op library, and asks for the TensorFlow that it is compiled for."""

import importlib.metadata
import os
import pathlib
import sys

import setuptools
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from ops import build


class BuildOps(build_ext):
  """Compiles the op library with TensorFlow's flags in place of an extension module's."""

  def get_ext_filename(self, fullname: str) -> str:
    # Its name has no Python ABI, but TensorFlow's version: TensorFlow loads it, Python does not.
    *packages, _ = fullname.split('.')
    return os.path.join(*packages, os.path.basename(build.library_path()))

  def build_extension(self, ext: setuptools.Extension) -> None:
    library = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve()
    library.parent.mkdir(parents=True, exist_ok=True)
    build.build(library=str(library))


def requirements() -> list[str]:
  """Returns what the package needs beside the TensorFlow at hand.

  Horovod is not among it: pip would build it in an environment without TensorFlow. `make setup` and
  the Dockerfile build it.
  """
  tensorflow = importlib.metadata.version('tensorflow')
  minor = tensorflow.rpartition('.')[0]
  with_tfra = [
    'pyarrow<22',  # later ones want numpy 2, without declaring it
    'setuptools<81',  # TFRA imports pkg_resources
    'tensorflow-recommenders-addons==0.8.1',
  ]
  return [
    *('absl-py', 'Jinja2', 'numpy', 'pandas', 'plotly', 'prometheus_client', 'protobuf>=4.25'),
    *('psutil', 'pydantic>=2', 'PyYAML', 'rich', 'tensorboard', f'tensorflow=={tensorflow}'),
    f'tf_keras~={minor}.0',
    *(with_tfra if minor == '2.16' else ['pyarrow']),
  ]


setuptools.setup(
  install_requires=requirements(),
  ext_modules=[setuptools.Extension('ops._ctr_ops', sources=[])],
  cmdclass={'build_ext': BuildOps},
)
