"""Trains a model: `python -m trainer.run --config FILE [--set a.b=value]… [--run_dir DIR]`.

Under Horovod: `horovodrun -np N -H hosts python -m trainer.run --config FILE`.
Run again on the same run_dir, it continues from the last checkpoint.
"""

from absl import flags

from trainer import command_line, config, runtime
from trainer.comm.heartbeat import Heartbeat
from trainer.data.log_files import is_directory, matching, normal
from trainer.errors import ConfigError, UserError

CONFIG = flags.DEFINE_string('config', None, 'YAML file; configs/ has examples.', required=True)
SET = flags.DEFINE_multi_string(
  'set', [], 'Overrides a key, as in --set train.batch_size=1024; may be repeated.'
)
RUN_DIR = flags.DEFINE_string(
  'run_dir', None, 'Where the run is kept; replaces run_dir of the config.'
)
DRY_RUN = flags.DEFINE_bool(
  'dry_run', False, 'Tells what would be read and trained (passes, slots, parameters), then stops.'
)
INIT_FROM = flags.DEFINE_string(
  'init_from', None, 'A run_dir whose features and layers a new run begins with.'
)


@command_line.command
def main() -> int:
  cfg = config.load(CONFIG.value, SET.value, RUN_DIR.value)
  if INIT_FROM.value and cfg.sync.mode != 'allreduce':
    raise UserError(f"--init_from: wanted sync.mode 'allreduce'; found '{cfg.sync.mode}'")
  config.check_effects(cfg, CONFIG.value)
  for key in ('train', 'valid', 'test'):
    try:
      matching(getattr(cfg.data, key), f'{CONFIG.value}: data.{key}')
    except ConfigError as e:
      raise ConfigError(f'{e}; {config.columns_wanted(cfg, CONFIG.value)}') from None
  if cfg.data.watch and not is_directory(normal(cfg.data.watch)):
    raise UserError(
      f"{CONFIG.value}: data.watch: found '{cfg.data.watch}', which is no directory; wanted one "
      'where passes arrive'
    )
  if DRY_RUN.value:
    runtime.start(cfg)
    from trainer.training import dry_run

    for line in dry_run.tell(cfg):
      print(line, flush=True)
    return 0
  if cfg.sync.mode != 'allreduce':
    runtime.start(cfg)
    from trainer.parameter_server import run

    return run.run(cfg)
  here = runtime.launched()
  if here.size == 1:
    return train(cfg, here, None)
  with Heartbeat(here, cfg.sync) as heartbeat:
    return train(cfg, here, heartbeat)


def train(cfg: config.Config, here: runtime.Runtime, heartbeat: Heartbeat | None) -> int:
  """Trains in this process, which may be one rank of several.

  Args:
    cfg: the config.
    here: where this process stands.
    heartbeat: of the job, where it has several ranks.
  Returns:
    The exit status.
  """
  runtime.start(cfg, here)
  # TensorFlow takes seconds to import: these come after the config was checked.
  from trainer.comm import horovod
  from trainer.training.job import Job
  from trainer.training.step import TrainStep

  communicator = horovod.communicator(here, cfg.sync)
  step = TrainStep(cfg, communicator)
  progress_made = heartbeat.progress if heartbeat else lambda: None
  job = Job(cfg, communicator, step, progress_made, init_from=INIT_FROM.value)
  if heartbeat:
    heartbeat.tell_lost = job.tell_lost
  done = job.run()
  troubles = job.close()
  communicator.barrier()
  return command_line.status(done, troubles)


if __name__ == '__main__':
  main()
