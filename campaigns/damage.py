"""Damages files: what is read must be what was written, or be refused in one line."""

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from campaigns.processes import (
  EXACT,
  INCREMENTS,
  SOON,
  Fault,
  Job,
  difference,
  half_trained,
  undisturbed,
)
from campaigns.units import TRACE, Found, Kind, fork, in_child, killed_in_the_end, text_of, told
from ops.sharding import SHARDS
from tests.support import commands, kept_state
from tests.support.exports import Run
from tests.support.scorer import Client
from trainer import config, files
from trainer.errors import DataLoss, UserError

TRIALS = 20  # of a unit
RUNS = 5  # likewise, of what needs a training
SECONDS_TO_HEAL = 120  # of a store that is in use, on a busy machine
_LONGEST = 2000  # characters of a message


def damage(draw: random.Random, path: str) -> str:
  """Damages a file; returns what it did."""
  with open(path, 'rb') as f:
    data = bytearray(f.read())
  at = draw.randrange(max(1, len(data)))
  how = draw.choice(['flip', 'flip', 'flip', 'flip', 'cut', 'zero', 'insert', 'remove', 'empty'])
  if not data and how not in ('insert', 'remove'):
    how = 'insert'
  match how:
    case 'flip':
      data[at] ^= 1 << draw.randrange(8)
    case 'cut':
      del data[at:]
    case 'zero':
      end = min(len(data), at + draw.choice([1, 16, 512, 4096]))
      data[at:end] = bytes(end - at)
    case 'insert':
      data[at:at] = draw.randbytes(draw.choice([1, 2, 8]))
    case 'empty':
      data.clear()
  os.remove(path)  # other links keep the old content
  if how != 'remove':
    with open(path, 'wb') as f:
      f.write(data)
  return f'{how} at {at} of {os.path.basename(path)}'


def files_below(folder: str) -> list[str]:
  """Returns the paths of all files in and below a folder, in order."""
  return sorted(os.path.join(base, n) for base, _, names in os.walk(folder) for n in names)


def copy(source: str, target: str) -> None:
  """Replaces a folder by hard links to the files of another."""
  shutil.rmtree(target, ignore_errors=True)
  shutil.copytree(source, target, copy_function=os.link)


def _read_or_refused(
  found: Found, what: str, read: Callable[[], Any], is_right: Callable[[Any], bool]
) -> None:
  """Adds a trial to `found`: the result of `read` must be right, or it refuses in one line."""
  try:
    result = read()
  except (UserError, FileNotFoundError) as e:
    text = str(e)
    wrong = '\n' in text or len(text) > _LONGEST
    found.trial('refused in one line', f'{what}: {text}' if wrong else None)
  except Exception as e:
    found.trial('', f'{what}: {type(e).__name__}: {str(e)[:300]}')
  else:
    found.trial('read rightly', None if is_right(result) else f'{what}: read another content')


