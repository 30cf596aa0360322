"""The only reader of the environment: ranks, device pinning, threads and seeds. Import it before TensorFlow."""
import dataclasses
import json
import os
import random

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')  # with Keras 3, Horovod's wrappers train without any allreduce
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

import numpy as np
import tensorflow as tf

from trainer.config import UserError

# Set by horovodrun, by Open MPI and by MPICH: any of them says that this process is one rank of several.
RANK_VARIABLES = ('HOROVOD_SIZE', 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE')


@dataclasses.dataclass(frozen=True)
class Runtime:
  """Where this process stands among its peers."""
  rank: int = 0
  size: int = 1
  local_rank: int = 0
  local_size: int = 1
  host: str = 'localhost'  # as the peers reach it

  @property
  def is_chief(self):
    return self.rank == 0


def visible_gpu(local_rank, gpus):
  """The one GPU of `gpus` that this rank uses, or None where there is none.

  Raises: UserError where more ranks run on this host than it has GPUs.
  """
  if not gpus:
    return None
  if local_rank >= len(gpus):
    raise UserError(f'local rank {local_rank} has no GPU: this host has {len(gpus)}; wanted at most {len(gpus)} ranks on it, '
                    'or CUDA_VISIBLE_DEVICES= to train on its CPUs')
  return gpus[local_rank]


def _threads(local_size):
  """Threads of one process: CTR_THREADS, or an equal share of the cores it may use."""
  text = os.environ.get('CTR_THREADS')
  if text is None:
    return max(1, len(os.sched_getaffinity(0)) // local_size)
  if not text.isdigit() or int(text) < 1:
    raise UserError(f"environment variable CTR_THREADS: found '{text}'; wanted a whole number >= 1")
  return int(text)


def tf_config():
  """TF_CONFIG as a dict, or None where it is not set. Raises: UserError where it is not JSON."""
  text = os.environ.get('TF_CONFIG')
  if not text:
    return None
  try:
    return json.loads(text)
  except json.JSONDecodeError as e:
    raise UserError(f'environment variable TF_CONFIG: not JSON: {e}') from None


def distributed():
  """Whether this process is one rank of several."""
  return any(name in os.environ for name in RANK_VARIABLES)


def rank_hint():
  """This process's rank before Horovod is up, from the launcher's variables."""
  for name in ('HOROVOD_RANK', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK'):
    if name in os.environ:
      return int(os.environ[name])
  return 0


def start(cfg):
  """Joins the ranks, pins the device, sets threads and seeds. Call once, before any TensorFlow op runs.

  Returns: Runtime.
  """
  runtime = Runtime()
  if distributed() and cfg.sync.mode == 'allreduce':
    # Horovod asks all ranks for work once in so many ms. Between cores it has none after the ranks have met (trainer.sync.allreduce).
    if not tf.config.list_physical_devices('GPU'):
      os.environ.setdefault('HOROVOD_CYCLE_TIME', '200')
    import horovod.tensorflow as hvd
    hvd.init()
    runtime = Runtime(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), _host(hvd.local_size() == hvd.size()))
  gpu = visible_gpu(runtime.local_rank, tf.config.list_physical_devices('GPU'))
  if gpu is not None:
    tf.config.set_visible_devices(gpu, 'GPU')
    tf.config.experimental.set_memory_growth(gpu, True)
  tf.config.threading.set_intra_op_parallelism_threads(_threads(runtime.local_size))
  seed_everything(cfg.seed)
  if cfg.train.deterministic:
    tf.config.experimental.enable_op_determinism()
  return runtime


def _host(one_host):
  return 'localhost' if one_host else os.environ.get('HOROVOD_HOSTNAME') or os.uname().nodename


def seed_everything(seed):
  """The same seed on every rank: what must differ among ranks comes from the data."""
  random.seed(seed)
  np.random.seed(seed % 2**32)
  tf.random.set_seed(seed)
