"""How fast prepared passes are read: `python -m benchmarks.input_bench`. Prints machine, seed,
shapes and rates in samples/s.

Criteo's shape (26 slots, 13 dense columns), once with one feature in every slot (the fast path) and
once with a tenth of the fields blank;
from the page cache. The goal is 500,000 shuffled samples/s on 2 cores.
"""

import os
import platform
import tempfile
import time

import numpy as np
from absl import app, flags

from trainer.config import Config
from trainer.data.parse import Parsed
from trainer.data.prefetch import prefetch
from trainer.data.prepared import PreparedPass
from trainer.data.prepared_writer import Writer
from trainer.data.schema import schema

SAMPLES = flags.DEFINE_integer('samples', 1_000_000, 'Of the pass.')
BATCH = flags.DEFINE_integer('batch_size', 4096, 'Samples of a global batch.')
SEED = flags.DEFINE_integer('seed', 0, 'Of data and order.')
SECONDS = flags.DEFINE_float('seconds', 3, 'Of each measurement.')
SLOTS, DENSE = 26, 13


def write(directory, cfg, blank):
  rng = np.random.default_rng(SEED.value)
  writer = Writer(directory, cfg)
  for start in range(0, SAMPLES.value, 1 << 17):
    n = min(1 << 17, SAMPLES.value - start)
    counts = (rng.random([n, SLOTS]) >= blank).astype(np.int32)
    writer.add(
      Parsed(
        counts,
        rng.integers(1 << 52, size=counts.sum()),
        None,
        rng.random([n, DENSE], np.float32),
        rng.integers(0, 2, [n, 1]).astype(np.float32),
      )
    )
  writer.close({'schema': schema(cfg), 'day': 0})


def rate(batches):
  """Samples a second, and a second of processor time (which other work on the machine hardly
  changes), from the page cache.
  """
  for _ in batches():
    pass
  samples, start, cpu = 0, time.perf_counter(), time.process_time()
  while time.perf_counter() - start < SECONDS.value:
    for batch in batches():
      samples += len(batch.label)
      if time.perf_counter() - start >= SECONDS.value:
        break
  wall, busy = time.perf_counter() - start, time.process_time() - cpu
  return f'{samples / wall:,.0f}/s ({samples / busy:,.0f} a CPU second)'


def main(_):
  cfg = Config(
    data={
      'slots': [{'name': f'C{i}'} for i in range(SLOTS)],
      'dense': [{'name': f'I{i}'} for i in range(DENSE)],
    },
    model={'interactions': ['linear']},
  )
  print(
    f'{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores; seed '
    f'{SEED.value}; '
    f'{SAMPLES.value:,} samples of {SLOTS} slots and {DENSE} dense columns, batch {BATCH.value}, '
    f'load {os.getloadavg()[0]:.1f}'
  )
  for name, blank in (('one feature a slot', 0), ('a tenth blank', 0.1)):
    with tempfile.TemporaryDirectory() as directory:
      write(directory, cfg, blank)
      one = PreparedPass(directory, cfg)
      for order, shuffle in (('in order', False), ('shuffled', True)):
        alone = rate(lambda: one.batches(BATCH.value, seed=SEED.value, shuffle=shuffle))
        ahead = rate(lambda: prefetch(one.batches(BATCH.value, seed=SEED.value, shuffle=shuffle)))
        half = rate(
          lambda: one.batches(BATCH.value, rank=1, size=2, seed=SEED.value, shuffle=shuffle)
        )
        print(
          f'{name}, {order}: {alone}; through prefetch {ahead}; rank 1 of 2, its own half {half}'
        )


if __name__ == '__main__':
  app.run(main)
