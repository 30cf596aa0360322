"""Where a process stands: what its launcher says, its GPU, and how Horovod is started."""

import os
import socket
import subprocess
import sys
import threading
import types
from unittest import mock

import psutil
import tensorflow as tf

from tests.support.steps import make_config
from trainer import runtime
from trainer.errors import UserError

LAUNCHED = {
  'HOROVOD_RANK': '3',
  'HOROVOD_SIZE': '4',
  'HOROVOD_LOCAL_RANK': '1',
  'HOROVOD_LOCAL_SIZE': '2',
  'HOROVOD_GLOO_RENDEZVOUS_ADDR': '10.0.0.1',
  'HOROVOD_GLOO_RENDEZVOUS_PORT': '4000',
  'HOROVOD_GLOO_IFACE': 'eth7',
}


def interfaces(*addresses):
  """Network interfaces of which eth7 has these addresses."""
  found = [
    mock.Mock(address=a, family=10 if ':' in a else 2)  # AF_INET6, AF_INET
    for a in addresses
  ]
  return mock.patch.object(psutil, 'net_if_addrs', lambda: {'eth7': found, 'lo': []})


class AllocatorTest(tf.test.TestCase):
  def test_memory_of_one_step_serves_the_next(self):
    """In a process of its own, in its main thread and in another: page faults of later steps."""
    program = """
import concurrent.futures, resource
import numpy as np
from trainer import runtime
runtime.keep_freed_memory()
def step():
  return [np.full(750_000, 1, np.float32) for _ in range(10)]  # 30 MB, freed at once
def faults():
  for _ in range(3): step()
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(10): step()
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
with concurrent.futures.ThreadPoolExecutor(1) as pool:
  print(faults(), pool.submit(faults).result())
"""
    done = subprocess.run(
      [sys.executable, '-c', program], capture_output=True, text=True, check=True
    )
    for faults in done.stdout.split():
      self.assertLess(int(faults), 1000)  # the memory of one step has 7,300 pages


class LaunchedTest(tf.test.TestCase):
  def launched(self, **env):
    env = {k: v for k, v in (LAUNCHED | env).items() if v is not None}
    with mock.patch.dict(os.environ, env, clear=True):
      return runtime.launched()

  def test_ranks_use_the_interface_that_horovodrun_was_given(self):
    for addresses, wanted in (
      (['fe80::1%eth7', '10.0.0.8'], '10.0.0.8'),
      (['fe80::1%eth7', '2001:db8::8'], '2001:db8::8'),  # IPv6 where there is nothing else
      (['2001:db8::8', '10.0.0.8'], '10.0.0.8'),
    ):
      with interfaces(*addresses):
        self.assertEqual(self.launched().host, wanted)

  def test_ranks_of_one_machine_use_no_network(self):
    self.assertIsNone(self.launched(HOROVOD_LOCAL_SIZE='4').host)

  def test_the_store_may_have_an_ipv6_address(self):
    with interfaces('2001:db8::8'):
      here = self.launched(HOROVOD_GLOO_RENDEZVOUS_ADDR='2001:db8::1')
    self.assertEqual(here.rendezvous, 'http://[2001:db8::1]:4000')
    self.assertEqual((here.rank, here.size, here.local_rank, here.local_size), (3, 4, 1, 2))

  def test_the_store_may_want_a_token(self):
    """launch/rank.sh puts it behind the address; Gloo writes the port behind both."""
    with interfaces('10.0.0.8'):
      here = self.launched(HOROVOD_GLOO_RENDEZVOUS_ADDR='10.0.0.1:4000/ab12')
    self.assertEqual(here.rendezvous, 'http://10.0.0.1:4000/ab12:4000')

  def test_mistakes(self):
    with (
      interfaces(),
      self.assertRaisesRegex(UserError, r"'eth7' .* has no address.*wanted one of"),
    ):
      self.launched()
    for name in set(LAUNCHED) - {'HOROVOD_SIZE', 'HOROVOD_GLOO_IFACE'}:
      with self.assertRaisesRegex(UserError, f"variable {name}: found ''; wanted"):
        self.launched(**{name: None})
    for name, text in (
      ('HOROVOD_RANK', 'x'),
      ('HOROVOD_RANK', '4'),
      ('HOROVOD_SIZE', '²'),
      ('HOROVOD_SIZE', '9' * 5000),
      ('HOROVOD_LOCAL_SIZE', '0'),
      ('PMI_SIZE', ''),
    ):
      with self.assertRaisesRegex(
        UserError, f"variable {name}: found '{text[:40]}'; wanted a whole"
      ):
        self.launched(**{name: text})
    nothing_else = dict.fromkeys(set(LAUNCHED) - {'HOROVOD_RANK', 'HOROVOD_SIZE'})
    for size in (None, '2'):
      with self.assertRaisesRegex(UserError, "variable HOROVOD_RANK: found 'x'"):
        self.launched(**nothing_else, HOROVOD_SIZE=size, HOROVOD_RANK='x')
    with mock.patch.dict(os.environ, HOROVOD_RANK='x'):
      self.assertEqual(runtime.rank(), 0, 'somebody must say so')
    with self.assertRaisesRegex(UserError, 'OMPI_COMM_WORLD_SIZE: found 4.*wanted horovodrun'):
      self.launched(HOROVOD_SIZE=None, OMPI_COMM_WORLD_SIZE='4')


