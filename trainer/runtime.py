"""This process's place in the job: ranks, devices, threads and seeds.

Only this file reads environment variables. It imports TensorFlow and Horovod only in `start`.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import ipaddress
import json
import os
import random
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import numpy as np
import psutil
from absl import logging

from trainer import files
from trainer.config import Config, Sync
from trainer.errors import UserError
from trainer.plain_data import Json

Device = TypeVar('Device')  # as TensorFlow lists them

# With Keras 3, Horovod's wrappers train without any allreduce.
os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
# TensorFlow logs a harmless "Unable to register cuFFT factory" as an error; real ones are raised.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
os.environ.setdefault('GRPC_VERBOSITY', 'NONE')  # else C++ also tells that a port is in use

# How often Horovod asks all ranks for work. 1 ms costs least where each rank has a core or two
# (docs/performance.md).
_CYCLE_MILLISECONDS = 1

_LOST = 3  # the exit status of a job whose ranks have not met
HOST = 'CPU:0'  # the device of rows, of the ops on rows, and of metrics

# Options of glibc's mallopt and their bytes: M_MMAP_THRESHOLD (larger blocks go back to the system
# at once; 32 MiB is the maximum), M_TRIM_THRESHOLD (what stays free at the end of the heap) and
# M_TOP_PAD (keeps the empty heaps of threads, which have 64 MiB).
_MALLOC_OPTIONS = {-3: 32 << 20, -1: 256 << 20, -2: 64 << 20}


@dataclasses.dataclass(frozen=True)
class Runtime:
  """The place of this process among the ranks of its job; by default, it is the only one."""

  rank: int = 0
  size: int = 1
  local_rank: int = 0  # among the ranks of this host
  local_size: int = 1
  host: str | None = None  # where other ranks reach this one; None: all are on this machine
  rendezvous: str = ''  # the URL of horovodrun's key-value store
  secret: bytes = b''  # known only to the processes of the job; empty if the launcher made none


def launched() -> Runtime:
  """Returns this process's place in its job, from environment variables that horovodrun sets.

  UserError: MPI started several processes, a variable has a wrong value, or this host has no
  address on the job's network.
  """
  for name in ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE'):
    if _number(name, '1') > 1 and 'HOROVOD_SIZE' not in os.environ:
      raise UserError(
        f'environment variable {name}: found {os.environ[name]}, so MPI started these processes; '
        'wanted horovodrun, as in horovodrun -np 2 python -m trainer.run …'
      )
  size = _number('HOROVOD_SIZE', '1', least=1)
  rank = _number('HOROVOD_RANK', '' if size > 1 else '0', most=size - 1)
  if size == 1:
    return Runtime()
  local_size = _number('HOROVOD_LOCAL_SIZE', least=1)
  local_rank = _number('HOROVOD_LOCAL_RANK', most=local_size - 1)
  address = os.environ.get('HOROVOD_GLOO_RENDEZVOUS_ADDR', '')
  host, token = address.partition('/')[::2]
  port = _number('HOROVOD_GLOO_RENDEZVOUS_PORT', least=1, most=65535)
  if not _HOST.fullmatch(host):
    raise UserError(
      f"environment variable HOROVOD_GLOO_RENDEZVOUS_ADDR: found '{host[:40]}'; wanted the host "
      'of horovodrun, which sets it'
    )
  if ':' in address and not token:  # of IPv6
    address = f'[{address}]'
  one_machine = local_size == size
  return Runtime(
    rank,
    size,
    local_rank,
    local_size,
    None if one_machine else _address_of(os.environ.get('HOROVOD_GLOO_IFACE', '')),
    f'http://{address}:{port}',
    secret(),
  )


def secret() -> bytes:
  """Returns the secret of CTR_SECRET_FILE, at least 16 characters; b'' if that is not set."""
  path = os.environ.get('CTR_SECRET_FILE')
  if not path:
    return b''
  try:
    text = files.read_small(path, 1024).strip()
  except OSError as e:
    raise UserError(f'environment variable CTR_SECRET_FILE: {path}: {e.strerror}') from None
  except UserError as e:
    raise UserError(f'environment variable CTR_SECRET_FILE: {e}') from None
  if len(text) < 16:
    raise UserError(
      f'environment variable CTR_SECRET_FILE: {path} holds {len(text)} characters; wanted at least '
      '16 random ones, the same on all hosts'
    )
  return text


def working_directory(run_dir: str) -> str:
  """Returns the local working directory of a run whose run_dir is in a bucket.

  It lies below CTR_WORK_DIR, which ranks on several hosts need (UserError) and must share or, if
  that is not set, below a cache directory of the user.
  """
  if not os.environ.get('CTR_WORK_DIR') and launched().host:
    raise UserError(
      f'run_dir {run_dir}: the ranks run on several hosts; wanted the environment variable '
      'CTR_WORK_DIR, a directory that all of them share, from which the run is copied there'
    )
  root = os.environ.get('CTR_WORK_DIR') or os.path.expanduser('~/.cache/ctr-trainer/runs')
  return os.path.join(root, run_dir.replace('://', os.sep))


def rank() -> int:
  """Returns the rank that horovodrun gave this process; 0 without horovodrun."""
  text = os.environ.get('HOROVOD_RANK', '0')
  return int(text) if _DIGITS.fullmatch(text) else 0  # `launched` says what is wrong with it


_DIGITS = re.compile('[0-9]{1,6}')
_HOST = re.compile('[0-9A-Za-z_.:%-]{1,255}')  # a name, or an address of IPv4 or IPv6


def _number(name: str, default: str = '', least: int = 0, most: int = 999_999) -> int:
  """Returns the whole number of an environment variable; a UserError for any other value."""
  text = os.environ.get(name, default)
  if not _DIGITS.fullmatch(text) or not least <= int(text) <= most:
    raise UserError(
      f"environment variable {name}: found '{text[:40]}'; wanted a whole number >= {least} and <= "
      f'{most}'
    )
  return int(text)


def is_terminal() -> bool:
  """Returns whether this process prints to a terminal, directly or through launch/ranks.py."""
  return sys.stdout.isatty() or os.environ.get('CTR_TERMINAL') == '1'


def _address_of(interface: str) -> str:
  """Returns the address of a network interface: IPv4 before IPv6, link-local ones last."""
  interfaces, families = psutil.net_if_addrs(), (socket.AF_INET, socket.AF_INET6)
  addresses = [a.address for a in interfaces.get(interface, []) if a.family in families]
  if not addresses:
    raise UserError(
      f"network interface '{interface}' (HOROVOD_GLOO_IFACE) has no address on this host; wanted "
      f'one of {sorted(interfaces)} that all hosts have, as in launch/cluster.sh -i eth0'
    )

  def preference(address: str) -> tuple[bool, bool]:
    parsed = ipaddress.ip_address(address.partition('%')[0])
    return parsed.is_link_local, parsed.version == 6

  return min(addresses, key=preference)


def tf_config() -> Json:
  """Returns TF_CONFIG, decoded from JSON, or a UserError about it; None if it is not set."""
  text = os.environ.get('TF_CONFIG')
  if not text:
    return None
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as e:
    raise UserError(f'environment variable TF_CONFIG: not JSON: {e}') from None


_INHERITED = 'CTR_INHERITED_CONNECTION'  # set only by `restart`


def restart(connection: int) -> NoReturn:
  """Replaces this program by a new one of the same command, which inherits this descriptor."""
  os.environ[_INHERITED] = str(connection)
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def inherited_connection() -> int | None:
  """Returns the connection that `restart` left to this program; None if it left none."""
  if _INHERITED not in os.environ:
    return None
  connection = _number(_INHERITED)
  del os.environ[_INHERITED]  # not for the processes that this one starts
  return connection


def start(cfg: Config, runtime: Runtime = Runtime(), end: Callable | None = None) -> None:
  """Imports TensorFlow, connects to the other ranks, and sets the GPU, threads and seeds.

  Call this once, before any op of TensorFlow runs. `end` is called in a thread, with a reason and
  an exit status, where ranks do not meet in time. UserError: this host has too few GPUs, its own
  name has no address, or CTR_THREADS is not a number.
  """
  keep_freed_memory()
  import tensorflow as tf

  gpus = tf.config.list_physical_devices('GPU')
  if runtime.size > 1:
    _join_horovod(runtime, cfg.sync, gpus, end)
  gpu = visible_gpu(runtime.local_rank, gpus)
  if gpu is not None:
    tf.config.set_visible_devices(gpu, 'GPU')
    tf.config.experimental.set_memory_growth(gpu, True)
  threads = _threads(runtime.local_size)
  try:
    tf.config.threading.set_intra_op_parallelism_threads(threads)
  except RuntimeError:  # a notebook, say, has used TensorFlow before
    if tf.config.threading.get_intra_op_parallelism_threads() != threads:
      logging.warning('TensorFlow runs already; it keeps its number of threads, not %d', threads)
  seed_everything(cfg.seed)
  if cfg.train.deterministic:
    tf.config.experimental.enable_op_determinism()


def keep_freed_memory() -> None:
  """Lets glibc keep freed memory for the next step; returning it may take a tenth of each step."""
  with contextlib.suppress(AttributeError):  # not glibc
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in _MALLOC_OPTIONS.items():
      mallopt(option, value)


def start_serving() -> None:
  """Imports TensorFlow and prepares it to serve many small requests at once, on CPUs only."""
  import tensorflow as tf

  tf.config.set_visible_devices([], 'GPU')
  # Requests run beside one another; cutting one into pieces costs more than it gains.
  tf.config.threading.set_intra_op_parallelism_threads(1)


def _join_horovod(
  runtime: Runtime, sync: Sync, gpus: Sequence[Device], end: Callable | None
) -> None:
  name = socket.gethostname()
  try:  # Gloo does the same, and ends with a segmentation fault if it fails
    socket.getaddrinfo(name, None)
  except OSError as e:
    raise UserError(
      f"this host's own name, '{name}', has no address ({e.strerror}), which Horovod needs; wanted "
      f"a line '127.0.0.1 {name}' in /etc/hosts, or a name that is known"
    ) from None
  if not gpus:  # with GPUs, the cores are free enough for Horovod's own choice
    os.environ.setdefault('HOROVOD_CYCLE_TIME', str(_CYCLE_MILLISECONDS))
  # Gloo's error does not name the lost rank; the heartbeat's does, so Gloo must wait longer.
  patience = str(int(sync.lost_peer_seconds) + 60)
  os.environ.setdefault('HOROVOD_GLOO_TIMEOUT_SECONDS', patience)
  seconds = 0.95 * _number('HOROVOD_GLOO_TIMEOUT_SECONDS', least=1)  # before Gloo aborts this rank
  why = (
    f'the ranks did not meet within {seconds:.0f} s: one is slower, or what is no rank has '
    "connected to Gloo's port. The job ends; run the same command again"
  )
  late = threading.Timer(seconds, end, (why, _LOST))
  late.daemon = True
  import horovod.tensorflow as hvd

  own_threads = '/proc/self/task'  # Linux lists this process's threads there
  before = set(os.listdir(own_threads))
  faulthandler.disable()  # Gloo aborts where another rank is gone; its own line says so
  late.start()
  hvd.init()
  late.cancel()
  faulthandler.enable()
  if hvd.nccl_built() and not gpus and not runtime.rank:
    logging.warning('Horovod is built for GPUs, but TensorFlow finds none: the job trains on CPUs')
  # Gloo's thread may preempt a thread that holds its lock, and spins until that thread runs again:
  # with few cores this takes a tenth of a step. Threads with SCHED_BATCH do not preempt others.
  for thread in set(os.listdir(own_threads)) - before:
    with contextlib.suppress(OSError):  # it has ended; or a sandbox forbids this: steps are slower
      os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))


def visible_gpu(local_rank: int, gpus: Sequence[Device]) -> Device | None:
  """Returns the GPU of this rank; None without GPUs, a UserError with fewer than ranks."""
  if gpus and local_rank >= len(gpus):
    raise UserError(
      f'local rank {local_rank} has no GPU: this host has {len(gpus)}; wanted at most {len(gpus)} '
      'ranks on it, or CUDA_VISIBLE_DEVICES= to train on its CPUs'
    )
  return gpus[local_rank] if gpus else None


def dense_device() -> str:
  """Returns the device of dense layers and their optimizer: this process's GPU, else the CPU."""
  import tensorflow as tf

  return 'GPU:0' if tf.config.get_visible_devices('GPU') else HOST


def _threads(local_size: int) -> int:
  """Returns the number of threads of a process: CTR_THREADS, or its share of the host's cores."""
  if 'CTR_THREADS' not in os.environ:
    return max(1, len(os.sched_getaffinity(0)) // local_size)
  return _number('CTR_THREADS', least=1, most=4096)


def seed_everything(seed: int) -> None:
  """Seeds Python, NumPy and TensorFlow."""
  import tensorflow as tf

  random.seed(seed)
  np.random.seed(seed % 2**32)
  tf.random.set_seed(seed)
