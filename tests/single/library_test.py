"""The op library is the one of the sources beside it, or is refused."""

import os
import subprocess
import sys
from unittest import mock

import tensorflow as tf

from ops import build, library


class LibraryTest(tf.test.TestCase):
  def test_sources_are_told_apart(self):
    root = self.get_temp_dir()
    os.makedirs(f'{root}/ops/cc/data')

    def write(name, text):
      with open(f'{root}/ops/cc/data/{name}', 'w', encoding='utf-8') as f:
        f.write(text)

    with mock.patch.object(build, 'ROOT', root):
      self.assertIsNone(build.digest())
      write('a.h', '')
      write('a.cc', f'#include "{"/".join(("ops", "cc", "data", "a.h"))}"')
      found = [build.digest(), build.digest()]
      write('a.h', '// more')
      found.append(build.digest())
      write('b.cc', '')
      found.append(build.digest())
    self.assertEqual(found[0], found[1])
    self.assertLen(set(found), 3)

  def test_refuses_one_of_other_sources(self):
    library.load()
    with mock.patch.object(build, 'digest', return_value='others'):
      with self.assertRaisesRegex(
        build.NotBuilt, 'was built from other sources; run `python -m ops.build`'
      ):
        library.load.__wrapped__()

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
