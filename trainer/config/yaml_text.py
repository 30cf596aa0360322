"""Reads YAML into plain values, and applies the assignments of --set."""

import re

import yaml

from trainer.errors import SECRET, ConfigError, short
from trainer.plain_data import Json, JsonObject


class _Loader(yaml.SafeLoader):
  """Loads plain values. It refuses duplicate keys, and reads dates as strings."""

  yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(':timestamp')]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
  }

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> JsonObject:
    keys = [k for k, _ in node.value if isinstance(k, yaml.ScalarNode) and k.value != '<<']
    names = [k.value for k in keys]
    for i, key in enumerate(keys):
      if key.value in names[:i]:
        problem = f'the key {short(key.value)} is there twice'
        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
    return super().construct_mapping(node, deep)


MAX_DEPTH, MAX_NODES = 40, 1_000_000


_QUOTES = (
  'a text that holds [ ] { } , : # or %, or begins with | > & * ! @ or `, wants quotes, and keys '
  'of one section the same indentation'
)


def read_yaml(text: str, where: str, hint: str = _QUOTES) -> Json:
  """Parses YAML text to nested dicts, lists and scalars; ConfigError, in one line, if it is none.

  `where` is the file or flag that it comes from; `hint` says what most likely helps.
  """
  try:
    tree = yaml.load(text, _Loader)
  except yaml.YAMLError as e:
    mark = getattr(e, 'problem_mark', None)
    at = f':{mark.line + 1}' if mark else ''
    problem = ' '.join(str(getattr(e, 'problem', None) or e).split())
    is_syntax = isinstance(e, yaml.scanner.ScannerError | yaml.parser.ParserError)
    raise ConfigError(f'{where}{at}: not YAML: {problem}{f"; {hint}" * is_syntax}') from None
  except RecursionError:
    raise ConfigError(f'{where}: values are nested too deep; wanted a config') from None
  except (ValueError, TypeError, LookupError, AttributeError) as e:  # such as !!int ""
    raise ConfigError(f'{where}: not YAML: {" ".join(str(e).split())[:200]}') from None
  level, nodes = [tree], 0
  for _ in range(MAX_DEPTH):  # anchors can make a huge or endless tree of a short text
    level = [v for n in level for v in _children(n)]
    nodes += len(level)
    if not level or nodes > MAX_NODES:
      break
  if level:
    raise ConfigError(f'{where}: found over {MAX_DEPTH} levels, or over {MAX_NODES:,} values')
  return tree


def _children(node: Json) -> list[Json]:
  """Returns the values of a list or a mapping; [] for a scalar."""
  if isinstance(node, dict):
    return list(node.values())
  return node if isinstance(node, list) else []


def _place(node: Json, part: str, where: str) -> int | str:
  """Returns the index in a list, or the key in a mapping, for one part of a path like `a.b.0.c`."""
  if isinstance(node, list):
    if not re.fullmatch('[0-9]{1,9}', part) or int(part) >= len(node):
      raise ConfigError(f'{where} is not there; the list has {len(node)} entries')
    return int(part)
  if not isinstance(node, dict):
    raise ConfigError(f'{where} is not there; it is below the value {node!r}, which holds no keys')
  return 'args' if node.get('kind') == part else part  # --set may use an interaction's short form


def shown(assignment: str) -> str:
  """Returns an argument of --set as messages show it: of what may be a secret, the key alone."""
  return f'--set {assignment.partition("=")[0] if SECRET.search(assignment) else assignment[:80]}'


def set_key(tree: JsonObject, assignment: str) -> None:
  """Applies an assignment `a.b.0.c=value`, whose value is YAML, to `tree`."""
  key, equals, text = assignment.partition('=')
  if not equals or not key:
    raise ConfigError(f'{shown(assignment)}: wanted KEY=VALUE, as in --set train.batch_size=1024')
  hint = """a text with such a sign wants quotes of its own, as in --set 'data.delimiter="|"'"""
  value = read_yaml(text, shown(assignment), hint)
  if not value and (first := text.strip()[:1]) and first in '|>#!':
    raise ConfigError(f'{shown(assignment)}: found no text after {first}; {hint}')
  parts, node = key.split('.'), tree
  for i, part in enumerate(parts):
    place = _place(node, part, f"{shown(assignment)}: '{'.'.join(parts[: i + 1])}'")
    if i == len(parts) - 1:
      node[place] = value
    elif isinstance(node, dict) and node.get(place) is None:
      node[place] = {}
    node = node[place]


def flatten(tree: Json, prefix: str = '') -> JsonObject:
  """Returns nested dicts and lists as one dict, with keys such as 'data.slots.0.name'."""
  if not isinstance(tree, (dict, list, tuple)) or not tree:
    return {prefix[:-1]: tree}
  items = tree.items() if isinstance(tree, dict) else enumerate(tree)
  return {k: v for name, sub in items for k, v in flatten(sub, f'{prefix}{name}.').items()}
