"""The op library is the one of the sources beside it, or is refused."""

import pathlib
import subprocess
import sys
from unittest import mock

import tensorflow as tf

from ops import build, library


class LibraryTest(tf.test.TestCase):
  def test_sources_are_told_apart(self):
    root = pathlib.Path(self.get_temp_dir())
    sources = root / 'ops' / 'cc' / 'data'
    with mock.patch.object(build, 'ROOT', root):
      self.assertIsNone(build.digest())
      sources.mkdir(parents=True)
      digests = []
      for name, text in (('a.h', ''), ('a.h', ''), ('a.h', '// more'), ('b.cc', '')):
        (sources / name).write_text(text)
        digests.append(build.digest())
    self.assertEqual(digests[0], digests[1])
    self.assertLen(set(digests), 3)

  def test_refuses_one_of_other_sources(self):
    library.load()
    with mock.patch.object(build, 'digest', return_value='others'):
      with self.assertRaisesRegex(
        build.NotBuilt, 'was built from other sources; run `python -m ops.build`'
      ):
        library.load.__wrapped__()

  def test_a_package_for_another_tensorflow_says_so(self):
    path = f'{self.get_temp_dir()}/_ctr_ops-tf0.so'
    with mock.patch.object(build, 'digest', return_value=None):
      with mock.patch.object(library, 'PATH', path):
        with self.assertRaisesRegex(build.NotBuilt, 'built for another TensorFlow than [0-9.]+,'):
          library.load.__wrapped__(path)

  def test_a_command_says_so_in_one_line(self):
    code = (
      'from ops import build; build.digest = lambda: "others"; from trainer import command_line\n'
      'def main():\n  from ops import library\n  library.load()\n'
      'command_line.entry(main)'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    self.assertEqual(done.returncode, 2, done.stderr)
    # The newest TensorFlow has words of its own before it: of CUDA, and of oneDNN where it is on.
    own = 'absl', 'cuda', 'oneDNN'
    said = [line for line in done.stderr.splitlines() if not any(word in line for word in own)]
    self.assertLen(said, 1, done.stderr)
    self.assertRegex(said[0], r'^error: .*: was built from other sources; .*$')


if __name__ == '__main__':
  tf.test.main()
