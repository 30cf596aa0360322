"""examples/quickstart.ipynb runs from its first cell to its last."""

import json
import pathlib
import subprocess
import sys
import tempfile

import pytest
import tensorflow as tf

NOTEBOOK = pathlib.Path(__file__).resolve().parents[2] / 'examples' / 'quickstart.ipynb'


@pytest.mark.long
class QuickstartTest(tf.test.TestCase):
  def test_the_notebook_runs(self):
    cells = json.loads(NOTEBOOK.read_text(encoding='utf-8'))['cells']
    code = '\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'code')
    done = subprocess.run(
      [sys.executable, '-c', code],
      cwd=tempfile.mkdtemp(dir=self.get_temp_dir()),
      capture_output=True,
      text=True,
      timeout=300,
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn('best', done.stdout)
    self.assertIn('probability', done.stdout)
    self.assertNotIn('cuFFT', done.stderr)


if __name__ == '__main__':
  tf.test.main()
