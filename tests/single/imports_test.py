"""What may import what. A new import that breaks the order fails here."""

import ast
import pathlib
import re
import subprocess
import sys

import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Data flows from top to bottom. A place imports only from itself and from those below it;
# docs/architecture.md shows this table.
ORDER = (
  'tuning',
  'api',
  'source',
  'frames',
  'parameter_server',
  'job',
  'evaluation',
  'training',
  'reporting',
  'serving',
  'storage',
  'model',
  'embedding',
  'comm',
  'data',
  'command_line',
  'runtime',
  'config',
  'files',
  'plain_data',
  'errors',
)
# One command each, above all of these; nothing imports them.
COMMANDS = {
  'split',
  'tune',
  'run',
  'evaluate',
  'predict',
  'prepare',
  'synthesize',
  'export',
  'publish',
  'serve',
  'report',
  'inspect',
  'doctor',
  'reference',
  'resolve',
}


def imports_of(path: pathlib.Path) -> set[str]:
  """Names of the modules that a file imports anywhere; `from a import b` counts as a.b too."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      found |= {a.name for a in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found |= {node.module} | {f'{node.module}.{a.name}' for a in node.names}
  return found


def files(folder: str) -> dict[str, set[str]]:
  """The Python files below a folder of the project, each with what it imports."""
  paths = sorted((ROOT / folder).rglob('*.py'))
  assert paths, folder
  return {str(p.relative_to(ROOT)): imports_of(p) for p in paths}


class ImportsTest(tf.test.TestCase):
  def test_every_place_has_its_place_in_the_order(self):
    places = {p.name.removesuffix('.py') for p in (ROOT / 'trainer').iterdir()} - {'py.typed'}
    self.assertEqual(places - {'__init__', '__pycache__'}, set(ORDER) | COMMANDS)

  def test_the_architecture_shows_the_same_order(self):
    page = (ROOT / 'docs' / 'architecture.md').read_text(encoding='utf-8')
    table = page.split('| place in `trainer/` |')[1].split('\n\n')[0]
    shown = re.findall(r'^\| `(\w+)(?:/|\.py)` \|', table, re.MULTILINE)
    self.assertEqual(tuple(shown), ORDER)

  def test_a_mistake_in_a_config_is_told_before_tensorflow_is_imported(self):
    code = 'import sys, trainer.api, trainer.run; assert "tensorflow" not in sys.modules'
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)

  def test_imports_go_down(self):
    for path, names in files('trainer').items():
      place = path.split('/')[1].removesuffix('.py')
      for name in names:
        package, _, rest = name.partition('.')
        if package != 'trainer' or not rest:
          continue
        imported = rest.split('.')[0]
        self.assertNotIn(imported, COMMANDS, f'{path} imports {name}, a command')
        if place in ORDER:
          self.assertLessEqual(ORDER.index(place), ORDER.index(imported), f'{path} imports {name}')

  def test_ops_stand_alone(self):
    for path, names in files('ops').items():
      self.assertEmpty({n for n in names if n.split('.')[0] in ('trainer', 'horovod')}, path)

  def test_only_comm_and_runtime_import_horovod(self):
    for path, names in files('trainer').items():
      if any(n.split('.')[0] == 'horovod' for n in names):
        self.assertTrue(path == 'trainer/runtime.py' or path.startswith('trainer/comm/'), path)

  def test_the_config_needs_no_tensorflow(self):
    imported = files('trainer/config')
    imported |= {p: imports_of(ROOT / p) for p in ('trainer/errors.py', 'ops/policy.py')}
    for path, modules in imported.items():
      names = {n.split('.')[0] for n in modules}
      self.assertEmpty(names & {'tensorflow', 'tf_keras', 'keras'}, path)

  def test_commands_begin_without_tensorflow(self):
    """A mistake is told at once, and ranks hear of each other before its long import."""
    code = 'import sys, trainer.run; sys.exit("tensorflow" in sys.modules)'
    subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)

  def test_only_runtime_reads_the_environment(self):
    for path in files('trainer'):
      if path != 'trainer/runtime.py':
        text = (ROOT / path).read_text(encoding='utf-8')
        self.assertNotIn('os.environ', text, path)
        self.assertNotIn('getenv', text, path)


if __name__ == '__main__':
  tf.test.main()
