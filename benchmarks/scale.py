"""What N ranks need: `python -m benchmarks.scale` prints the tables of docs/scale.md.

It measures three constants: the distinct keys of a rank's batch, the processor time of a message of
our connections, and the memory of a process. It computes the rest from these, for the model of
docs/performance.md and one batch of 4096 samples per rank.
"""

import concurrent.futures
import itertools
import os
import socket
import time

os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
import numpy as np
import psutil
import tensorflow as tf
from absl import app, flags

from benchmarks.bench_data import CRITEO, batches, hashed_keys
from benchmarks.page import markdown_table
from ops.connections import Connections
from ops.sharding import SHARDS

STEP = flags.DEFINE_float('step_ms', 37, 'A step of one process (docs/performance.md, 2 cores).')
HOP = flags.DEFINE_float('hop_us', 40, 'One message between two hosts of the ring, with its call.')
FEATURE_BYTES, FEATURES = 199, 1e9  # bytes of an admitted feature (benchmarks.run --only memory)
HEADER, EXCHANGES, COLLECTIVES = 64, 3, 4  # of keys, which take two collectives, rows, gradients


def distinct_keys() -> float:
  """Returns the mean number of distinct keys in a batch."""
  keys, _, _ = batches(CRITEO, 0, hashed_keys)
  return float(np.mean([len(np.unique(batch)) for batch in keys[:20]]))


def dense_parameters() -> int:
  """Returns the number of dense weights: of dense columns, of the layers, and the bias."""
  widths = [CRITEO.slots * CRITEO.width + CRITEO.dense, *CRITEO.hidden, 1]
  return CRITEO.dense + sum(i * o + o for i, o in itertools.pairwise(widths))


def mesh(size: int) -> list[Connections]:
  """Connects `size` ranks with one another within this process."""
  fds = [[-1] * size for _ in range(size)]
  for a, b in itertools.combinations(range(size), 2):
    fds[a][b], fds[b][a] = (end.detach() for end in socket.socketpair())
  return [Connections(row, rank) for rank, row in enumerate(fds)]


def message_microseconds(sizes: tuple[int, int] = (4, 24), turns: int = 60) -> float:
  """Returns the processor time to send and receive a small message.

  It is the slope of a call's time over the number of ranks.
  """
  spent = []
  for size in sizes:
    ranks = mesh(size)
    rows, counts = tf.zeros([size, 16]), tf.ones([size], tf.int32)

    def run(
      rank: Connections, count: int, rows: tf.Tensor = rows, counts: tf.Tensor = counts
    ) -> None:
      for _ in range(count):
        rank.all_to_all([rows], counts)

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
      list(pool.map(run, ranks, [5] * size))
      start = time.process_time()
      list(pool.map(run, ranks, [turns] * size))
      spent.append((time.process_time() - start) / turns / size)  # of a rank's call
  return 1e6 * (spent[1] - spent[0]) / (sizes[1] - sizes[0])


def main(_: list[str]) -> None:
  keys, message, parameters = distinct_keys(), message_microseconds(), dense_parameters()
  process = psutil.Process().memory_info().rss / 2**20
  print(
    f'measured: {keys:,.0f} distinct keys in a batch of {CRITEO.batch}, {message:.1f} us of '
    f'processor time a message, {process:,.0f} MiB for a process with TensorFlow; '
    f'{parameters:,} dense weights; {HOP.value:g} us a hop and {STEP.value:g} ms a step are given\n'
  )
  needs, times = [], []
  for n in 8, 64, 512:
    share = (n - 1) / n
    owners = min(n, SHARDS)  # each sends rows to all ranks
    row = 4 * (1 + CRITEO.width)
    row_bytes = keys * share * (16 + row + row * n / owners) + COLLECTIVES * (n - 1) * HEADER
    dense_bytes = 2 * share * 4 * parameters
    needs.append(
      [
        str(n),
        f'{row_bytes / 1e6:.2f} MB',
        f'{dense_bytes / 1e6:.2f} MB',
        f'{COLLECTIVES * (n - 1):,}',
        f'{EXCHANGES * (n - 1):,}',
        f'{EXCHANGES * n * (n - 1) // 2:,}',
        f'{FEATURES * FEATURE_BYTES / owners / 2**30:,.1f} GiB',
        f'{CRITEO.batch * n:,}',
      ]
    )
    for gigabits in 10, 100:
      rate = gigabits * 1e9 / 8
      on_the_way, calls = 1e3 * row_bytes / rate, 1e-3 * message * COLLECTIVES * (n - 1)
      ring = 1e3 * dense_bytes / rate + 2 * (n - 1) * 1e-3 * HOP.value
      # The next batch's keys travel while the step computes, and sums while gradients of rows do.
      rows, gradients = (1e3 * keys * share * row * x / rate for x in (n / owners, 1))
      waiting = rows + calls + max(gradients, ring)
      columns = on_the_way, calls, ring, waiting, STEP.value / (STEP.value + waiting)
      times.append(
        [str(n), str(gigabits), *(f'{c:.1f}' for c in columns[:-1]), f'{columns[-1]:.2f}']
      )
  head = ['ranks', 'rows sent', 'sums sent', 'messages', 'connections', 'of the job']
  print(markdown_table([*head, '1 G features, a rank', 'global batch'], needs) + '\n')
  head = ['ranks', 'Gb/s', 'rows on the way, ms', 'calls, ms', 'ring, ms', 'a step waits, ms']
  print(markdown_table([*head, 'efficiency'], times))


if __name__ == '__main__':
  app.run(main)
