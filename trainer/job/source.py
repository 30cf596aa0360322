"""Where the config of a training job comes from, and the values that are measured for it."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import yaml
from absl import logging

from trainer import config, runtime
from trainer.config import rules
from trainer.data import frames
from trainer.data.file_system import absolute, is_directory, is_remote, normal
from trainer.data.frames import Frame
from trainer.data.pass_files import folders_above, matching, refuse_tables
from trainer.errors import ConfigError, UserError, refuse_secrets, short
from trainer.plain_data import Json
from trainer.wings import wing


@dataclasses.dataclass(frozen=True)
class Source:
  """Where a training job's config comes from.

  `configuration` is a YAML file, or its content as a dict; `overrides` are strings `a.b=value`;
  `run_dir` replaces the config's unless it is None. `frames`, {split: one or several}, are written
  into the run_dir as passes, in place of the splits' files.
  """

  configuration: str | Mapping[str, Json]
  overrides: Sequence[str] = ()
  run_dir: str | None = None
  frames: Mapping[str, Frame | Sequence[Frame]] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def cfg(self) -> config.Config:
    """The config, checked also against the files that it names.

    Raises a UserError if such a file or directory does not exist, a setting needs days but the
    config has none, or MLflow is not installed.
    """
    cfg, where = self._given, self._where()
    if self.bucket:
      cfg = cfg.model_copy(update={'run_dir': runtime.working_directory(self.bucket)})
    if self.frames:
      cfg = config.with_given(cfg, frames.write_passes(cfg, self.frames))
    rules.check_days(cfg, where)
    if 'mlflow' in cfg.report.to:
      wing('tools.check_mlflow')()
    for key in ('train', 'valid', 'test'):
      place = config.place_of(f'data.{key}', where, self.overrides)
      try:
        matching(getattr(cfg.data, key), f'{place}: data.{key}')
      except ConfigError as e:
        raise ConfigError(
          f'{e}; {config.columns_wanted(cfg, where if place == where else None)}'
        ) from None
    if watch := cfg.data.watch:
      if not is_directory(normal(watch)):
        raise ConfigError(f"{where}: data.watch: found '{watch}', which is no directory")
      refuse_tables([normal(watch), *folders_above(absolute(normal(watch)))])
    return cfg

  def with_measured_values(
    self,
    tells: bool = True,
    init_from: str | None = None,
    on_first: Callable[[str, Callable], Sequence] = lambda what, action: action(),
    race: Callable | None = None,
  ) -> config.Config:
    """Returns `cfg` with the values that are measured on the log, such as the batch size.

    This imports TensorFlow, and may read the beginning of the log. `tells` prints what was
    measured, and warns of settings without effect. `init_from` and `race` are those of `measured`.
    `on_first` is that of `Communicator`: several ranks might see different passes.
    """
    cfg = self.cfg
    from trainer.data.measured import measured
    from trainer.data.passes import also_trained

    if tells:
      judging = (line for split in ('valid', 'test') for line in also_trained(cfg.data, split))
      for line in (*rules.warnings(cfg), *judging):
        logging.warning('%s', line)
    values, told = on_first('cannot read the log', lambda: list(measured(cfg, init_from, race)))
    for line in told if tells else ():
      print(line, flush=True)
    return config.resolve(cfg, values)

  def _where(self) -> str:
    return self.configuration if isinstance(self.configuration, str) else 'config'

  @functools.cached_property
  def bucket(self) -> str | None:
    """The URL of the run_dir if it is in a bucket, else None."""
    cfg = self._given
    if not is_remote(cfg.run_dir):
      return None
    if cfg.sync.mode != 'allreduce':
      found = f"found '{cfg.run_dir}' with sync.mode '{cfg.sync.mode}'"
      raise UserError(f'run_dir: {found}; wanted a directory that all hosts share')
    return normal(cfg.run_dir)

  @functools.cached_property
  def _given(self) -> config.Config:
    """The config as it was given, without a check of the files that it names."""
    refuse_secrets('\n'.join([*self.overrides, str(self.run_dir)]), self._where())
    overrides = [*self.overrides, *(f'data.{split}=[frame]' for split in self.frames)]
    if isinstance(self.configuration, str):
      return config.load(self.configuration, overrides, self.run_dir)
    if not isinstance(self.configuration, Mapping):
      wanted = 'wanted the path of a YAML file, or its content as a dict'
      raise ConfigError(f'config: found {short(self.configuration)}; {wanted}')
    try:
      plain = json.loads(json.dumps(dict(self.configuration), default=_plain_setting))
    except (TypeError, ValueError, RecursionError) as e:  # a key is no text, or a dict in itself
      raise ConfigError(f'config: {e}; wanted a dict as a YAML file gives it') from None
    refuse_secrets(text := yaml.safe_dump(plain), 'config')
    return config.parse(text, self._where(), overrides, self.run_dir)


def _plain_setting(value: object) -> Json:
  """Returns a setting given in Python, such as a NumPy number or a path, as YAML would have it."""
  if isinstance(value, np.generic):
    return value.item()
  if isinstance(value, os.PathLike):
    return os.fsdecode(value)
  wanted = 'texts, numbers, booleans, lists and dicts'
  raise ConfigError(f'config: {frames.found(value)}; wanted {wanted}')
