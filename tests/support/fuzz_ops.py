"""`python -m tests.support.fuzz_ops SEED CALLS LOG`: calls every op with arguments that are wrong.

Each op is called rightly first, then so many times with one or two arguments changed. It may give a
result or an error, and nothing else. A call is written to LOG before it is made, so that the last
one is there where the process dies or hangs. Prints the names of the ops that were called.
"""

import os

os.environ['TF_USE_LEGACY_KERAS'] = '1'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
os.environ['CUDA_VISIBLE_DEVICES'] = ''
# Its allocator takes ever larger regions and throws where memory is limited, as below; TensorFlow
# 2.21 then never unlocks it. This is read when TensorFlow is imported.
os.environ['TF_ENABLE_ONEDNN_OPTS'] = '0'
import contextlib
import inspect
import random
import resource
import sys

import numpy as np
import psutil
import tensorflow as tf

from ops import ffm, library, packing, row_optimizers, sharding
from ops import keys as key_ops
from ops.connections import Connections
from ops.dedupe import dedupe
from ops.feature_lifecycle import FeatureLifecycle
from ops.policy import Policy
from ops.pooling import PoolLayout, histories, pool
from ops.row_store import FactorPart, RowStore, TableSpec, initial_factors
from ops.samples import SampleArrays
from trainer.config import RowOptimizer

NUMBERS = -(2**63), -(2**31), -1, 0, 1, 2, 3, 255, 256, 2**16, 2**31 - 1, 2**31, 2**63 - 1
FLOATS = 0.0, -0.0, 1e-45, -1.0, 1.0, 3e38, float('inf'), float('-inf'), float('nan')
DTYPES = np.int32, np.int64, np.float32, np.float64, np.uint8, np.bool_
TEXTS = '', 'x', 'adam', 'ftrl', 'sum', 'mean', 'uniform', 'base', 'a=1', '\0' * 9


class Recorder:
  """Stands in for the op library's functions, and keeps the last arguments of each."""

  def __init__(self):
    self.calls, self._module = {}, library.load()
    module = self._module
    self.functions = {n: f for n, f in vars(module).items() if n.startswith('ctr_') and callable(f)}
    self.functions = {n: f for n, f in self.functions.items() if not n.endswith('_eager_fallback')}
    for name, function in self.functions.items():
      setattr(module, name, self._recording(name, function))

  def stop(self) -> None:
    """Puts the library's functions back into their places."""
    for name, function in self.functions.items():
      setattr(self._module, name, function)

  def _recording(self, name, function):
    signature = inspect.signature(function)

    def record(*args, **kwargs):
      self.calls[name] = dict(signature.bind(*args, **kwargs).arguments)
      return function(*args, **kwargs)

    return record


