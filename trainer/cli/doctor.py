"""Checks whether a job can run here, and how fast: `ctr-doctor [--run_dir DIR] …`.

Alone it checks this machine; under horovodrun it checks the machine of each rank and the network
between them. Each line begins with ok, slow or wrong; a line that is not ok says what to do. The
exit status is 2 if any line is wrong.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import psutil
from absl import flags

from trainer import command_line, config, files, runtime
from trainer.comm.heartbeat import Heartbeat
from trainer.data.file_system import is_remote
from trainer.errors import UserError

if TYPE_CHECKING:  # importing TensorFlow takes seconds
  from trainer.comm.communicator import Communicator, RankCommunicator

CONFIG = flags.DEFINE_string('config', None, 'A YAML file: its run_dir and its section sync.')
RUN_DIR = flags.DEFINE_string('run_dir', None, 'The directory of a run, which may not exist yet.')
JSON = flags.DEFINE_bool('json', False, 'Prints one JSON object with the findings of all ranks.')

_STATES = 'ok', 'slow', 'wrong'
# A minimal config: without --config, the checks use its defaults.
_ANY_CONFIG = 'data: {train: [a], label: b, slots: [{name: c}]}\nmodel: {interactions: [fm]}'
_MB, _GB = 1e6, 1e9
_PAYLOAD = 16 << 20  # bytes of a timed transfer
_PROCESS_BYTES = 0.7 * _GB  # of a rank with TensorFlow and no rows


class Check(NamedTuple):
  """The result of one check on one rank."""

  name: str
  state: str  # one of _STATES
  found: str
  wanted: str = ''  # what to do if the state is not ok


@command_line.command
def main() -> int:
  here = runtime.launched()
  cfg = config.load(CONFIG.value) if CONFIG.value else config.parse(_ANY_CONFIG, 'doctor')
  with contextlib.ExitStack() as stack:
    heartbeat = stack.enter_context(Heartbeat(here, cfg)) if here.size > 1 else None
    runtime.start(cfg, here, heartbeat and heartbeat.end)
    from trainer.comm import horovod

    communicator = horovod.communicator(here, cfg.sync)
    checks = [
      _versions(communicator),
      _op_library(),
      _ranks(communicator, here),
      _processor(),
      _threads(here),
      _memory(here),
      _open_files(here),
      *_gpus(here, horovod.nccl_version()),
      _ports(cfg.sync),
    ]
    if here.size > 1:
      checks += [*_network(communicator), _clock(communicator)]
    if run_dir := RUN_DIR.value or (CONFIG.value and cfg.run_dir):
      checks.append(_run_dir(communicator, run_dir))
      if os.path.exists(os.path.join(run_dir, 'metrics.jsonl')):
        checks.append(_run(run_dir))
    per_rank = communicator.gather(checks)
    if here.rank == 0:
      _tell([[Check(*check) for check in checks] for checks in per_rank])
  return 2 if any(check[1] == 'wrong' for checks in per_rank for check in checks) else 0


def _tell(per_rank: Sequence[Sequence[Check]]) -> None:
  """Prints a line for each check, with the worst result of all ranks; with --json, all results."""
  if JSON.value:
    print(json.dumps({'ranks': [[c._asdict() for c in checks] for checks in per_rank]}), flush=True)
    return
  for same in zip(*per_rank):
    worst = max(same, key=lambda check: _STATES.index(check.state))
    ranks = [rank for rank, check in enumerate(same) if check.state == worst.state]
    where = f'; on rank {", ".join(map(str, ranks))}' if len(ranks) < len(same) else ''
    wanted = f'; wanted {worst.wanted}' if worst.state != 'ok' else ''
    print(f'{worst.state:5}  {worst.name:12}  {worst.found}{where}{wanted}', flush=True)


def _versions(communicator: 'Communicator') -> Check:
  versions = [f'Python {platform.python_version()}']
  for name in ('tensorflow', 'tf_keras', 'numpy', 'horovod', 'tensorflow-recommenders-addons'):
    try:
      versions.append(f'{name} {importlib.metadata.version(name)}')
    except importlib.metadata.PackageNotFoundError:
      versions.append(f'no {name}')
  own = ', '.join(versions)
  if own == (first := communicator.broadcast(own)):
    return Check('versions', 'ok', own)
  differ = f'{own}, but on rank 0 {first}'
  return Check('versions', 'wrong', differ, 'the same environment on all hosts')


def _op_library() -> Check:
  from ops import build, library

  try:
    library.load()
  except build.NotBuilt as e:
    return Check('op library', 'wrong', str(e), '`make setup`')
  return Check('op library', 'ok', os.path.basename(library.PATH))


def _ranks(communicator: 'Communicator', here: runtime.Runtime) -> Check:
  hosts = communicator.gather(socket.gethostname())
  told = ', '.join(f'{hosts.count(host)} on {host}' for host in dict.fromkeys(hosts))
  return Check('ranks', 'ok', told + (f'; rank 0 is reached at {here.host}' if here.host else ''))


def _processor() -> Check:
  with open('/proc/cpuinfo', encoding='utf-8') as f:
    cpu = dict(re.findall(r'^(model name|flags)\s*: (.*)$', f.read(), re.MULTILINE))
  model, able = cpu.get('model name', platform.machine()), cpu.get('flags', '').split()
  names = {'avx2': 'AVX2', 'avx512f': 'AVX-512', 'avx512_bf16': 'bfloat16', 'amx_bf16': 'AMX'}
  told = ', '.join(('' if flag in able else 'no ') + name for flag, name in names.items())
  state = 'ok' if 'avx2' in able or platform.machine() != 'x86_64' else 'slow'
  return Check('processor', state, f'{model}: {told}', 'a processor with AVX2')


def _threads(here: runtime.Runtime) -> Check:
  import tensorflow as tf

  cores = len(os.sched_getaffinity(0))
  quota = _cgroup('cpu.max')
  if quota and quota[0] != 'max':
    cores = min(cores, int(quota[0]) / int(quota[1]))
  threads = tf.config.threading.get_intra_op_parallelism_threads()
  load = os.getloadavg()[0]
  ranks = '1 rank' if here.local_size == 1 else f'each of {here.local_size} ranks'
  found = f'{threads} for {ranks} on {cores:g} cores, load {load:.1f}'
  if threads * here.local_size > cores:
    return Check('threads', 'slow', found, 'fewer ranks on this host, or CTR_THREADS unset')
  state = 'slow' if load > cores + here.local_size else 'ok'
  return Check('threads', state, found, 'cores that no other process uses')


def _cgroup(name: str) -> list[str]:
  """Returns the words in a file of this container's cgroup, such as a limit; [] if none."""
  try:
    with open(f'/sys/fs/cgroup/{name}', encoding='utf-8') as f:
      return f.read().split()
  except OSError:
    return []


