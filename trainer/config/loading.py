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
from trainer.config.rules import check
from trainer.config.schema import Config
from trainer.config.train import BATCH_SIZE
from trainer.config.yaml_text import flatten, put, read_yaml, set_key
from trainer.errors import ConfigError, DataLoss, OtherModel, printable, refuse_secrets, short
from trainer.plain_data import Json, JsonObject


def load(
  path: str,
  overrides: Sequence[str] = (),
  run_dir: str | None = None,
  measured: Mapping[str, Json] = {},
) -> Config:
  """Reads and checks a YAML file, as `parse`; for NAME.yaml the default run_dir is runs/NAME."""
  name = os.path.splitext(os.path.basename(path))[0]
  text = _text_of(path)
  refuse_secrets(text, path)
  return parse(text, path, overrides, run_dir, measured, f'runs/{name}')


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
  """Writes config.yaml, with all keys, and given.yaml, with the user's, into the run_dir.

  The first line of either file is a checksum of the rest.
  """
  for name, text in (('config.yaml', dump(cfg)), (GIVEN, _stamped(cfg.given))):
    path = os.path.join(cfg.run_dir, name)
    files.write_synced(path + '.new', text.encode())
    os.replace(path + '.new', path)


def is_default(key: str, value: Json) -> bool:
  """Returns whether a run that measures or records this value of a key has found the usual one."""
  return value is None or (key, value) in (
    ('train.batch_size', BATCH_SIZE),
    ('sparse.shared_lists', 'mean'),
  )


def measured_of_run(cfg: Config, run_dir: str) -> dict[str, Json]:
  """Returns {key: value} that an earlier run in `run_dir` measured for keys that `cfg` leaves open.

  {} before its first checkpoint: it may have ended at a mistake in its config, before it could
  measure. (Processes of a parameter-server job start one after another, so there it holds at once.)
  """
  check_format(run_dir)
  path = os.path.join(run_dir, GIVEN)
  saved = glob.iglob(os.path.join(glob.escape(run_dir), 'checkpoints', '*', files.DONE))
  if not os.path.exists(path) or cfg.sync.mode == 'allreduce' and not any(saved):
    return {}
  remedy = 'delete it: the next start writes it again, and measures the batch size again'
  given = read_yaml(_text_of_run(path, remedy), path)
  run = load_of_run(run_dir)
  values: dict[str, Json] = {}
  raced = ['data.dense_bins', 'data.crosses'] if run.model.recipe == 'plain' else []
  for key in (*MEASURED, *raced):
    section, name = key.split('.')
    if name not in cfg.given.get(section, {}).keys() | given.get(section, {}).keys():
      values[key] = getattr(getattr(run, section), name)
  for key, column in cfg.data.left_open().items():
    made, field = run.data.made.get(column.name), column.made.left_open
    if made and made.model_copy(update={field: None}) == column.made:
      values[key] = getattr(made, field)
  return values


def load_of_run(run_dir: str, overrides: Sequence[str] = ()) -> Config:
  """Reads the config.yaml of a run; ConfigError if it is missing, or was changed afterwards."""
  path = os.path.join(run_dir, 'config.yaml')
  if not os.path.exists(path):
    raise ConfigError(f'{run_dir}: no config.yaml there; wanted the run_dir of a training run')
  text = _text_of_run(path, 'each of checkpoints/ has a copy')
  try:
    return parse(text, path, overrides, run_dir)
  except ConfigError:
    check_format(run_dir)  # which may be why
    raise


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
  measured: Mapping[str, Json] = {},
  default_run_dir: str | None = None,
) -> Config:
  """Reads and checks a config, a YAML text; ConfigError, in one line, if it is not valid.

  Args:
    where: the file that the text comes from, for messages.
    overrides: strings `a.b=value`.
    run_dir: replaces the `run_dir` of the text, unless it is None.
    measured: {key: measured value} for keys that neither the text nor `overrides` gives.
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
  origins = {}
  if default_run_dir and not tree.get('run_dir'):
    tree['run_dir'], origins['run_dir'] = default_run_dir, 'from the name of the file'
  for key, value in measured.items():
    origins[key] = 'default' if is_default(key, value) else 'measured'
  of_slots = {key: value for key, value in measured.items() if key.startswith('data.slots.')}
  for key in measured.keys() - of_slots.keys():
    put(tree, key, measured[key], key)
  if of_slots:  # also of slots that data.dense_bins adds, which `put` must find
    given = len(tree['data']['slots'])
    added = _validated(tree, where, overrides).data.slots[given:]
    tree['data']['slots'] += [s.model_dump(by_alias=True, exclude_unset=True) for s in added]
  for key, value in of_slots.items():
    put(tree, key, value, key)
  for key, value in flatten(tree).items():
    try:
      (key + value if isinstance(value, str) else key).encode()
    except UnicodeEncodeError:  # from the command line, or "\ud800" in YAML
      found = printable(f'{key}: found {value!r}')
      raise ConfigError(f'{where}: {found}, which UTF-8 cannot write') from None
  cfg = _validated(tree, where, overrides)
  for key in origins:
    *path, name = key.split('.')
    section = cfg.given
    for part in path:
      section = section[int(part) if isinstance(section, list) else part]
    del section[name]
  if of_slots:
    del cfg.given['data']['slots'][given:]
  cfg._origins.update(origins)
  check(cfg, where, overrides)
  return cfg


def _validated(tree: JsonObject, where: str, overrides: Sequence[str]) -> Config:
  """Returns the config that `tree` describes; its rules are not checked."""
  try:
    return Config.model_validate(tree)
  except pydantic.ValidationError as e:
    raise ConfigError(one_line(e, where, overrides)) from None
  except ConfigError as e:
    raise ConfigError(f'{where}: {e}') from None


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


def with_measured(cfg: Config, measured: Mapping[str, Json], given: Sequence[str] = ()) -> Config:
  """Returns the config as it was given, with `measured` values and the defaults they lead to."""
  return parse(_stamped(cfg.given), 'the config', given, cfg.run_dir, measured)


def dump(cfg: Config) -> str:
  """Returns the whole config, with defaults, as YAML text that begins with a checksum."""
  return _stamped(cfg.model_dump())


def _stamped(tree: Json) -> str:
  dumper = getattr(yaml, 'CSafeDumper', yaml.SafeDumper)  # the C library's is 10 times faster
  text = yaml.dump(tree, Dumper=dumper, sort_keys=False, allow_unicode=True)
  return f'{_STAMP}{zlib.crc32(text.encode()):08x}\n{text}'


def columns_wanted(cfg: Config, path: str | None) -> str:
  """Returns a text for the user that lists the columns that the log must have.

  `path` is the file of the config; None if it says nothing of the log.
  """
  names = list(dict.fromkeys([*(label.name for label in cfg.labels), *cfg.data.log_columns()]))
  shown = ', '.join(names[:12]) + (f' and {len(names) - 12} more' if len(names) > 12 else '')
  told = f'; the first lines of {path} may tell their source' if path else ''
  return f'wanted files with the columns {shown}{told}'
