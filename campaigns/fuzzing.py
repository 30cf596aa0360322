"""Changes configs, records, columns and arguments of ops.

Each must be accepted, for what it is, or refused in one line.
"""

import copy
import glob
import gzip
import json
import logging
import os
import pathlib
import random
import string
import subprocess
import sys
import urllib.parse
from typing import Any

import boto3
import numpy as np
import pandas as pd
import yaml

from campaigns.units import Found, Kind
from tests.support.s3 import S3
from trainer import config
from trainer.data.pass_files import matching
from trainer.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = 400  # of a unit
RECORDS = 1400
CARRIED = 300
OP_CALLS = 20  # of each op
LAYOUTS = 40
CITIES = ('A:B', 'K/B', '5 %', '%41', 'plain', 'größe', 'a=b', 'x.tmp', '_y', '7', 'a+b', '..', '~')
LEFTOVERS = ('~', '.tmp', '._COPYING_', '.bak', '.inprogress', '.part', '.crc', '.md5', '.done')
_NUMBERS = (0, 1, -1, 2**31, 2**63, 10**300, 0.5, -0.0, 1e30, float('nan'), float('inf'))
_TEXTS = ('', ' ', 'x', 'adam', 'none', '²', 'größe', '\0', '../..', 'a' * 3000, '(', '{}', '%s')
_TREES = ([], [[]], [None], {}, {'a': 1}, {'name': 'user'}, {'dnn': {'hidden': [0]}})
_VALUES = (None, True, *_NUMBERS, *_TEXTS, *_TREES)
LINES = (
  *('\t', '- ', ': ', '&a *a', '*a', '!!int ""', '!!python/object:os.system', '2024-13-45', '0x'),
  *('1_000', '[' * 500, '{' * 200, '9' * 5000, '<<: x', '? x', '\ufeff', '\x85'),
  *('%YAML 9.9\n---\n', '---\n', '|2\n a'),
)


def _places(tree: Any, path: tuple = ()) -> list[tuple]:
  found = [path] if path else []
  if isinstance(tree, (dict, list)):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
      found += _places(value, (*path, key))
  return found


def changed(draw: random.Random, tree: Any, names: list[str]) -> Any:
  """Returns a config, as a tree, with some values changed, added, misspelt or removed."""
  tree = copy.deepcopy(tree)
  for _ in range(draw.choice((1, 1, 1, 2, 4))):
    *path, last = draw.choice(_places(tree))
    node = tree
    for key in path:
      node = node[key]
    how = draw.random()
    if how < 0.15:
      del node[last]
    elif how < 0.35 and isinstance(node, dict):
      node[draw.choice(names)] = copy.deepcopy(draw.choice(_VALUES))
    elif how < 0.45 and isinstance(node, dict) and isinstance(last, str) and last:
      at = draw.randrange(len(last))
      node[last[:at] + draw.choice(string.ascii_lowercase) + last[at + 1 :]] = node.pop(last)
    elif how < 0.5 and isinstance(node, list):
      node.append(copy.deepcopy(node[draw.randrange(len(node))]))
    elif how < 0.75:
      node[last] = _alike(draw, node[last])
    else:
      node[last] = copy.deepcopy(draw.choice(_VALUES))
    if not _places(tree):
      break
  return tree


def _alike(draw: random.Random, value: Any) -> Any:
  """Returns another value of the same type."""
  match value:
    case bool():
      return not value
    case int():
      return draw.choice((0, 1, 2, 3, 7, 64, 1000, value + 1))
    case float():
      return draw.choice((0.0, 1e-6, 0.1, 0.5, 1.0, 3.0, value / 2))
    case str():
      return draw.choice((value + 'x', value.upper(), 'sum', 'adam', 'ftrl', 'score', 'user'))
    case list():
      return draw.sample(value, draw.randrange(len(value) + 1))
  return value