class StartTest(tf.test.TestCase):
  def test_visible_gpu(self):
    self.assertIsNone(runtime.visible_gpu(3, []))
    self.assertEqual([runtime.visible_gpu(r, ['gpu0', 'gpu1']) for r in range(2)], ['gpu0', 'gpu1'])
    with self.assertRaisesRegex(UserError, 'local rank 2 has no GPU: this host has 2'):
      runtime.visible_gpu(2, ['gpu0', 'gpu1'])

  def test_a_rank_takes_the_gpu_of_its_local_rank_and_its_memory_as_it_needs_it(self):
    gpus = [tf.config.PhysicalDevice(f'/physical_device:GPU:{i}', 'GPU') for i in range(2)]
    with (
      mock.patch.object(tf.config, 'list_physical_devices', return_value=gpus),
      mock.patch.object(tf.config, 'set_visible_devices') as visible,
      mock.patch.object(tf.config.experimental, 'set_memory_growth') as grows,
      mock.patch.object(tf.config.threading, 'set_intra_op_parallelism_threads'),
      mock.patch.object(runtime, '_join_horovod') as join,
    ):
      place = runtime.Runtime(rank=3, size=4, local_rank=1, local_size=2)
      runtime.start(make_config({}), place)
    visible.assert_called_once_with(gpus[1], 'GPU')
    grows.assert_called_once_with(gpus[1], True)
    join.assert_called_once_with(place, mock.ANY, gpus, mock.ANY)

  def test_layers_are_on_a_gpu_that_is_visible(self):
    self.assertEqual(runtime.dense_device(), runtime.HOST)
    with mock.patch.object(tf.config, 'get_visible_devices', return_value=['a GPU']):
      self.assertEqual(runtime.dense_device(), 'GPU:0')

  def test_horovod_waits_no_longer_than_it_should(self):
    """It looks for work every millisecond; the heartbeat ends a wait before it."""
    horovod = types.ModuleType('horovod.tensorflow')
    horovod.init, horovod.rank, horovod.size = mock.Mock(), lambda: 1, lambda: 2
    horovod.nccl_built = lambda: False
    package = types.ModuleType('horovod')
    package.tensorflow = horovod
    with (
      mock.patch.dict(sys.modules, {'horovod': package, 'horovod.tensorflow': horovod}),
      mock.patch.dict(os.environ),
      mock.patch.object(tf.config.threading, 'set_intra_op_parallelism_threads'),
    ):
      os.environ.pop('HOROVOD_CYCLE_TIME', None)
      os.environ.pop('HOROVOD_GLOO_TIMEOUT_SECONDS', None)
      cfg = make_config({'sync': {'lost_peer_seconds': 45}})
      runtime.start(cfg, runtime.Runtime(rank=1, size=2, local_rank=1, local_size=2))
      self.assertEqual(os.environ['HOROVOD_CYCLE_TIME'], '1')
      self.assertEqual(os.environ['HOROVOD_GLOO_TIMEOUT_SECONDS'], '105')
    horovod.init.assert_called_once_with()

  def test_a_host_that_does_not_know_its_own_name_is_told(self):
    unknown = socket.gaierror(socket.EAI_NONAME, 'Name or service not known')
    with (
      mock.patch.object(socket, 'gethostname', return_value='box'),
      mock.patch.object(socket, 'getaddrinfo', side_effect=unknown),
      self.assertRaisesRegex(UserError, "'box', has no address.*wanted a line '127.0.0.1 box'"),
    ):
      runtime.start(make_config({}), runtime.Runtime(rank=1, size=2, local_rank=1, local_size=2))

  def test_threads_of_horovod_take_no_core_from_others(self):
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    horovod = types.ModuleType('horovod.tensorflow')
    horovod.init, horovod.rank, horovod.size = thread.start, lambda: 1, lambda: 2
    horovod.nccl_built = lambda: False
    package = types.ModuleType('horovod')
    package.tensorflow = horovod
    with (
      mock.patch.dict(sys.modules, {'horovod': package, 'horovod.tensorflow': horovod}),
      mock.patch.dict(os.environ),
      mock.patch.object(tf.config.threading, 'set_intra_op_parallelism_threads'),
    ):
      runtime.start(make_config({}), runtime.Runtime(rank=1, size=2, local_rank=1, local_size=2))
      policies = [os.sched_getscheduler(i) for i in (thread.native_id, threading.get_native_id())]
    ended.set()
    thread.join()
    self.assertEqual(policies, [os.SCHED_BATCH, os.SCHED_OTHER])


if __name__ == '__main__':
  tf.test.main()
