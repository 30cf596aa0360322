"""Reads, checks and writes configs."""

import contextlib
import functools
import glob
import io
import os
import zlib
from collections.abc import Mapping, Sequence

import pydantic
import yaml
from absl import logging

from trainer import files
from trainer.config.messages import GONE, one_line
from trainer.config.model import interaction
from trainer.config.resolve import resolve
from trainer.config.rules import check
from trainer.config.schema import Config
from trainer.config.yaml_text import flatten, read_yaml, set_key
from trainer.errors import ConfigError, DataLoss, OtherModel, printable, refuse_secrets, short
from trainer.plain_data import Json, JsonObject


def load(path: str, overrides: Sequence[str] = (), run_dir: str | None = None) -> Config:
  """Reads and checks a YAML file, as `parse`; for NAME.yaml the default run_dir is runs/NAME."""
  name = os.path.splitext(os.path.basename(path))[0]
  text = _text_of(path)
  refuse_secrets(text, path)
  return parse(text, path, overrides, run_dir, f'runs/{name}')


def _text_of(path: str) -> str:
  try:
    return io.TextIOWrapper(io.BytesIO(files.read_small(path)), 'utf-8').read()
  except FileNotFoundError:
    raise ConfigError(f'{path}: no such file; wanted a YAML file') from None
  except IsADirectoryError:
    raise ConfigError(f'{path}: found a directory; wanted a YAML file') from None
  except OSError as e:
    raise ConfigError(f'{path}: {e.strerror}; wanted a YAML file') from None
  except UnicodeDecodeError as e:
    raise ConfigError(f'{path}: not YAML: {e}') from None


GIVEN = 'given.yaml'  # the file in a run_dir that holds the config as it was given
# Keys that a run measures, beside those that columns leave open, data.dense_bins and data.crosses.
MEASURED = 'model.recipe', 'train.batch_size', 'sparse.features_per_sample', 'sparse.shared_lists'
CHECKPOINT_FORMAT = 8  # of a run's checkpoints (trainer.storage.checkpoint)
_STAMP = '# crc32 of what follows: '
_warn_once = functools.cache(logging.warning)


def write_of_run(cfg: Config) -> None:
  """Writes config.yaml, with all keys, and given.yaml, with the user's, into the run_dir."""
  for name, text in (('config.yaml', dump(cfg)), (GIVEN, _stamped(cfg.given))):
    path = os.path.join(cfg.run_dir, name)
    files.write_synced(path + '.new', text.encode())
    os.replace(path + '.new', path)


def measured_of_run(cfg: Config, run_dir: str) -> dict[str, Json]:
  """Returns {key: value} that an earlier run in `run_dir` measured for keys that `cfg` leaves open.

  Without a checkpoint it returns {}: the run may have ended before it could measure. The processes
  of a parameter-server job start one after another, so there config.yaml counts at once.
  """
  check_format(run_dir)
  path = os.path.join(run_dir, GIVEN)
  saved = glob.iglob(os.path.join(glob.escape(run_dir), 'checkpoints', '*', files.DONE))
  if not os.path.exists(path) or cfg.sync.mode == 'allreduce' and not any(saved):
    return {}
  remedy = 'delete it: the next start writes it again, and measures the batch size again'
  given = read_yaml(_text_of_run(path, remedy), path)
  run = read_yaml(*_stored(run_dir))
  values: dict[str, Json] = {}
  # A plain run has raced both; one of streams may have taken them from the run that it began with.
  recipe, raced = run['model'].get('recipe'), ('dense_bins', 'crosses')
  kept = [n for n in raced if recipe == 'plain' or (recipe == 'stream' and run['data'].get(n))]
  for key in (*MEASURED, *(f'data.{name}' for name in kept)):
    section, name = key.split('.')
    if cfg.origin(key) != 'given' and name not in given.get(section, {}):
      values[key] = run[section].get(name)
  columns = [*run['data']['slots'], *run['data']['dense']]
  made = {column['name']: column['from'] for column in columns if column.get('from')}
  for key, column in resolve(cfg, values).data.left_open().items():  # also of the bins it added
    stored, own, field = made.get(column.name), column.made.model_dump(), column.made.left_open
    if stored and own | stored | {field: None} == own:
      values[key] = stored[field]
  return values


def load_of_run(run_dir: str, overrides: Sequence[str] = ()) -> Config:
  """Reads the config.yaml of a run; ConfigError if it is missing, or was changed afterwards."""
  text, path = _stored(run_dir)
  try:
    return parse(text, path, overrides, run_dir)
  except ConfigError:
    check_format(run_dir)  # which may be why
    raise


def _stored(run_dir: str) -> tuple[str, str]:
  """Returns the text of a run's config.yaml, and its path."""
  path = os.path.join(run_dir, 'config.yaml')
  if not os.path.exists(path):
    raise ConfigError(f'{run_dir}: no config.yaml there; wanted the run_dir of a training run')
  return _text_of_run(path, 'each of checkpoints/ has a copy'), path


def _text_of_run(path: str, remedy: str) -> str:
  """Returns the text of a run's file if its checksum is right; `remedy` says how to repair it."""
  text = _text_of(path)
  if not _is_of_run(text):
    raise ConfigError(
      f'{path}: its first line is not the checksum of the rest; wanted the file as the run wrote '
      f'it ({remedy}), and changes in another file or by --set'
    )
  return text


