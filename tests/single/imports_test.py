"""What may import what. A new import that breaks the order fails here."""

import ast
import pathlib
import re
import subprocess
import sys

import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The core. Data flows from top to bottom: a place imports only from itself and from those below it;
# docs/architecture.md shows this table.
ORDER = (
  'run',
  'api',
  'job',
  'evaluation',
  'training',
  'reporting',
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
  'wings',
  'errors',
)
# Wings stand on the core, and on the wings below them.
WINGS = 'tools', 'parameter_server', 'retrieval', 'topics', 'serving'
# A house is the core or a wing. This is the house of each command that is not the core's; nothing
# imports a command.
COMMANDS = {'publish': 'serving', 'serve': 'serving'} | dict.fromkeys(
  ('doctor', 'evaluate', 'inspect', 'reference', 'report', 'resolve', 'split', 'tune'), 'tools'
)
# Lines of Python of each house, `ops` being the core's.
BUDGETS = {
  'core': 27_930,
  'serving': 3_791,
  'tools': 5_369,
  'parameter_server': 2_269,
  'retrieval': 1_797,
  'topics': 823,
}


def house(name: str) -> str:
  """The house of a module, such as trainer.cli.serve."""
  place, _, rest = name.removeprefix('trainer.').partition('.')
  if place == 'cli':
    return COMMANDS.get(rest.split('.')[0], 'core')
  return place if place in WINGS else 'core'


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
    self.assertEqual(places - {'__init__', '__pycache__', 'cli'}, {*ORDER, *WINGS})

  def test_the_architecture_shows_the_same_order(self):
    page = (ROOT / 'docs' / 'architecture.md').read_text(encoding='utf-8')
    table = page.split('| place in `trainer/` |')[1].split('\n\n')[0]
    shown = re.findall(r'^\| `(\w+)(?:/|\.py)` \|', table, re.MULTILINE)
    self.assertEqual(tuple(shown), (*WINGS, *ORDER))

  def test_a_mistake_in_a_config_is_told_before_tensorflow_is_imported(self):
    code = 'import sys, trainer.api, trainer.run; assert "tensorflow" not in sys.modules'
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)

  def test_imports_go_down(self):
    order = *WINGS, *ORDER
    for path, names in files('trainer').items():
      module = path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')
      place = (*module.split('.'), '')[1]
      for name in names:
        package, _, rest = name.partition('.')
        if package != 'trainer' or not rest:
          continue
        imported = rest.split('.')[0]
        self.assertNotEqual(imported, 'cli', f'{path} imports {name}, a command')
        if imported in WINGS and (house(module), place) != (imported, imported):
          is_up = place in order and order.index(place) > order.index(imported)
          self.assertFalse(house(module) == 'core' or is_up, f'{path} imports {name}')
        elif place in ORDER and imported in ORDER:
          self.assertLessEqual(order.index(place), order.index(imported), f'{path} imports {name}')

  def test_no_module_imports_itself_by_way_of_others(self):
    """Also in functions, and for type hints."""
    modules = {
      p.removesuffix('.py').removesuffix('/__init__').replace('/', '.'): names
      for p, names in files('trainer').items()
    }
    del modules['trainer']  # counted by `from trainer import …` of every file
    graph = {module: (names & modules.keys()) - {module} for module, names in modules.items()}
    while ends := {m for m in graph if not graph[m] & graph.keys()}:
      graph = {m: graph[m] for m in graph.keys() - ends}
    while begins := graph.keys() - set().union(*graph.values()):
      graph = {m: graph[m] for m in graph.keys() - begins}
    self.assertEmpty(set(graph))

  def test_few_places_ask_whether_a_model_finds_items(self):
    """They ask the task (trainer.evaluation.task), or the config what follows from it."""
    asks = []
    for path in (ROOT / 'trainer').rglob('*.py'):
      if path.parts[len(ROOT.parts) + 1] in ('config', 'retrieval'):
        continue
      for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.comprehension)):
          tests = node.ifs if isinstance(node, ast.comprehension) else [node.test]
          within = [n for test in tests for n in ast.walk(test)]
          if any(isinstance(n, ast.Attribute) and n.attr == 'retrieval' for n in within):
            asks.append(path.name)
    self.assertLen(asks, 2, asks)

  def test_few_functions_take_the_whole_config(self):
    """The others take the sections or the values that they need."""
    takers = []
    for path in (ROOT / 'trainer').rglob('*.py'):
      for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.FunctionDef) and path.parent.name != 'config':
          given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
          kinds = [ast.unparse(one.annotation) for one in given if one.annotation]
          takers += [node.name for kind in kinds if re.search(r'\bConfig\b', kind)]
    self.assertLessEqual(len(takers), 90, takers)

  def test_each_house_keeps_its_budget(self):
    lines = dict.fromkeys(BUDGETS, 0)
    for path in (*(ROOT / 'trainer').rglob('*.py'), *(ROOT / 'ops').rglob('*.py')):
      module = str(path.relative_to(ROOT)).removesuffix('.py').replace('/', '.')
      lines[house(module)] += len(path.read_text(encoding='utf-8').splitlines())
    for name, budget in BUDGETS.items():
      self.assertLessEqual(lines[name], budget, name)

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
    code = 'import sys, trainer.run, trainer.tools.report; sys.exit("tensorflow" in sys.modules)'
    subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)

  def test_only_runtime_reads_the_environment(self):
    for path in files('trainer'):
      if path != 'trainer/runtime.py':
        text = (ROOT / path).read_text(encoding='utf-8')
        self.assertNotIn('os.environ', text, path)
        self.assertNotIn('getenv', text, path)


if __name__ == '__main__':
  tf.test.main()