def _checkpoints(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes a file of one checkpoint or of each; half of the time, of those with increments.

  Either a saved state is restored, bit by bit, or all are refused in one line.
  """
  path, _ = undisturbed('single' + draw.choice(['', INCREMENTS]), shared)
  from trainer.comm.communicator import SingleProcess
  from trainer.job.job import Job as TrainingJob
  from trainer.training.step import TrainStep

  source, run_dir = f'{os.path.dirname(path)}/run/checkpoints', f'{folder}/run'
  cfg = config.load(path, [], run_dir)
  job = TrainingJob(cfg, SingleProcess(), TrainStep(cfg, SingleProcess()))

  def state() -> tuple[Any, ...]:
    rows = {}
    for chunk in job.step.store.export_state():
      columns = {n: c for n, c in chunk.items() if np.ndim(c) and not n.startswith('factors')}
      for i, key in enumerate(chunk['key'].tolist()):
        rows[key] = tuple(c[i].tobytes() for c in columns.values())
      rows[f'factors of shard {chunk["key"][:1]}'] = chunk['factors_default'].tobytes()
    dense = {name: value.tobytes() for name, value in job.step.dense_state().items()}
    return rows, dense, vars(job.progress).copy(), job.state.ledger.state()

  names = sorted(os.listdir(source))
  good = {}
  for name in names:  # restore each alone, undamaged
    copy(f'{source}/{name}', f'{run_dir}/checkpoints/{name}')
    job.state.restore()
    good[name] = state()
    shutil.rmtree(f'{run_dir}/checkpoints')
  found = Found()
  for _ in range(TRIALS):
    copy(source, f'{run_dir}/checkpoints')
    harmed = draw.choice([[names[-1]], [names[-1]], names, names[:-1]])
    what = [damage(draw, draw.choice(files_below(f'{run_dir}/checkpoints/{n}'))) for n in harmed]
    _read_or_refused(
      found,
      str(what),
      job.state.restore,
      lambda there, all_harmed=harmed == names: state() in good.values() if there else all_harmed,
    )
  return found


def _damage_shared(draw: random.Random, run_dir: str) -> str | None:
  """Damages a file of a complete checkpoint, where all that share it have the damage.

  Returns what it did; None if there are not two checkpoints yet.
  """
  done = [
    entry.path
    for entry in os.scandir(f'{run_dir}/checkpoints')
    if files.is_done(entry.path) and not entry.name.endswith(files.UNFINISHED)
  ]
  if len(done) < 2:
    return None
  layers: dict[str, list[str]] = {}  # the paths of a file's links, by its name
  for path in sorted(file for one in done for file in files_below(one)):
    name = os.path.basename(path)
    layers.setdefault(name if name.startswith('rows-') else path, []).append(path)
  path = draw.choice(draw.choice(list(layers.values())))
  how, size = draw.choice(['flip', 'flip', 'cut', 'remove']), os.path.getsize(path)
  if how == 'cut':
    os.truncate(path, draw.randrange(max(1, size)))
  elif how == 'remove':
    os.remove(path)
  else:
    with open(path, 'r+b') as f:
      f.seek(at := draw.randrange(size))
      byte = f.read(1)[0]
      f.seek(at)
      f.write(bytes([byte ^ 1 << draw.randrange(8)]))
  return f'{how} of {os.path.relpath(path, run_dir)}, with {len(done)} checkpoints'


def _linked(draw: random.Random, folder: str, shared: str) -> Found:
  """Flips a bit of a file that checkpoints share, cuts or removes it, at a random moment of a run.

  The run is killed at a random call, before or after that, and continued. With two or more
  checkpoints kept, it must go on from one of them and end as an undisturbed one, bit by bit.
  """
  mode, found = draw.choice(EXACT) + INCREMENTS, Found()
  config, reference = undisturbed(mode, shared)
  first = Job.names[mode.removesuffix(INCREMENTS)][-1 if mode.startswith('ps') else 0]
  for i in range(RUNS):
    keep, run_dir = draw.choice([2, 3, 10]), f'{folder}/{i}/run'
    flags = ['--config', config, '--run_dir', run_dir, '--set', f'checkpoint.keep={keep}']
    os.makedirs(f'{folder}/{i}/again')
    after, log = draw.randrange(2, 16), f'{folder}/{i}/damage.log'

    def damage_in_time(run_dir: str = run_dir, after: int = after) -> None:
      name = f'{run_dir}/checkpoints/ckpt-{after:09d}'
      while not files.is_done(name):
        time.sleep(0.005)  # between looks
      time.sleep(draw.random() / 10)
      told = None
      while told is None:
        with contextlib.suppress(FileNotFoundError):  # the job removed it
          told = _damage_shared(draw, run_dir)
      print(told, flush=True)

    job = Job(f'{folder}/{i}', mode, flags)
    calls = reference['first'][first]['calls']
    fault = Fault(signal.SIGKILL, draw.randrange(calls // 3, calls))
    job.start({first: fault.arm})
    with killed_in_the_end([fork(damage_in_time, log)]):
      job.wait(SOON)
    job.end()
    what, place = text_of(log).strip(), 'while it ran'
    if not what:
      place = 'after it was killed'
      os.makedirs(f'{run_dir}/checkpoints', exist_ok=True)
      what = str(_damage_shared(draw, run_dir))
    again = Job(f'{folder}/{i}/again', mode, flags)
    again.start()
    left = again.wait(SOON)
    again.end()
    said, statuses = again.said(), set(again.statuses.values())
    wrong = f'ended with {statuses}, {left}: {said[-1500:]}' if statuses != {0} or left else None
    if TRACE in job.said() + said or what == TRACE:
      wrong = wrong or f'a stack trace: {(job.said() + said)[-2000:]}'
    wanted = f'{os.path.dirname(config)}/run'
    wrong = wrong or in_child(
      lambda at=run_dir, wanted=wanted: difference(mode, at, wanted, 1), f'{folder}/{i}'
    )
    ended = f'{place}: the same' if what != 'None' else 'killed before the second checkpoint'
    found.trial(ended, wrong and f'{mode}, keep {keep}, {fault}, {what}: {wrong}')
  return found


def _prepared(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes a file of a prepared pass. The batches must be the same, or be refused in one line."""
  path, _ = undisturbed('single', shared)
  from trainer.data.prepared import PreparedPass

  cfg, source = config.load(path), f'{os.path.dirname(path)}/run/prepared/train/day_0'

  def read(at: str) -> list[bytes]:
    one = PreparedPass(at, cfg)
    batches = one.batches(64, rank=0, size=1, seed=0, epoch=0, shuffle=False, start_batch=0)
    return [np.asarray(array).tobytes() for batch in batches for array in batch]

  wanted, found = read(source), Found()
  for _ in range(TRIALS * 2):
    copy(source, f'{folder}/pass')
    what = damage(draw, draw.choice(files_below(f'{folder}/pass')))
    _read_or_refused(found, what, lambda: read(f'{folder}/pass'), lambda got: got == wanted)
  return found


def _exports(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes a file of a chain of exports.

  The replay, its keys, dense variables and config must be those of an export that was written, or
  be refused in one line.
  """
  path, _ = undisturbed('single', shared)
  from trainer.storage import chain

  source = f'{os.path.dirname(path)}/run/exports'

  def read(at: str) -> list[Any]:
    links, replay = chain.chain(at), {}
    if not links:
      raise DataLoss('no base or delta is left')
    for link in links:
      for key in link.tombstones().tolist():
        replay.pop(key, None)
      for rows in link.rows():
        ends = np.cumsum(rows.counts)
        for key, linear, n, end in zip(rows.key.tolist(), rows.linear, rows.counts, ends):
          replay[key] = linear, rows.factors[end - n : end].tobytes()
    live = chain.Replay().live_keys([link.path for link in links], range(SHARDS)).all().tolist()
    dense = {name: value.tobytes() for name, value in links[-1].dense().items()}
    return [links[-1].name, replay, live, dense, links[-1].config()]

  states = []  # after each export of the chain; damage to the last ones leaves an earlier state
  copy(source, f'{folder}/exports')
  while chain.exports(f'{folder}/exports'):
    states.append(read(f'{folder}/exports'))
    shutil.rmtree(chain.exports(f'{folder}/exports')[-1].path)
  found = Found()
  for _ in range(TRIALS * 2):
    copy(source, f'{folder}/exports')
    what = damage(draw, draw.choice(files_below(f'{folder}/exports')))
    _read_or_refused(found, what, lambda: read(f'{folder}/exports'), lambda got: got in states)
  return found


def _train(folder: str, flags: list[str]) -> Job:
  """Runs a job in a process to its end."""
  job = Job(folder, 'single', flags)
  job.start()
  job.wait(SOON)
  job.end()
  return job


def _run_dirs(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes config.yaml, ledger.jsonl, metrics.jsonl, owner.json, report.html or TensorBoard's
  files, and continues the run. It must end as an undisturbed one and tell what is wrong with its
  reports, or refuse config.yaml in one line.
  """
  path, _ = undisturbed('single', shared)
  source, wanted, found = half_trained(shared), f'{os.path.dirname(path)}/run', Found()
  names = ['ledger.jsonl', 'metrics.jsonl', 'metrics.jsonl', 'config.yaml', 'owner.json']
  for i in range(RUNS):
    run_dir, name = f'{folder}/{i}/run', draw.choice([*names, 'tensorboard', 'report.html'])
    shutil.copytree(source, run_dir)
    what = damage(draw, draw.choice(files_below(f'{run_dir}/{name}') or [f'{run_dir}/{name}']))
    job = _train(f'{folder}/{i}', ['--config', path, '--run_dir', run_dir])
    status, said = job.statuses.get('single'), job.said()
    wrong = None
    if TRACE in said or status not in (0, 1, 2):
      wrong = f'ended with {status}: {said[-1500:]}'
    elif status == 1 and 'but the reports are not' not in said:
      wrong = f'ended with 1: {said[-600:]}'
    elif status == 2 and (name != 'config.yaml' or 'config.yaml' not in said):
      wrong = f'ended with 2: {said[-600:]}'
    elif status != 2:
      but = ['events'] if name == 'metrics.jsonl' else []
      wrong = in_child(lambda at=run_dir, but=but: difference('single', at, wanted, 0, but), folder)
    ends = ['the same', 'the same, and told of the reports', 'refused in one line']
    found.trial(ends[status or 0], wrong and f'{what}: {wrong}')
  return found


def _configs(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes config.yaml or metrics.jsonl.

  The config that is read must be the one that the run wrote, or be refused in one line.
  """
  from trainer.tools.runs import read_run

  source, found = half_trained(shared), Found()
  whole = config.load_of_run(source).model_dump(exclude={'run_dir'})
  for _ in range(TRIALS * 5):
    for name in ('config.yaml', 'metrics.jsonl'):
      shutil.copyfile(f'{source}/{name}', f'{folder}/{name}')
    name = draw.choice(['config.yaml', 'config.yaml', 'metrics.jsonl'])
    what = damage(draw, f'{folder}/{name}')
    _read_or_refused(
      found,
      what,
      lambda: read_run(folder).cfg.model_dump(exclude={'run_dir'}),
      lambda read: read == whole,
    )
  return found


def _old_state(draw: random.Random, folder: str, shared: str) -> Found:
  """Damages one to three files of what the release before has left, or removes a folder of it; then
  goes on with the run, predicts from it, or publishes its exports onto its store and serves that.

  The numbers must be those of that release, or it is refused in one line. What is predicted may be
  of an older checkpoint, if that is told.
  """
  found = Found()
  for i in range(RUNS):
    at = f'{folder}/{i}'
    kept_state.unpack(kept_state.ARCHIVE, at)
    with open(f'{at}/numbers.json', encoding='utf-8') as f:
      numbers = json.load(f)
    act = draw.choice(['go on', 'predict', 'publish'])
    name = {'go on': 'epochs', 'predict': draw.choice(['epochs', 'days', 'killed', 'topic'])}.get(
      act
    )
    place = name or draw.choice(['days/exports', 'days_store'])
    if draw.random() < 0.2:
      folders = sorted(one.path for one in os.scandir(f'{at}/{place}') if one.is_dir())
      harmed = draw.choice(folders or [f'{at}/{place}'])
      shutil.rmtree(harmed)
      what = f'{act} without {harmed}'
    else:
      some = [draw.choice(files_below(f'{at}/{place}')) for _ in range(draw.choice([1, 1, 3]))]
      what = f'{act}: {[damage(draw, path) for path in dict.fromkeys(some)]}'
    read = [f'--run_dir={name}', '--data=log/test.csv', '--checkpoint=last']
    steps = {
      'go on': [['run', '--config=epochs.yaml', '--set=train.epochs=4'], ['predict', *read]],
      'predict': [['predict', *read]],
      'publish': [['publish', '--run_dir=days', '--to=days_store', '--once']],
    }[act]
    for command, *flags in steps:
      done = commands.run('-m', commands.module(command), *flags, cwd=at, timeout=SOON)
      if done.returncode:
        break
    wrong = None
    if TRACE in done.stderr or done.returncode not in (0, 2):
      wrong = f'status {done.returncode}: {done.stderr[-1500:]}'
    elif done.returncode == 2:
      wrong = None if len(told(done.stderr)) == 1 else f'not one line: {done.stderr[-1500:]}'
    elif act == 'predict' and 'instead' in done.stderr:
      pass
    else:
      if act == 'publish':
        got = kept_state.served(at, commands.start, '--store', 'days_store')
        wanted = numbers['read']['served of the store']
      else:
        got = [float(line) for line in done.stdout.split()]
        names = {'epochs': 'predicted by the last of epochs'}
        wanted = numbers['gone on' if act == 'go on' else 'read'][
          names.get(name, f'predicted by {name}')
        ]
      if not np.allclose(got, wanted, rtol=0.01):
        wrong = f'other numbers: {got[:3]}, wanted {wanted[:3]}: {done.stderr[-600:]}'
    ends = 'refused in one line' if done.returncode else 'right, or told'
    found.trial(ends, wrong and f'{what}: {wrong}')
  return found


def _harm(draw: random.Random, folder: str) -> str:
  """Harms the files of a store in place; returns what it did."""
  name = draw.choice(['data.mdb', 'data.mdb', 'lock.mdb'])
  path = f'{folder}/{name}'
  how = draw.choice(['scatter', 'scatter', 'run', 'zero', 'cut', 'remove'])
  with open(path, 'r+b') as f:
    size = os.path.getsize(path)
    at = draw.randrange(size)
    match how:
      case 'scatter':
        for _ in range(200 if name == 'data.mdb' else 64):
          f.seek(draw.randrange(size))
          f.write(draw.randbytes(1))
      case 'run' | 'zero':
        count = draw.choice([64, 200, 4096])
        f.seek(at)
        f.write(draw.randbytes(min(count, size - at)) if how == 'run' else bytes(size - at))
      case 'cut':
        f.truncate(at if name == 'data.mdb' else 0)
      case 'remove':
        os.remove(path)
  return f'{how} at {at} of {name}'


def _open_stores(draw: random.Random, folder: str, shared: str) -> Found:
  """Changes bytes of an LMDB store that a publisher writes and a server reads, cuts or removes its
  files. What is answered must be right, and the next version be served soon, without a trace."""
  run, found = Run(f'{folder}/run', draw.randrange(2**32)), Found()
  out = open(f'{folder}/log', 'w+b')
  words = {
    'publish': ['--run_dir', f'{folder}/run', '--to', f'{folder}/store'],
    'serve': ['--store', f'{folder}/store', '--port', '0', '--processes', draw.choice('12')],
  }
  run.train()
  run.export('base')
  at_work = [
    commands.start('-m', commands.module(name), *flags, stdout=out, stderr=out)
    for name, flags in words.items()
  ]

  def said(pattern: str) -> list[str]:
    return re.findall(pattern, text_of(out.name))

  def answers() -> int:
    """Asks for the scores of all features; returns the version, 0 without an answer."""
    client = Client(int(said(r'serving http://127.0.0.1:(\d+)/')[-1]))
    try:
      status, answer = client.predict({'instances': instances})
    except (OSError, http.client.HTTPException):
      return 0
    finally:
      client.close()
    if status != 200:
      assert status == 503, answer
      return 0
    version = int(answer['model_version'])
    wanted = [run.score(version, {s: [t] for s, t in one.items()}) for one in instances]
    assert np.abs(np.array(wanted) - answer['predictions']).max() < 1e-6, 'other scores'
    return version

  slots = list(dict.fromkeys(name for name, _ in run.keys))
  texts = [text for name, text in run.keys if name == slots[0]]
  instances = [dict.fromkeys(slots, text) for text in texts]

  def served(version: int) -> str | None:
    """Waits until a version is served; returns what went wrong."""
    deadline = time.monotonic() + SECONDS_TO_HEAL
    while time.monotonic() < deadline:
      if ended := [one for one in at_work if one.poll() is not None]:
        return f'{len(ended)} ended with {[one.poll() for one in ended]}'
      try:
        if said('serving http') and answers() == version:
          return 'a trace' if TRACE in text_of(out.name) else None
      except AssertionError as e:
        return str(e)
      time.sleep(0.05)
    return f'version {version} is not served after {SECONDS_TO_HEAL} s'

  try:
    wrong = served(1)
    for _ in range(TRIALS):
      what = 'nothing'
      if not wrong:
        what = _harm(draw, f'{folder}/store')
        run.train()
        wrong = served(run.export(draw.choice(['delta', 'delta', 'base'])))
      told = 'written anew' if said('is written anew') else 'went on'
      found.trial(told, wrong and f'{what}: {wrong}: {text_of(out.name)[-1500:]}')
      if wrong:
        break
  finally:
    for one in at_work:
      one.kill()
  return found


KINDS = [
  Kind('damaged checkpoints', 'faults', 15, 3000, _checkpoints),
  Kind('linked layers damaged', 'faults', 12, 3000, _linked),
  Kind('damaged prepared passes', 'faults', 10, 3000, _prepared),
  Kind('damaged run_dirs', 'faults', 8, 3000, _run_dirs),
  Kind('damaged configs', 'faults', 4, 3000, _configs),
  Kind('damaged exports', 'faults', 10, 3000, _exports),
  Kind('old state', 'faults', 10, 3000, _old_state),
  Kind('damaged open stores', 'faults', 10, 3000, _open_stores),
]
