"""What may import what. A new import that breaks the order fails here."""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import tensorflow as tf

from trainer import wings

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
  'core': 27_946,
  'serving': 3_849,
  'tools': 5_373,
  'parameter_server': 2_269,
  'retrieval': 1_782,
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


@functools.cache
def outside_config() -> dict[str, ast.AST]:
  """The files of trainer/ except those of trainer/config."""
  paths = [p for p in (ROOT / 'trainer').rglob('*.py') if p.parent.name != 'config']
  return {str(p.relative_to(ROOT)): ast.parse(p.read_text(encoding='utf-8')) for p in paths}


# Under which a whole config is handed on: `old` and `before` are those of another run.
NAMES = 'cfg', 'self.cfg', 'self._cfg', 'old', 'before'


def takers(tree: ast.AST) -> list[tuple[str, str]]:
  """The functions below a node that take a whole config, as pairs of a name and the parameter's.

  A class that takes one is there by its own name.
  """
  found = []
  for node in ast.walk(tree):
    for part in ast.iter_child_nodes(node):
      if isinstance(part, ast.FunctionDef):
        name = node.name if part.name == '__init__' else part.name
        for one in (*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs):
          kind = ast.unparse(one.annotation) if one.annotation else ''
          found += [(name, one.arg)] * len(re.findall(r'(?<!uvicorn\.)\bConfig\b', kind))
  return found


def handed_to(tree: ast.AST) -> set[str]:
  """The names of what may get a whole config below a node, and the files of wings that do."""
  found = set()
  for node in ast.walk(tree):
    given = (*node.args, *(k.value for k in node.keywords)) if isinstance(node, ast.Call) else ()
    if any(ast.unparse(one) in NAMES for one in given):
      for part in ast.walk(node):
        if isinstance(part, ast.Constant) and part.value in wings._PLACES:
          module = wings._PLACES[part.value].partition(':')[0]
          found.add(f'{module.replace(".", "/")}.py')
        elif isinstance(part, (ast.Name, ast.Attribute)):
          found.add(part.id if isinstance(part, ast.Name) else part.attr)
  return found


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
    found = [pair for tree in outside_config().values() for pair in takers(tree)]
    self.assertLessEqual(len(found), 90, found)

  def test_the_config_is_given_not_fetched(self):
    """Only what it is a part of has it for others: a run, a checkpoint, the source of a job."""
    for path, tree in outside_config().items():
      for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ('cfg', '_cfg'):
          owner = node.value.value if isinstance(node.value, ast.Subscript) else node.value
          of = ast.unparse(owner)
          self.assertIn(of, ('self', 'run', 'runs', 'first', 'reader', 'source'), path)

  def test_the_config_of_a_job_passes_few_rooms(self):
    """From Job on, by the names of what takes it; a room is a place in trainer/."""
    trees = outside_config()
    places = {path: [path] for path in trees}
    for path, tree in trees.items():
      for name, parameter in takers(tree):
        places.setdefault(name, []).append(path)
        self.assertIn(parameter, NAMES, path)
    found, new = set(), {'trainer/job/job.py'}
    while new:
      found |= new
      new = {p for path in new for name in handed_to(trees[path]) for p in places.get(name, ())}
      new -= found
    rooms = {path.split('/')[1] for path in found}
    self.assertLessEqual(len(rooms), 9, rooms)
    self.assertLessEqual(len(found), 36, found)

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