def _is_of_run(text: str) -> bool:
  """Returns whether a run has written this text, and nobody has changed it since."""
  stamp, _, rest = text.partition('\n')
  return stamp == f'{_STAMP}{zlib.crc32(rest.encode()):08x}'


def check_format(run_dir: str) -> None:
  """Raises OtherModel if this version cannot read the newest checkpoint of a run."""
  found = {}
  for path in glob.iglob(os.path.join(glob.escape(run_dir), 'checkpoints', 'ckpt-*[0-9]')):
    with contextlib.suppress(DataLoss):  # restoring it will report the damage
      found[path] = files.read_manifest(path)
  if found:
    refuse_format(*max(found.items(), key=lambda item: item[1].get('serial', 0)))


def refuse_format(path: str, manifest: Mapping[str, Json]) -> None:
  """Raises OtherModel if a checkpoint's manifest says another format than this version reads."""
  if manifest['format'] != CHECKPOINT_FORMAT:
    raise OtherModel(
      f'{path}: is of format {manifest["format"]}; wanted {CHECKPOINT_FORMAT}: let its version '
      'train and serve on, and begin another run_dir with this one (docs/upgrading.md)'
    )


def parse(
  text: str,
  where: str,
  overrides: Sequence[str] = (),
  run_dir: str | None = None,
  default_run_dir: str | None = None,
) -> Config:
  """Reads and checks a config, a YAML text; ConfigError, in one line, if it is not valid.

  Args:
    where: the file that the text comes from, for messages.
    overrides: strings `a.b=value`.
    run_dir: replaces the `run_dir` of the text, unless it is None.
    default_run_dir: the run_dir if neither the text nor `run_dir` gives one.
  """
  tree = read_yaml(text, where)
  if not isinstance(tree, dict):
    raise ConfigError(f'{where}: found {short(tree)}; wanted keys: data, model, …')
  if _is_of_run(text):
    for key in GONE:
      *path, name = key.split('.')
      section = functools.reduce(lambda within, part: within.get(part) or {}, path, tree)
      if section.pop(name, None) is not None:
        _warn_once('%s: drops %s; here that is %s', where, key, GONE[key])
  for assignment in overrides:
    _expand_interactions(tree)
    set_key(tree, assignment)
  if run_dir:
    tree['run_dir'] = run_dir
  if is_named := bool(default_run_dir and not tree.get('run_dir')):
    tree.pop('run_dir', None)
  for key, value in flatten(tree).items():
    try:
      (key + value if isinstance(value, str) else key).encode()
    except UnicodeEncodeError:  # from the command line, or "\ud800" in YAML
      found = printable(f'{key}: found {value!r}')
      raise ConfigError(f'{where}: {found}, which UTF-8 cannot write') from None
  try:
    cfg = Config.model_validate(tree)
  except pydantic.ValidationError as e:
    raise ConfigError(one_line(e, where, overrides)) from None
  except ConfigError as e:
    raise ConfigError(f'{where}: {e}') from None
  if is_named:
    cfg = cfg.model_copy(update={'run_dir': default_run_dir})
    cfg._origins = cfg._origins | {'run_dir': 'from the name of the file'}
  check(cfg, where, overrides)
  return cfg


def _expand_interactions(tree: JsonObject) -> None:
  """Expands short forms of interactions in `tree` to {kind: …, args: …}, which --set can change."""
  model = tree.get('model')
  if not isinstance(model, dict):
    return
  for key in {'shared', 'dense_embedding'} & model.keys():
    model[key] = interaction(model[key])
  tasks = model.get('tasks')
  for section in (model, *(tasks.values() if isinstance(tasks, dict) else ())):
    if isinstance(section, dict) and isinstance(section.get('interactions'), list):
      section['interactions'] = [interaction(item) for item in section['interactions']]


def dump(cfg: Config) -> str:
  """Returns the whole config, with defaults, as YAML text that begins with a checksum."""
  tree = cfg.model_dump()
  if cfg.data.day_pattern is None and cfg.data.has_days:
    del tree['data']['day_pattern']  # 0.2.0, whose servers may read this, refuses null here
  return _stamped(tree)


def _stamped(tree: Json) -> str:
  dumper = getattr(yaml, 'CSafeDumper', yaml.SafeDumper)  # the C library's is 10 times faster
  text = yaml.dump(tree, Dumper=dumper, sort_keys=False, allow_unicode=True)
  return f'{_STAMP}{zlib.crc32(text.encode()):08x}\n{text}'


def columns_wanted(cfg: Config, path: str | None) -> str:
  """Returns a text for the user that lists the columns that the log must have.

  `path` is the config's file, to be named as one that tells the log's source, or None.
  """
  names = list(dict.fromkeys([*(label.name for label in cfg.labels), *cfg.data.log_columns()]))
  shown = ', '.join(names[:12]) + (f' and {len(names) - 12} more' if len(names) > 12 else '')
  told = f'; the first lines of {path} may tell their source' if path else ''
  return f'wanted files with the columns {shown}{told}'
