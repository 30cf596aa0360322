"""The config of a small model, and a job of it, for tests that say only what matters to them."""

import copy
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from trainer import config as of_trainer

LEAST = {
  'data': {'slots': [{'name': 'user'}, {'name': 'item'}]},
  'model': {'interactions': ['linear']},
}


def tree(
  base: Mapping[str, Any] = LEAST, changes: Mapping[str, Any] | None = None, **sections: Any
) -> dict[str, Any]:
  """The content of a config file: `base` with other keys.

  Args:
    base: what is left as it is.
    changes: keys of any depth that differ, as {'train.batch_size': 8}.
    **sections: keys that differ, by section, as train={'batch_size': 8}; or `run_dir` and `seed`.
  """
  made = copy.deepcopy(dict(base))
  for name, keys in sections.items():
    made[name] = {**made.get(name, {}), **keys} if isinstance(keys, Mapping) else keys
  for key, value in (changes or {}).items():
    node = made
    *parents, last = key.split('.')
    for part in parents:
      node = node.setdefault(part, {})
    node[last] = value
  return made


def config(*args: Any, **sections: Any) -> of_trainer.Config:
  """The config with the content of `tree`, not checked by rules that take more than one section."""
  return of_trainer.Config.model_validate(tree(*args, **sections))


def checked(base: Mapping[str, Any], settings: Sequence[str] = ()) -> of_trainer.Config:
  """The config with this content, as of a file, and settings such as 'train.batch_size=8'."""
  return of_trainer.parse(yaml.safe_dump(base), 'test', settings)


def write(path: str | pathlib.Path, *args: Any, **sections: Any) -> str:
  """Writes a file with the content of `tree`; returns its path."""
  pathlib.Path(path).write_text(yaml.safe_dump(tree(*args, **sections)), encoding='utf-8')
  return str(path)


def job(cfg: of_trainer.Config, **more: Any) -> Any:
  """The job of this process alone; `more` are arguments of Job."""
  from trainer.comm.communicator import SingleProcess
  from trainer.evaluation.task import task_of
  from trainer.job.job import Job

  return Job(cfg, SingleProcess(), task_of(cfg).step(SingleProcess()), **more)