def _memory(here: runtime.Runtime) -> Check:
  memory = psutil.virtual_memory()
  total, available = memory.total, memory.available
  limit, used = _cgroup('memory.max'), _cgroup('memory.current')
  if limit and used and limit[0] != 'max':
    total = min(total, int(limit[0]))
    available = min(available, total - int(used[0]))
  enough = available > here.local_size * _PROCESS_BYTES
  found = f'{available / _GB:.1f} of {total / _GB:.1f} GB available'
  wanted = f'{_PROCESS_BYTES / _GB} GB for each rank of this host, and its rows'
  return Check('memory', 'ok' if enough else 'wrong', found, wanted)


def _open_files(here: runtime.Runtime) -> Check:
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  need = 256 + 8 * here.size  # connections of ours and of Gloo's (docs/scale.md), beside files
  can_raise = hard == resource.RLIM_INFINITY or hard >= need
  wanted = f'`ulimit -n {need}`' if can_raise else f'a hard limit of {need} or more, set by root'
  return Check('open files', 'ok' if soft >= need else 'wrong', f'{soft} allowed', wanted)


def _gpus(here: runtime.Runtime, nccl: int | None) -> list[Check]:
  import tensorflow as tf

  of_driver, setup = '/proc/driver/nvidia/gpus', '`make setup DEVICE=gpu` (docs/gpu.md)'
  installed = len(os.listdir(of_driver)) if os.path.isdir(of_driver) else 0
  gpus = tf.config.list_physical_devices('GPU')
  names = [tf.config.experimental.get_device_details(gpu).get('device_name', '') for gpu in gpus]
  found = f'{len(gpus)} of {installed}{": " if gpus else ""}{", ".join(names)}'
  found = found if gpus or installed else 'none'
  state = 'ok' if len(gpus) >= installed else 'slow'
  of_gpu = Check('GPUs', state, found, f'{setup}, and CUDA_VISIBLE_DEVICES unset')
  if nccl is None:
    return [of_gpu, Check('NCCL', 'ok', 'no Horovod is installed: one process only')]
  state = 'slow' if gpus and not nccl and here.size > 1 else 'ok'
  return [of_gpu, Check('NCCL', state, f'version {nccl}' if nccl else 'not built', setup)]


def _ports(sync: config.Sync) -> Check:
  if sync.ports is None:
    return Check('ports', 'ok', 'any (sync.ports: null)')
  first, last = sync.ports
  free = 0
  for port in range(first, last + 1):
    with contextlib.suppress(OSError), socket.socket() as s:
      s.bind(('', port))
      free += 1
  found = f'{free} of {first} to {last} are free beside those of this job'
  wanted = 'one for each rank of this host, and one more where rank 0 runs'
  # With several ranks, this rank has its ports already.
  return Check('ports', 'ok' if free or runtime.launched().size > 1 else 'wrong', found, wanted)


def _seconds(times: int, action: Callable[[int], None], argument: int) -> float:
  """Returns the median duration of `times` calls, after one to warm up; every rank calls it."""
  seconds = []
  for _ in range(times + 1):
    began = time.perf_counter()
    action(argument)
    seconds.append(time.perf_counter() - began)
  return statistics.median(seconds[1:])