def right_calls(rng: np.random.Generator) -> list:
  """Calls every op, rightly, and returns what must live on for the calls to stay right."""
  parts = (FactorPart('plain', 3), FactorPart('field', 6)), (FactorPart('plain', 2),)
  tables = (
    TableSpec('a', parts[0]),
    TableSpec('b', parts[1], linear='adam', dtype='bfloat16'),
  )
  slot_table = -1, 0, 0, 1
  policy = Policy(admission='none', capacity=20, delete_after_unseen_days=1)
  store = RowStore(policy, tables=tables, slot_table=slot_table)
  batch, fields = 6, 3
  counts = rng.integers(0, 3, batch * fields)
  segments = np.repeat(np.arange(batch * fields, dtype=np.int32), counts)
  keys = (segments % fields + 1).astype(np.int64) << 52 | rng.integers(0, 9, len(segments))
  deduped = dedupe(keys, [1.0], np.ones([batch], np.float32), segments, fields)
  unique = deduped.unique
  hyper = row_optimizers.hyper(
    [(RowOptimizer(), RowOptimizer(l2_mode='catch_up')), (RowOptimizer(), RowOptimizer())]
  )
  layout = PoolLayout((0, 0, 1), parts, ('sum', 'mean', 'sqrtn'), (True, False, True), totals=True)
  rows = store.pull(unique)
  with tf.GradientTape() as tape:
    tape.watch([rows.linear, rows.factors])
    pooled = pool(rows, deduped, np.ones(len(keys), np.float32), segments, batch, layout)
    gathered, _ = histories(rows, deduped, segments, batch, slots=fields, slot=1, width=3)
    total = sum(tf.reduce_sum(t) for t in tf.nest.flatten((tuple(pooled), gathered)))
  linear, factors = tape.gradient(total, [rows.linear, rows.factors])
  shows, clicks = deduped.shows, deduped.clicks
  store.push(unique, rows, shows, clicks, linear, factors, [1.0], hyper, tf.constant(1, tf.int64))
  store.catch_up(hyper, tf.constant(3, tf.int64))
  sent = sharding.owner_counts(unique, 2)
  packed = packing.pack_rows(rows, deduped.inverse, [len(keys), 0])
  packed = packing.pack_rows(rows, tf.range(len(unique)), sent)
  packing.unpack_rows(packed.buffer, sent, unique, slot_table, store.widths)
  packed = packing.pack_gradients(linear, factors, rows.offsets, sent)
  owned = dedupe(unique, shows, clicks)
  packing.sum_gradients(packed.buffer, sent, store.pull(owned.unique).offsets, owned)
  initial_factors(unique, 7, 4)
  weights = tf.ones([3, 2])
  row = row_optimizers.row_init(weights, hyper[0, 0], 'adagrad')
  last = tf.constant([0, 1, 2])
  row_optimizers.row_update(
    row, weights, [1.0], last, hyper[0, 0], tf.constant(3, tf.int64), 'adagrad'
  )
  with tf.GradientTape() as tape:
    matrix = tf.ones([2, 3, 6])
    tape.watch(matrix)
    pairs = ffm.pairs(matrix)
  tape.gradient(pairs, matrix)
  library.load().ctr_clock(after=unique)
  ops = library.load()
  parts, kernel, product = [tf.ones([5, 1]), tf.ones([5, 2])], tf.ones([3, 4]), tf.ones([5, 4])
  given = {'a': parts, 'b': kernel, 'product': product, 'grad': product, 'relu': True}
  for call in (
    lambda: ops.ctr_bfloat16_product(
      a=parts, b=kernel, bias=[tf.ones([4])], transpose_b=False, relu=True
    ),
    lambda: ops.ctr_bfloat16_product_grad_a(**given),
    lambda: ops.ctr_bfloat16_product_grad_b(**given, bias=True),
  ):
    with contextlib.suppress(tf.errors.UnimplementedError):  # the processor has no avx512_bf16
      call()
  sums, histogram = (tf.Variable(tf.zeros(shape, tf.float64)) for shape in ([8], [2, 8]))
  ops.ctr_metric_sums(shows, shows, shows, sums.handle, [histogram.handle], 'clicks', 8)
  text = np.frombuffer(b'onetwo', np.uint8)
  key_ops.text_keys(text, np.array([0, 3, 6], np.int32), 3)
  filled = counts.reshape([fields, batch]).astype(np.int32)
  coded = key_ops.encode_fields(keys, np.ones(len(keys), np.float32), filled, fields)
  ends = [np.cumsum(of) for of in np.split(coded.counts, np.cumsum(coded.fields_of)[:-1])]
  splits = [np.concatenate([[0], of]) for of in ends]
  bases = [np.cumsum([0, *map(len, splits)])[:-1], np.cumsum([0, *(of[-1] for of in ends)])[:-1]]
  splits = np.concatenate(splits).astype(np.uint32)
  arrays = coded.codes, np.stack(bases, 1)[None], coded.keys, splits, None, None
  SampleArrays(*arrays, fields, key_ops.MAX_SAMPLES).gather(np.arange(batch))
  store.admitted(unique)
  store.lookup(unique)
  store.commit('delta', store.select('delta'))
  store.commit('delta', store.select('delta', store.take_changes()))
  store.keep_changes()
  for figure in store.size, store.admitted_size, store.bytes, store.count_changes:
    figure()
  state = list(store.export_state())
  store.import_state(state)
  lifecycle = FeatureLifecycle(policy)
  lifecycle.observe(unique, shows, clicks)
  lifecycle.import_state(list(lifecycle.export_state()))
  for each in lifecycle, store:
    each.decay()
    each.evict()
    each.evict(lambda histogram: histogram)
    each.age()
  store.erase(unique[:1])
  alone = Connections([-1], 0)
  alone.all_to_all([unique, shows], [len(unique)])
  alone.counters()
  store.clear()
  store.import_state(state)
  return [store, lifecycle, sums, histogram, alone, deduped]


