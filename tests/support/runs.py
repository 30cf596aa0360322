"""Run_dirs of made-up runs, as a job would have left them, for tests of what is read from them."""

import json
import pathlib
from typing import Any
from xml.etree import ElementTree

import numpy as np

from tests.support import small
from trainer import config, files

SLOTS = ('user', 'item', 'query')
WIDTH = 8


def _slots(rng: np.random.Generator, place: int) -> dict[str, dict[str, Any]]:
  return {
    slot: {
      'features': 1000 * (i + 1) * (place + 1),
      'admitted': 300 * (i + 1) * (place + 1),
      'shows': 90_000.0,
      'ctr': 0.2,
      'norm': 0.3 + 0.1 * i,
      'effective_rank': 5.5 + rng.random(),
      'width': WIDTH,
      'dead_columns': [],
      'blank': 0.02 * i,
      'bytes_share': 1 / 3,
    }
    for i, slot in enumerate(SLOTS)
  }


def healthy_events(days: int = 4, seed: int = 0) -> list[dict[str, Any]]:
  """The events of a run in which nothing went wrong: a pass a day, validated and tested."""
  rng = np.random.default_rng(seed)
  events, step = [], 0

  def add(event: str, **fields: Any) -> None:
    events.append({'event': event, 'step': step} | fields | {'time': 1.8e9 + len(events)})

  def quality(place: float) -> dict[str, float]:
    auc = 0.8 - 0.1 * 0.5**place + 0.003 * rng.random()
    fixed = {'ctr': 0.2, 'weight': 100_000.0}
    return {'auc': auc, 'logloss': 1.15 - auc, 'calibration': 1 + 0.02 * rng.random()} | fixed

  def evaluate(split: str, name: str, place: int) -> None:
    predicted = np.linspace(0.03, 0.6, 10)
    clicked = (predicted * (1 + 0.05 * rng.normal(size=10))).tolist()
    samples = np.linspace(0, 1, 11)
    slots = {
      slot: {
        'unknown': 0.1 * (i + 1) / (place + 1),
        'calibration_known': 1.01,
        'calibration_unknown': 0.9 + 0.1 * i,
      }
      for i, slot in enumerate(SLOTS)
    }
    add(
      'eval',
      split=split,
      **{'pass': name},
      day=place,
      epoch=0,
      examples=20_000,
      examples_per_second=3e5,
      deciles={'weight': [2000.0] * 10, 'predicted': predicted.tolist(), 'ctr': clicked},
      ranking={
        'samples': samples.tolist(),
        'clicks': np.sqrt(samples).tolist(),
        'others': np.square(samples).tolist(),
      },
      spread={
        'edges': np.geomspace(0.01, 0.9, 5).tolist(),
        'clicks': [10.0, 400.0, 2000.0, 1590.0],
        'others': [9000.0, 5000.0, 1500.0, 500.0],
      },
      slots=slots,
      **quality(place + 0.9),
    )

  add('start', processes=2, mode='allreduce')
  for day in range(days):
    name = f'day_{day:02d}'
    where = {'pass': name, 'day': day, 'epoch': 0}
    evaluate('next', name, day)
    for part in range(4):
      step += 25
      size = {'features': 6000 * (day + 1), 'admitted': 1800 * (day + 1)}
      size['table_bytes'] = 1_000_000 * (day + 1) + 100_000 * part
      add(
        'window',
        examples=25_000,
        examples_per_second=1.5e5,
        **where,
        **size,
        **quality(day + part / 4),
      )
    seconds = {'convert': 0.4, 'wait': 0.1, 'step': 3.0, 'evaluate': 0.3, 'save': 0.2}
    add(
      'train',
      examples=100_000,
      examples_per_second=1.5e5,
      **where,
      **size,
      **quality(day + 0.5),
      seconds=seconds,
      slots=_slots(rng, day),
      bad=0,
    )
    size['table_bytes'] -= 400_000
    evicted = {slot: {'evicted': 100, 'features': 900, 'admitted': 250} for slot in SLOTS}
    add('day_end', day=day, evicted=300, slots=evicted, **size)
    add(
      'export',
      kind='base',
      day=day,
      rows=800,
      tombstones=0,
      seconds=0.1,
      **{'pass': name},
      slots={slot: {'rows': 200 + 50 * day} for slot in SLOTS},
    )
  evaluate('test', 'test', days)
  add(
    'importance',
    split='test',
    auc=0.79,
    logloss=0.36,
    columns={slot: {'auc': 0.05 - 0.015 * i, 'logloss': 0.02} for i, slot in enumerate(SLOTS)},
  )
  add('end', status='finished')
  return events


def slots_in(report: str) -> dict[str, dict[str, str]]:
  """The cells of the table "Slots" of a report.html, {slot: {column: text}}."""
  table = pathlib.Path(report).read_text().partition('<h3>Slots</h3>')[2]
  table = table[table.index('<table') : table.index('</table>') + len('</table>')]
  _, *names = [cell.text for cell in ElementTree.fromstring(table).iterfind('./thead/tr/th')]
  rows = ElementTree.fromstring(table).iterfind('./tbody/tr')
  cells = [[cell.text or '' for cell in row] for row in rows]
  return {slot: dict(zip(names, texts, strict=True)) for slot, *texts in cells}


def write_config(tree: dict[str, Any], run_dir: str) -> None:
  """Writes config.yaml as a run does."""
  config.write_of_run(small.checked(tree | {'run_dir': run_dir}))


def write_run(run_dir: str, events: list[dict[str, Any]], **train: Any) -> str:
  """Writes config.yaml and metrics.jsonl. Returns: `run_dir`."""
  folder = pathlib.Path(run_dir)
  folder.mkdir(parents=True)
  tree = small.tree(
    data={'train': [f'{run_dir}/gone_*.csv'], 'slots': [{'name': slot} for slot in SLOTS]},
    sparse={'tables': {'default': {'width': WIDTH}}},
    model={'interactions': ['linear', 'fm', {'dnn': {'hidden': [16]}}]},
    train=train,
  )
  if 'plateau' in train:
    tree['data']['valid'] = [f'{run_dir}/gone_valid.csv']
  write_config(tree, run_dir)
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(e) + '\n' for e in events))
  return run_dir


def begin(cfg: config.Config) -> None:
  """Leaves in the run_dir the config of a run and the mark of its first checkpoint."""
  checkpoint = pathlib.Path(cfg.run_dir, 'checkpoints', 'ckpt-000000001')
  checkpoint.mkdir(parents=True, exist_ok=True)
  (checkpoint / files.DONE).touch()
  config.write_of_run(cfg)
