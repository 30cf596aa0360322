"""The memory that a feature takes while the table grows: all admitted, then all on probation.

The spec has `config`, a YAML file, and `features`, the most. Reports the largest bytes per feature
of the last two thirds of the growth, which is that just after the table has grown.
"""

import numpy as np

from benchmarks.contenders import channel
from benchmarks.contenders.ours import observe
from trainer import config, runtime


def main():
  spec = channel.spec()
  cfg = config.load(spec['config'])
  runtime.start(cfg)
  from ops.dedupe import dedupe
  from trainer.comm.communicator import SingleProcess
  from trainer.training.step import TrainStep

  told = {}
  for kind, threshold in (('admitted', 0.1), ('probation', 1e9)):
    step = TrainStep(
      cfg.model_copy(
        update={'lifecycle': cfg.lifecycle.model_copy(update={'admission_threshold': threshold})}
      ),
      SingleProcess(),
    )
    rng = np.random.default_rng(cfg.seed)
    part, worst, before = 1 << 16, 0.0, channel.rss()
    for start in range(0, spec['features'], part):
      keys = rng.integers(1, len(cfg.data.slots) + 1, part) << 52 | rng.integers(0, 1 << 52, part)
      observe(step.store, dedupe(keys), step.dense.row_hyperparameters(step.steps))
      if start >= spec['features'] // 3:
        worst = max(worst, int(step.store.bytes()) / int(step.store.size()))
    told[f'{kind}_bytes'] = worst
    told[f'{kind}_resident_bytes'] = (channel.rss() - before) / int(step.store.size())
    if kind == 'admitted' and int(step.store.admitted_size()) != int(step.store.size()):
      raise RuntimeError(
        f'{int(step.store.admitted_size())} of {int(step.store.size())} features were admitted; '
        'wanted all'
      )
    del step
  channel.serve(spec, lambda _: None, told)


if __name__ == '__main__':
  main()
