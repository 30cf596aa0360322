"""Reads, checks and writes configs."""

import os
import zlib
from collections.abc import Sequence
from typing import Any

import pydantic
import yaml

from trainer import files
from trainer.config.checks import check
from trainer.config.messages import one_line
from trainer.config.schema import Config
from trainer.config.yaml_text import read_yaml, set_key
from trainer.errors import ConfigError, printable


def _kept(tree: Any, old: Any) -> Any:
  """Returns `tree` with what it leaves out as `old` has it, but where `kind` is another."""
  if not isinstance(tree, dict) or not isinstance(old, dict):
    return tree
  if 'kind' in tree and tree['kind'] != old.get('kind'):
    return tree
  return old | {key: _kept(value, old.get(key)) for key, value in tree.items()}


def _with_defaults_of_run(tree: dict[str, Any]) -> dict[str, Any]:
  """Returns `tree` with the defaults that its run_dir was begun with, where it says nothing.

  Defaults may change from release to release; a run goes on with those that it has.
  """
  path = os.path.join(str(tree.get('run_dir') or ''), 'config.yaml')
  if not tree.get('run_dir') or not os.path.isfile(path):
    return tree
  old = read_yaml(_text_of_run(path), path)
  old_sparse, old_train = (
    dict(old[key]) if isinstance(old, dict) and isinstance(old.get(key), dict) else {}
    for key in ('sparse', 'train')
  )
  sparse = tree.get('sparse', {})
  if not isinstance(sparse, dict):
    return tree
  tables = sparse.get('tables')
  if isinstance(tables, dict) and isinstance(old_sparse.get('tables'), dict):
    old_sparse['tables'] = {n: t for n, t in old_sparse['tables'].items() if n in tables}
  train = {key: old_train[key] for key in ('epochs', 'plateau', 'batch_size') if key in old_train}
  return tree | {'sparse': _kept(sparse, old_sparse), 'train': _kept(tree.get('train', {}), train)}


def load(path: str, overrides: Sequence[str] = (), run_dir: str | None = None) -> Config:
  """Reads, overrides and checks a config.

  Args:
    path: a YAML file.
    overrides: strings `a.b=value`.
    run_dir: replaces `run_dir` where given. Where neither is, it is runs/NAME of a file NAME.yaml.
  Returns:
    A frozen `Config`.
  Raises:
    ConfigError: with one line.
  """
  name = os.path.splitext(os.path.basename(path))[0]
  return parse(_text_of(path), path, overrides, run_dir, f'runs/{name}')


def _text_of(path: str) -> str:
  try:
    with open(path, encoding='utf-8') as f:
      return f.read()
  except FileNotFoundError:
    raise ConfigError(f'--config {path}: no such file') from None
  except IsADirectoryError:
    raise ConfigError(f'--config {path}: found a directory; wanted a YAML file') from None
  except UnicodeDecodeError as e:
    raise ConfigError(f'{path}: not YAML: {e}') from None


_STAMP = '# crc32 of what follows: '


def write_of_run(cfg: Config) -> None:
  """Writes config.yaml of the config's run_dir: a first line with a checksum, then `dump`."""
  path, text = os.path.join(cfg.run_dir, 'config.yaml'), dump(cfg)
  stamp = f'{_STAMP}{zlib.crc32(text.encode()):08x}\n'
  files.write_synced(path + '.new', (stamp + text).encode())
  os.replace(path + '.new', path)


def load_of_run(run_dir: str, overrides: Sequence[str] = ()) -> Config:
  """As `load`, of the config.yaml that a run has written.

  Raises:
    ConfigError: also where its bytes are not those that were written.
  """
  path = os.path.join(run_dir, 'config.yaml')
  return parse(_text_of_run(path), path, overrides, run_dir)


def _text_of_run(path: str) -> str:
  text = _text_of(path)
  stamp, _, rest = text.partition('\n')
  if stamp != f'{_STAMP}{zlib.crc32(rest.encode()):08x}':
    raise ConfigError(
      f'{path}: its first line is not the checksum of the rest; wanted the file as the run wrote '
      'it, as checkpoints/*/config.yaml has it, and changes in another file or by --set'
    )
  return text


def parse(
  text: str,
  where: str,
  overrides: Sequence[str] = (),
  run_dir: str | None = None,
  default_run_dir: str | None = None,
) -> Config:
  """As `load`, of YAML text; `where` says in messages where it comes from."""
  tree = read_yaml(text, where)
  if not isinstance(tree, dict):
    raise ConfigError(
      f'{where}: found {type(tree).__name__}; wanted a mapping with keys data, model, …'
    )
  for assignment in overrides:
    set_key(tree, assignment)
  if run_dir or default_run_dir:
    tree['run_dir'] = run_dir or tree.get('run_dir') or default_run_dir
  for key, value in flatten(tree).items():
    try:
      f'{key}{value}'.encode()
    except UnicodeEncodeError:  # from a command line, or from "\ud800" in YAML
      found = printable(f'{key}: found {value!r}')
      raise ConfigError(
        f'{where}: {found}, which UTF-8 cannot write; wanted another text'
      ) from None
  try:
    cfg = Config.model_validate(_with_defaults_of_run(tree))
  except pydantic.ValidationError as e:
    raise ConfigError(one_line(e, where)) from None
  check(cfg, where)
  return cfg


def flatten(tree: Any, prefix: str = '') -> dict[str, Any]:
  """Returns nested dicts and lists as one dict, by key as in 'data.slots.0.name'."""
  if not isinstance(tree, (dict, list, tuple)) or not tree:
    return {prefix[:-1]: tree}
  items = tree.items() if isinstance(tree, dict) else enumerate(tree)
  return {k: v for name, sub in items for k, v in flatten(sub, f'{prefix}{name}.').items()}


def dump(cfg: Config) -> str:
  """The resolved config as YAML text; `load` reads it back to an equal config."""
  dumper = getattr(yaml, 'CSafeDumper', yaml.SafeDumper)  # the C library's is 10 times faster
  return yaml.dump(cfg.model_dump(), Dumper=dumper, sort_keys=False, allow_unicode=True)


def columns_wanted(cfg: Config, path: str) -> str:
  """Returns what the data of a config must look like, for who does not have it, in one line."""
  data = cfg.data
  slots = [s.column or s.name for s in data.slots]
  dense = [d.name for d in data.dense]
  names = list(dict.fromkeys([*(label.name for label in cfg.labels), *slots, *dense]))
  shown = ', '.join(names[:12]) + (f' and {len(names) - 12} more' if len(names) > 12 else '')
  return (
    f'wanted files with the columns {shown}; the first lines of {path} may say where they come from'
  )
