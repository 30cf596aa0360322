"""What every entry point shares: flags, exit statuses, and a finished run taken up again."""
import os
import sys
import time

from absl import app, flags, logging

from trainer import config


def _parse(argv):
  try:
    return flags.FLAGS(argv)
  except flags.Error as e:
    sys.stderr.write(f'error: {e}\n')
    sys.exit(2)


def entry(main):
  """Runs `main(argv)`; a user's mistake ends in one line, told by one rank, and status 2."""
  def guarded(argv):
    try:
      if len(argv) > 1:
        raise config.UserError(f"unknown argument '{argv[1]}'; wanted flags only, see --help")
      status = main()
    except config.UserError as e:
      from trainer.runtime import rank_hint
      if rank_hint() == 0:
        sys.stderr.write(f'error: {e}\n')
      else:
        time.sleep(2)  # the launcher ends all ranks when one ends: let rank 0 speak first
      status = 2
    except Exception:
      logging.exception('this process failed')
      from trainer.runtime import distributed
      if distributed():
        time.sleep(5)  # the watch over lost peers may be about to say which one it was
      status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)  # not sys.exit: Horovod's shutdown must neither delay nor change the status
  app.run(guarded, flags_parser=_parse)


def open_run(run_dir, overrides=(), checkpoint='best'):
  """Takes up a run in this one process, to evaluate, predict or export.

  Args:
    overrides: as for trainer.run.
    checkpoint: best (the best by validation, or the last where there was none) or last.
  Returns: a trainer.lifecycle.Job with its state restored.
  Raises: UserError where there is no checkpoint.
  """
  path = os.path.join(run_dir, 'config.yaml')
  if not os.path.exists(path):
    raise config.UserError(f'--run_dir {run_dir}: no config.yaml there; wanted the run_dir of a training run')
  cfg = config.load(path, overrides, run_dir)
  from trainer import runtime
  runtime.start(cfg)
  from trainer.lifecycle import Job
  from trainer.sync.allreduce import Alone
  from trainer.train_step import TrainStep
  job = Job(cfg, Alone(), TrainStep(cfg, Alone()))
  best = os.path.join(run_dir, 'best')
  if not (checkpoint == 'best' and os.path.isdir(best) and job.restore(best)) and not job.restore():
    raise config.UserError(f'--run_dir {run_dir}: no finished checkpoint there; wanted a run that was trained')
  return job