def _network(communicator: 'RankCommunicator') -> list[Check]:
  import tensorflow as tf

  size, exchange = communicator.size, communicator.row_exchange('doctor')

  def all_reduce(size_in_bytes: int) -> None:
    communicator.all_reduce([tf.zeros([size_in_bytes // 4])])

  def all_to_all(size_in_bytes: int) -> None:
    rows = max(1, size_in_bytes // 64 // size)  # to each rank
    exchange.all_to_all([tf.zeros([rows * size, 16])], tf.constant([rows] * size))

  checks = []
  # An all-reduce sends each byte twice: to where it is summed, and as part of the sum.
  for name, exchanged, ways in (('all-reduce', all_reduce, 2), ('all-to-all', all_to_all, 1)):
    latency = _seconds(20, exchanged, 4)
    rate = ways * (size - 1) / size * _PAYLOAD / _seconds(3, exchanged, _PAYLOAD)
    found = f'{1000 * latency:.2f} ms for 4 bytes, {rate / _MB:,.0f} MB/s sent by a rank'
    state = 'slow' if latency > 0.01 or rate < 125 * _MB else 'ok'
    wanted = 'cores that are idle, and a network of more than 1 Gbit/s (launch/cluster.sh -i NIC)'
    checks.append(Check(name, state, found, wanted))
  return checks


def _clock(communicator: 'Communicator') -> Check:
  rounds = []
  for _ in range(9):
    communicator.barrier()
    rounds.append(communicator.gather(time.time()))
  skews = [abs(statistics.median(t[r] - t[0] for t in rounds)) for r in range(communicator.size)]
  skew = max(skews)
  found = f'{skew:.3f} s between ranks 0 and {skews.index(skew)}'
  return Check('clock', 'wrong' if skew > 1 else 'ok', found, 'hosts that run NTP')


def _run_dir(communicator: 'Communicator', run_dir: str) -> Check:
  if is_remote(run_dir):
    return Check('run_dir', 'ok', f'{run_dir}: in a bucket, which is not looked at')
  folder = os.path.abspath(run_dir)
  while not os.path.exists(folder):
    folder = os.path.dirname(folder)
  found = communicator.gather('' if os.path.isdir(folder) else folder)
  if file := next(filter(None, found), None):
    return Check('run_dir', 'wrong', f'{file} is a file', 'a directory')
  probe = os.path.join(folder, communicator.broadcast(f'.doctor-{secrets.token_hex(8)}'))

  def write() -> float:
    began = time.perf_counter()
    files.write_synced(probe, bytes(_PAYLOAD))
    return _PAYLOAD / (time.perf_counter() - began)

  try:
    rate = communicator.on_first(f'cannot write into {folder}', write)
    is_same = os.path.exists(probe)
    communicator.barrier()
  except UserError as e:
    return Check('run_dir', 'wrong', str(e), 'another --run_dir')
  finally:
    if communicator.rank == 0:
      with contextlib.suppress(OSError):  # there is none where nothing can be written
        os.remove(probe)
  if not is_same:
    found = f'{folder} is not the directory of rank 0'
    return Check('run_dir', 'wrong', found, 'one that all hosts mount')
  free = shutil.disk_usage(folder).free
  found = f'{folder}: the same for all, {free / _GB:.0f} GB free, {rate / _MB:,.0f} MB/s written'
  if not os.path.isdir(run_dir):
    found = f'{run_dir} does not exist yet; {found}'
  if free < _GB:
    return Check('run_dir', 'wrong', found, 'more space')
  return Check('run_dir', 'slow' if rate < 20 * _MB else 'ok', found, 'a faster disk')


def _run(run_dir: str) -> Check:
  """Reports the state of a run, from its events and checkpoints."""
  from trainer.reporting.events import read_events
  from trainer.storage import run_lock
  from trainer.storage.checkpoint import candidates

  events = read_events(run_dir)
  if not len(events):
    return Check('run', 'ok', 'has begun, without an event yet')
  try:
    config.check_format(run_dir)
    if os.path.exists(os.path.join(run_dir, 'config.yaml')):
      config.load_of_run(run_dir)
  except UserError as e:
    return Check('run', 'wrong', *str(e).split('; wanted ', 1))
  last = events.iloc[-1]
  status = last['status'] if last['event'] == 'end' else run_lock.in_words(run_dir)
  at = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(last['time']))
  refused = int((events['fate'] == 'refused').sum()) if 'fate' in events else 0
  serials = candidates(os.path.join(run_dir, 'checkpoints'))
  damaged = [path for path, serial in serials.items() if serial is None]
  found = f'{status}, last event at {at}, step {last["step"]:,}; {len(serials)} checkpoints'
  found += f'; {refused} passes refused ({run_dir}/report.html has more)'
  if damaged:
    told = f'{damaged[0]} is damaged; {found}'
    return Check('run', 'wrong', told, 'an older one, see the runbook')
  return Check('run', 'ok' if serials else 'wrong', found, 'a checkpoint: nothing is saved yet')


if __name__ == '__main__':
  main()
