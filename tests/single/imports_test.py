"""The layering: what may import what. A new import that breaks it fails here."""
import ast
import glob
import os

import tensorflow as tf

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')


def imports_of(path):
  """Names of the modules that a file imports anywhere, `from a import b` counted as a.b too."""
  with open(path, encoding='utf-8') as f:
    tree = ast.parse(f.read())
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {a.name for a in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found |= {node.module} | {f'{node.module}.{a.name}' for a in node.names}
  return found


class ImportsTest(tf.test.TestCase):

  def files(self, pattern):
    paths = glob.glob(os.path.join(ROOT, pattern), recursive=True)
    self.assertNotEmpty(paths)
    return {os.path.relpath(p, ROOT): imports_of(p) for p in paths}

  def test_ops_stand_alone(self):
    for path, names in self.files('ops/**/*.py').items():
      for name in names:
        self.assertNotIn(name.split('.')[0], ('trainer', 'horovod'), path)

  def test_horovod_stays_in_its_rooms(self):
    for path, names in self.files('trainer/**/*.py').items():
      if any(n.split('.')[0] == 'horovod' for n in names):
        self.assertTrue(path == 'trainer/runtime.py' or path.startswith(('trainer/sparse/', 'trainer/sync/')), path)

  def test_config_needs_no_tensorflow(self):
    for path in ('trainer/config.py', 'ops/policy.py'):
      names = imports_of(os.path.join(ROOT, path))
      self.assertFalse({n for n in names if n.split('.')[0] in ('tensorflow', 'tf_keras', 'keras')}, path)

  def test_layers_know_neither_rows_nor_ranks(self):
    for path, names in self.files('trainer/layers/*.py').items():
      for name in names:
        self.assertFalse(name.startswith(('trainer.sparse', 'trainer.sync', 'trainer.lifecycle', 'trainer.train_step')), f'{path} imports {name}')

  def test_only_runtime_reads_the_environment(self):
    for path in glob.glob(os.path.join(ROOT, 'trainer', '**', '*.py'), recursive=True):
      if os.path.basename(path) != 'runtime.py':
        with open(path, encoding='utf-8') as f:
          text = f.read()
        self.assertNotIn('os.environ', text, path)
        self.assertNotIn('getenv', text, path)


if __name__ == '__main__':
  tf.test.main()