def wrong(value, draw: random.Random, handles: list):
  """Returns something else in place of an argument."""
  if isinstance(value, (tf.Tensor, np.ndarray)) and getattr(value, 'dtype', 0) == tf.resource:
    return draw.choice(handles)
  if isinstance(value, bool):
    return not value
  if isinstance(value, int):
    return draw.choice(NUMBERS)
  if isinstance(value, float):
    return draw.choice(FLOATS)
  if isinstance(value, (str, bytes)):
    return draw.choice(TEXTS)
  if isinstance(value, (list, tuple)) and (
    not value or isinstance(value[0], (str, bool, int, float, list, tuple, tf.Tensor, np.ndarray))
  ):
    items = list(value)
    match draw.randrange(4 if items else 1):
      case 0:
        return items + [draw.choice(items or NUMBERS)]
      case 1:
        items.pop(draw.randrange(len(items)))
      case _:
        place = draw.randrange(len(items))
        items[place] = wrong(items[place], draw, handles)
    return items
  if isinstance(value, (tf.Tensor, np.ndarray)):
    return wrong_array(np.array(value), draw)
  return value  # a dtype


def wrong_array(array: np.ndarray, draw: random.Random) -> np.ndarray:
  """Returns an array of another shape, dtype or content."""
  match draw.randrange(6):
    case 0:
      return array[: draw.randrange(len(array) + 1)] if array.ndim else array.reshape([1])
    case 1:
      return np.concatenate([array, array]) if array.ndim else np.stack([array, array])
    case 2:
      return array[None] if draw.random() < 0.5 else array.reshape([-1])
    case 3:
      with np.errstate(all='ignore'):
        return array.astype(draw.choice(DTYPES))
    case _:
      array = array.copy()
      for place in draw.sample(range(array.size), min(array.size, draw.choice([1, 2, 1000]))):
        choices = FLOATS if array.dtype.kind == 'f' else NUMBERS
        with np.errstate(all='ignore'):
          array.flat[place] = np.array([draw.choice(choices)]).astype(array.dtype)[0]
      return array


def main(seed: int, calls: int, log: str) -> None:
  recorder = Recorder()
  kept = right_calls(np.random.default_rng(seed))
  recorder.stop()
  handles = [
    *(resource.handle for resource in kept[:4]),
    recorder.calls['ctr_all_to_all']['connections'],
  ]
  used = psutil.Process().memory_info().vms
  resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)  # so that none takes all there is
  missing = set(recorder.functions) - set(recorder.calls)
  assert not missing, f'not called: {sorted(missing)}'
  for name in sorted(recorder.calls):
    draw = random.Random(f'{seed} {name}')
    right = recorder.calls[name]
    places = [k for k in right if k not in ('fds', 'name')]
    for _ in range(calls if places else 0):
      changed = draw.sample(places, min(len(places), draw.choice([1, 1, 2])))
      arguments = right | {k: wrong(right[k], draw, handles) for k in changed}
      with open(log, 'w', encoding='utf-8') as f:
        f.write(f'{name}: ' + ', '.join(f'{k} = {arguments[k]!r}' for k in changed))
      with contextlib.suppress(tf.errors.OpError, ValueError, TypeError, OverflowError):
        for result in tf.nest.flatten(recorder.functions[name](**arguments)):
          if isinstance(result, tf.Tensor) and result.dtype != tf.resource:
            result.numpy()
    print(name)


if __name__ == '__main__':
  main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
