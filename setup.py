"""Makes `pip install .` compile the op library; pyproject.toml has everything else."""

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


setuptools.setup(
  ext_modules=[setuptools.Extension('ops._ctr_ops', sources=[])], cmdclass={'build_ext': BuildOps}
)
