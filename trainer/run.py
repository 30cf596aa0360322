"""Trains a model: `python -m trainer.run --config FILE [--set a.b=value]… [--run_dir DIR]`.

Under Horovod: `horovodrun -np N -H hosts python -m trainer.run --config FILE`. Run again on the same run_dir, it continues from the last checkpoint.
"""
from absl import flags

from trainer import config
from trainer.entry import entry

CONFIG = flags.DEFINE_string('config', None, 'YAML file; configs/ has examples.', required=True)
SET = flags.DEFINE_multi_string('set', [], 'Overrides a key, as in --set train.batch_size=1024; may be repeated.')
RUN_DIR = flags.DEFINE_string('run_dir', None, 'Where the run is kept; replaces run_dir of the config.')


def main():
  cfg = config.load(CONFIG.value, SET.value, RUN_DIR.value)
  for key in ('train', 'valid', 'test'):
    config.expand(getattr(cfg.data, key), f'{CONFIG.value}: data.{key}')
  from trainer import runtime  # now: a mistake in the config is told without waiting for TensorFlow
  place = runtime.start(cfg)
  if cfg.sync.mode != 'allreduce':
    from trainer.sync import parameter_server
    return parameter_server.run(cfg)
  from trainer import lifecycle, report, train_step
  from trainer.sync import allreduce, watch
  peers = allreduce.peers(place)
  guard = watch.Watch(peers, place, cfg.sync.lost_peer_seconds, cfg.sync.stalled_peer_seconds) if place.size > 1 else None
  job = lifecycle.Job(cfg, peers, train_step.TrainStep(cfg, peers), guard.progress if guard else lambda: None)
  done = job.run()
  if place.is_chief:
    report.close(cfg)
  peers.barrier()
  if guard:
    guard.close()
  return 0 if done else 143  # as a shell says of a process ended by SIGTERM


if __name__ == '__main__':
  entry(main)
