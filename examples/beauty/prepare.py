"""Writes sequences as a log with a line for each place of each sequence.

`python examples/beauty/prepare.py --sequences FILE --out DIR` reads the format of S3Rec's data
sets: a line `user item item …` in order of time, plain or gzipped. Each item but the first becomes
a line user, item, history, with the items before it. The last item of a user is in test.csv, the
one before it in valid.csv (leave-one-out), the others in train.csv. all.csv holds train.csv and
valid.csv, to train on again for the epochs that validation chose.
"""

import csv
import gzip
import os

from absl import app, flags

SEQUENCES = flags.DEFINE_string('sequences', None, 'Lines `user item item …`.', required=True)
OUT = flags.DEFINE_string('out', None, 'Directory to write to.', required=True)
MOST = flags.DEFINE_integer('most', 50, 'Items of a history: the newest.')


def main(_: list[str]) -> None:
  os.makedirs(OUT.value, exist_ok=True)
  lines: dict[str, list[list[str]]] = {'train': [], 'valid': [], 'test': []}
  opened = gzip.open if SEQUENCES.value.endswith('.gz') else open
  with opened(SEQUENCES.value, 'rt', encoding='utf-8') as f:
    for line in f:
      user, *items = line.split()
      for i in range(1, len(items)):
        split = {len(items) - 1: 'test', len(items) - 2: 'valid'}.get(i, 'train')
        lines[split].append([user, items[i], ' '.join(items[max(0, i - MOST.value) : i])])
  lines['all'] = lines['train'] + lines['valid']
  for split, rows in lines.items():
    with open(os.path.join(OUT.value, f'{split}.csv'), 'w', encoding='utf-8', newline='') as f:
      writer = csv.writer(f)
      writer.writerows([['user', 'item', 'history'], *rows])
    print(f'{split}.csv: {len(rows):,} lines of {len({row[0] for row in rows}):,} users')


if __name__ == '__main__':
  app.run(main)