def _configs(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes values, keys and bytes of `configs/` and of `--set`.

  The config must be accepted, and stay the same when it is written and read again, or be refused in
  one line.
  """
  good = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / 'configs').glob('*.yaml'))]
  schema = json.dumps(config.Config.model_json_schema()['$defs'])
  names = sorted({name for d in json.loads(schema).values() for name in d.get('properties', {})})
  found = Found()
  for _ in range(CONFIGS):
    tree, overrides = draw.choice(good), []
    if draw.random() < 0.3:
      path = '.'.join(map(str, draw.choice(_places(tree))))
      value = draw.choice((*LINES, *map(str, _VALUES)))
      overrides = [draw.choice((f'{path}={value}', f'{path}.x={value}', value))]
      text = yaml.safe_dump(tree)
    else:
      text = yaml.safe_dump(changed(draw, tree, names), allow_unicode=True)
    if draw.random() < 0.3:
      for _ in range(draw.choice((1, 2))):
        at = draw.randrange(len(text) + 1)
        text = text[:at] + draw.choice(LINES) + text[at + draw.randrange(4) :]
    what = f'{text!r} {overrides}'
    try:
      cfg = config.parse(text, 'my.yaml', overrides)
      again = config.parse(config.dump(cfg), 'again.yaml')
    except UserError as e:
      message = str(e)
      # An override that has line ends is told as it is; the command makes one line of it.
      wrong = '\n' in message and '\n' not in ''.join(overrides)
      found.trial('refused in one line', f'{message}: {what}' if wrong else None)
    except Exception as e:
      found.trial('', f'{type(e).__name__}: {str(e)[:300]}: {what[:3000]}')
    else:
      same = again.model_dump() == cfg.model_dump()
      found.trial('taken', None if same else f'is another when written and read again: {what}')
  return found


def _records(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes lines and bytes of CSV, JSON lines, libsvm, libffm, TFRecord, Parquet and ORC.

  The numbers of records kept and of bad ones must be those that an independent reader finds, or the
  file must be refused in one line.
  """
  from tests.support import damage

  logging.disable(logging.WARNING)
  name, found = draw.choice(list(damage.FORMATS)), Found()
  os.chdir(folder)  # where a file that is counted wrongly is left
  totals = damage.trials(name, RECORDS, seed=draw.randrange(1 << 30))
  found.trials = totals['records']
  found.outcomes.update(
    {
      'kept': totals['kept'],
      'counted as bad': totals['bad'],
      'refused with their file': totals['refused'],
    }
  )
  return found


def _columns(draw: random.Random, folder: str, shared: str) -> Found:
  """Carries odd columns of logs in every format beside predictions.

  Each line must have its record's value, exactly, and its own prediction.
  """
  from tests.support import fuzz
  from trainer.data import text_blocks

  found, text_blocks.BLOCK_BYTES = Found(), draw.choice((300, 5000))
  for _ in range(CARRIED):
    found.trial('each beside its own prediction', fuzz.carried_trial(draw, folder))
  return found


def _ops(draw: random.Random, folder: str, shared: str) -> Found:
  """Makes one or two arguments of an op wrong.

  It must return a result or an error, and the process must live.
  """
  # A process that imports TensorFlow anew: that of the unit has, with settings that this changes.
  command = [sys.executable, '-m', 'tests.support.fuzz_ops', str(draw.randrange(1 << 30))]
  command += [str(OP_CALLS), f'{folder}/last_call']
  found, ops = Found(), subprocess.check_output(command, cwd=ROOT, text=True).split()
  found.trials = found.outcomes['a result or an error'] = len(ops) * OP_CALLS
  return found


def _samples(cfg: config.Config, raw: str, out: str) -> list[tuple[int, int, float]]:
  """Returns each sample's keys of user and city, 0 where there is none, and label; sorted."""
  from trainer.data.conversion import prepare_pass
  from trainer.data.prepared import PreparedPass

  prepare_pass(cfg, raw, out)
  batch = next(PreparedPass(out).batches(1 << 20))
  keys = np.zeros([2 * len(batch.label)], np.int64)
  keys[batch.segments if len(batch.segments) else slice(None)] = batch.keys
  return sorted((*map(int, pair), float(y)) for pair, y in zip(keys.reshape(-1, 2), batch.label))


def _layouts(draw: random.Random, folder: str, shared: str) -> Found:
  """Writes a log as one file, and as parts in a tree: beside leftovers and empty parts, in folders
  as Hive names them, here or in a bucket.

  All must hold the same samples, and ** must match the parts that Python's glob finds.
  """
  logging.disable(logging.WARNING)
  data = {'label': 'click', 'slots': [{'name': 'user'}, {'name': 'city'}]}
  tree = {'data': data, 'model': {'interactions': ['linear']}}
  cfg, found = config.Config.model_validate(tree), Found()
  bucket = f'layouts-{draw.randrange(1 << 30)}'  # pyarrow's clients live for ever
  writers = {
    '.csv': lambda rows: pd.DataFrame(rows).to_csv(index=False).encode(),
    '.csv.gz': lambda rows: gzip.compress(pd.DataFrame(rows).to_csv(index=False).encode()),
    '.jsonl': lambda rows: ''.join(json.dumps(row) + '\n' for row in rows).encode(),
    '.parquet': lambda rows: pd.DataFrame(rows).to_parquet(index=False),
  }
  with S3() as s3:
    client = boto3.client('s3', endpoint_url=s3.environment['AWS_ENDPOINT_URL'])
    client.create_bucket(Bucket=bucket)
    for i in range(LAYOUTS):
      suffix, here = draw.choice(list(writers)), f'{folder}/{i}'
      cities = draw.sample((*CITIES, None), draw.randrange(1, 5))
      rows = [
        {'user': f'u{draw.randrange(9)}', 'city': draw.choice(cities), 'click': draw.randrange(2)}
        for _ in range(draw.randrange(1, 60))
      ]
      files, in_folders = {'flat.jsonl': writers['.jsonl'](rows)}, draw.random() < 0.6
      parts: dict[str, list[dict[str, Any]]] = {}
      for row in rows:
        below = draw.choice(('', '', 'a/', 'a/b/'))
        if in_folders:
          city = row['city']
          name = '__HIVE_DEFAULT_PARTITION__' if city is None else urllib.parse.quote(city, safe='')
          below, row = f'city={name}/', {k: row[k] for k in ('user', 'click')}
        parts.setdefault(f'log/{below}part-{draw.randrange(3)}{suffix}', []).append(row)
      files |= {name: writers[suffix](of_part) for name, of_part in parts.items()}
      where = draw.choice(list(parts)).rpartition('/')[0]
      for number, name in enumerate(draw.sample(LEFTOVERS, draw.randrange(3))):
        files[f'{where}/left-{number}{suffix}{name}'] = draw.randbytes(9)
      for number in range(draw.randrange(3)):
        files[f'{where}/none-{number}{suffix}'] = b''
      for name, content in files.items():
        os.makedirs(os.path.dirname(f'{here}/{name}'), exist_ok=True)
        pathlib.Path(f'{here}/{name}').write_bytes(content)
        client.put_object(Bucket=bucket, Key=f'{i}/{name}', Body=content)
      place = draw.choice((here, f's3://{bucket}/{i}'))
      want = _samples(cfg, f'{here}/flat.jsonl', f'{here}/one')
      wrong = None
      if _samples(cfg, f'{place}/log', f'{here}/other') != want:
        wrong = f'other samples of {place}/log: {sorted(files)} {rows}'
      pattern = f'log/**/*{suffix}'
      globbed = sorted(glob.glob(f'{glob.escape(here)}/{pattern}', recursive=True))
      matched = sorted(
        here + path.removeprefix(place) for path in matching([f'{place}/{pattern}'], '')
      )
      if matched != globbed:
        wrong = f'{pattern} matches {matched}; glob {globbed}'
      found.trial('the same samples', wrong)
  return found


KINDS = [
  Kind('configs', 'inputs', 46, 900, _configs),
  Kind('records', 'inputs', 24, 900, _records),
  Kind('layouts', 'inputs', 12, 900, _layouts),
  Kind('columns', 'inputs', 6, 900, _columns),
  Kind('ops', 'inputs', 12, 900, _ops),
]
