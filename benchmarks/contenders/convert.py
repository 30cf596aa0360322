"""Converts a raw log into a prepared pass with our code, from reading to fsync.

The spec has `config`, a YAML file whose data.train is the log, and `samples`, the rows of the log.
A round converts the whole log as often as its steps need samples, at least once.
"""

import tempfile

from benchmarks.contenders import channel
from trainer import (
  config,
  runtime,  # noqa: F401 TensorFlow reads what it sets
)


def main():
  spec = channel.spec()
  cfg = config.load(spec['config'])
  from trainer.data.conversion import prepare_pass

  (log,) = cfg.data.train

  def take_steps(count):
    for _ in range(max(1, round(count * cfg.train.batch_size / spec['samples']))):
      with tempfile.TemporaryDirectory(dir='build') as directory:
        meta = prepare_pass(cfg, log, f'{directory}/out')
        if meta['samples'] != spec['samples']:
          raise ValueError(f'{log}: found {meta["samples"]} samples; wanted {spec["samples"]}')

  channel.serve(spec, take_steps)


if __name__ == '__main__':
  main()
