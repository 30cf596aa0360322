"""Trains on a GPU, or a second logical CPU device in place of one; tells what crosses in a step.

`python -m tests.support.placement [DEVICE]` prints a JSON object for each of MODELS. It is a
process of its own because logical devices are made before the first op.
"""

import inspect
import itertools
import json
import sys
from unittest import mock

import numpy as np
import tensorflow as tf

# Private: nothing public tells what TensorFlow sends between devices, and which kernels it has.
from tensorflow.python.eager import context
from tensorflow.python.framework import kernels

from tests.support.batches import make_batch
from tests.support.steps import HISTORY, HISTORY_IDS, TASKS, make_config, train
from trainer.comm.communicator import SingleProcess
from trainer.data.features import SlotBatch
from trainer.runtime import HOST
from trainer.training import dense_part, step

GPU = sys.argv[1] if sys.argv[1:] else 'CPU:1'
MODELS = {
  'deepfm': {},
  'ffm': {'model.interactions': ['linear', 'ffm']},
  'tasks': TASKS | {'model.shared': {'mmoe': {'experts': 2, 'hidden': [8]}}},
  'history': HISTORY,
  'dcnv2': {'model.interactions': [{'cross': {'layers': 2}}, {'dnn': {'hidden': [8, 4]}}]},
  'dlrm': {'model.interactions': [{'dlrm': {'bottom': [8], 'hidden': [8, 4]}}]},
}
STEPS, SAMPLES = 3, 20


class Observed(step.TrainStep):
  """A step that tells what its first call sends from one device to another."""

  def observe(self, batch: SlotBatch) -> None:
    """Trains on a batch for the first time."""
    self._arguments = []
    call, self._train = self._train, lambda *args: self._arguments.extend(args) or call(*args)
    collected = context.context()
    collected.enable_graph_collection()
    train(self, batch, has_next=True)
    functions = collected.export_run_metadata().function_graphs
    collected.disable_graph_collection()
    self._train, self._graph = call, inspect.getclosurevars(call).nonlocals['graph']
    self._nodes = [n for f in functions for graph in f.partition_graphs for n in graph.node]

  def own_ops(self) -> set[str]:
    """Returns the devices of the ops of our library."""
    return {n.device[-5:] for n in self._nodes if n.op.startswith('Ctr')}

  def without_kernel(self) -> set[str]:
    """Returns the ops that layers, loss and optimizer want on the GPU and TensorFlow has not."""
    nodes = self._graph.graph.as_graph_def().node
    return {n.op for n in nodes if n.device.endswith(GPU) and not _runs_on_gpu(n)}

  def crossing(self) -> dict[str, list]:
    """Returns {'to' or 'from' the GPU: [shape of each tensor]}; it takes the step once more.

    'unknown' has the names of tensors that TensorFlow made itself, whose shapes cannot be told.
    """
    ops, sends = {n.name: n.op for n in self._nodes}, {}
    for node in self._nodes:  # a constant is sent to keep an order
      if node.op in ('_Send', '_HostSend') and ops[node.input[0].split(':')[0]] != 'Const':
        tensor = node.input[0] if ':' in node.input[0] else f'{node.input[0]}:0'
        sends[tensor] = 'from' if node.device.endswith(GPU) else 'to'
    graph = self._graph.graph
    written = {node.name for node in graph.as_graph_def().node}
    unknown = [tensor for tensor in sends if tensor.split(':')[0] not in written]
    for tensor in unknown:
      del sends[tensor]

    def again(*inputs: tf.Tensor) -> list[tf.Tensor]:
      given = {t.name: x for t, x in zip(graph.inputs, inputs)}
      return tf.graph_util.import_graph_def(graph.as_graph_def(), given, list(sends), name='')

    values = tf.function(again)(*tf.nest.flatten(self._arguments), *self._graph.captured_inputs)
    found = {'to': [], 'from': [], 'unknown': unknown}
    for way, value in zip(sends.values(), values):
      found[way].append(value.shape.as_list())
    return found


def _runs_on_gpu(node: tf.compat.v1.NodeDef) -> bool:
  """Returns whether TensorFlow has a kernel for GPUs of a node's op and dtypes."""
  return any(
    kernel.device_type in ('GPU', 'DEFAULT')
    and all(node.attr[c.name].type in c.allowed_values.list.type for c in kernel.constraint)
    for kernel in kernels.get_registered_kernels_for_op(node.op).kernel
  )


def tell(name: str, products: str = 'float32') -> None:
  """Trains one model on both devices, and prints what was found.

  Args:
    products: the dtype of matrix products, or tf32: float32 as TensorFlow multiplies it on GPUs by
      default, with factors that are rounded to 10 bits.
  """
  tf.config.experimental.enable_tensor_float_32_execution(products == 'tf32')
  random = np.random.default_rng(1)
  ids, tasks = HISTORY_IDS if name == 'history' else (1, 2, 3), 2 if name == 'tasks' else 1
  batches = [
    make_batch(random, SAMPLES, vocabulary=10_000, ids=ids, tasks=tasks) for _ in range(STEPS)
  ]
  optimizer = {'train.dense_optimizer': {'kind': 'adam', 'learning_rate': 0.01}}
  cfg, steps = make_config(MODELS[name] | optimizer), []
  for device in (GPU, HOST):
    with mock.patch.object(dense_part, 'dense_device', return_value=device):
      dense = dense_part.DensePart(
        cfg, SingleProcess().all_reduce_with_gradient, products.replace('tf32', 'float32')
      )
      steps.append(Observed(cfg, SingleProcess(), dense))
  there, here = steps
  before = here.dense_state()
  there.observe(batches[0])
  train(here, batches[0])
  for batch, one in itertools.product(batches[1:], steps):
    train(one, batch)
  states = [one.dense_state() for one in steps]
  staged = there.stage(batches[0])
  rows = there.store.pull(staged.deduped.unique, True)
  inputs = there.dense.embedding.embed(*staged, rows)
  variables = [*there.dense.model.variables, *there.dense.optimizer.weights]
  told = {
    'model': name,
    'products': products,
    'devices': sorted({v.device[-5:] for v in variables}),
    'dtypes': sorted({v.dtype.name for v in variables}),
    'own_ops': sorted(there.own_ops()),
    'without_kernel': sorted(there.without_kernel()),
    'moved': max(float(np.abs(a - before[k]).max(initial=0)) for k, a in states[1].items()),
    'apart': max(float(np.abs(a - states[1][k]).max(initial=0)) for k, a in states[0].items()),
    'pooled': [t.shape.as_list() for t in inputs.of_rows()],
    'rows': [int(tf.size(rows.linear)), int(tf.size(rows.factors))],
    **there.crossing(),
  }
  print(json.dumps(told), flush=True)


def main() -> None:
  cpu = tf.config.list_physical_devices('CPU')[0]
  tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
  for name in MODELS:
    tell(name)
  # Where there is a GPU, products in bfloat16 are TensorFlow's own.
  with mock.patch.object(tf.config, 'get_visible_devices', return_value=['a GPU']):
    tell('deepfm', 'bfloat16')
  tell('deepfm', 'tf32')


if __name__ == '__main__':
  main()
