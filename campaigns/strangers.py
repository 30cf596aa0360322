"""Sends servers requests of every size and shape, and flips bits of the stores that they read."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis.predict_pb2 import PredictRequest

from campaigns.units import Found, Kind
from tests.support.exports import Run, contents
from tests.support.fuzz import mixed, requests
from tests.support.retrieval import make_config
from tests.support.scorer import asked_together, served
from trainer.comm.communicator import SingleProcess
from trainer.errors import DataLoss
from trainer.evaluation.task import task_of
from trainer.retrieval.items import Items
from trainer.serving import rpc
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.service import Service
from trainer.serving.stores import open_store
from trainer.storage import export_writer

INPUTS = 300  # of a unit that asks
FLIPS = 20  # of a unit that damages
ITEMS = 20_000
SECONDS = 10  # in which any request is answered, on a busy machine
_SIZES = (0, 1, 2, 100, 10_000, 10_001, 10**6, 2**40, 2**62)


def _service(exports: str) -> Service:
  store = MemoryStore()
  service = Service(store, Publisher(exports, store).advance)
  service.refresh()
  return service


def _asked(
  inputs: Iterator[Any],
  ask: Callable[[Any], str],
  allowed: set[str],
  ask_well: Callable[[], str],
) -> Found:
  """Counts a trial an input: how it ends, whether in time, and whether a good one is answered."""
  found = Found()
  for one in inputs:
    began = time.monotonic()
    outcome = ask(one)
    seconds = time.monotonic() - began
    wrong = None
    if outcome not in allowed or seconds > SECONDS or ask_well() != 'answered':
      wrong = f'{outcome} after {seconds:.1f} s: {str(one)[:500]}'
    found.trial(outcome, wrong)
  return found


def _messages(draw: random.Random, columns: list[str]) -> Iterator[bytes]:
  """Yields messages of Predict with tensors of odd types and shapes, some of them garbled."""
  for _ in range(INPUTS):
    made = PredictRequest()
    made.model_spec.name = draw.choice(('ctr', 'ctr', 'ctr', '', 'x' * 1000))
    lists = [f'list {i}' for i in range(draw.choice((0, 0, 0, 100, 1000, 9000)))]
    for name in [*columns, *['more'] * draw.randrange(2), *lists[:1]]:
      tensor = made.inputs[name]
      tensor.dtype = draw.choice((tf.string.as_datatype_enum, 9, 1, draw.randrange(40)))
      if name in lists and draw.random() < 0.5:  # so many lists without values
        for size in (draw.choice((256, 10_000)), 0):
          tensor.tensor_shape.dim.add(size=size)
        continue
      for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3))):
        tensor.tensor_shape.dim.add(size=draw.choice((1, 1, 2, -1, draw.choice(_SIZES))))
      count = draw.choice((0, 1, 1, 2, 100, 10_000))
      tensor.string_val.extend([draw.choice((b'7', b'', b'\xff', b'x' * 50))] * count)
      tensor.int64_val.extend([draw.choice((0, 7, -1, 2**62))] * draw.choice((0, count)))
      if draw.random() < 0.1:
        tensor.tensor_content = draw.randbytes(draw.choice((1, 8, 800)))
    for name in lists[1:]:  # many tensors alike, of few bytes, and so of lists without values
      if made.inputs[lists[0]].ByteSize() < 100:
        made.inputs[name].CopyFrom(made.inputs[lists[0]])
    data = made.SerializeToString()
    if draw.random() < 0.2:
      at = draw.randrange(len(data) + 1)
      data = data[:at] + draw.randbytes(draw.choice((0, 1, 40)))
    yield data


def _grpc(draw: random.Random, folder: str, shared: str) -> Found:
  """Calls Predict, and others, with tensors of any type and shape, and with bytes that are none.
  Each must be answered or refused in time, and a good request after it answered."""
  run = Run(folder)
  run.train()
  run.export('base')
  columns = sorted({name for name, _ in run.keys})
  good = PredictRequest()
  good.model_spec.name = 'ctr'
  for name in columns:
    good.inputs[name].CopyFrom(tf.make_tensor_proto(['7']))
  with (
    served(_service(run.directory), rpc=True) as client,
    grpc.insecure_channel(f'127.0.0.1:{client.rpc_port}') as channel,
  ):
    predict = channel.unary_unary(rpc.PREDICT)
    other = channel.unary_unary('/tensorflow.serving.PredictionService/Classify')

    def ask(data: bytes, call: Callable | None = None) -> str:
      try:
        (call or draw.choice([predict] * 9 + [other]))(data, timeout=3 * SECONDS)
      except grpc.RpcError as e:
        return e.code().name
      return 'answered'

    refused = {'answered', 'INVALID_ARGUMENT', 'NOT_FOUND', 'UNIMPLEMENTED', 'RESOURCE_EXHAUSTED'}
    return _asked(
      _messages(draw, columns), ask, refused, lambda: ask(good.SerializeToString(), predict)
    )


def _together(draw: random.Random, folder: str, shared: str) -> Found:
  """Sends requests of every form and size at once, some without samples and some wrong. Each must
  be answered as it is alone, to the last bit."""
  found, run = Found(), Run(folder)
  run.train()
  run.export('base')
  service, columns = _service(run.directory), sorted({name for name, _ in run.keys})
  values = [*(str(i) for i in range(600)), '', '1|2', None, ['1', '2'], 7]
  rows = [{name: draw.choice(values) for name in columns} for _ in range(50)]
  good = {'instances': rows[:3]}
  bodies = [*mixed(draw, rows, columns[:1], INPUTS // 3), *requests(draw, good, INPUTS // 6)]
  draw.shuffle(bodies)
  asks = [lambda c, b=b: c.ask('POST', '/v1/models/ctr:predict', b)[:2] for b in bodies]
  with served(service) as client:
    alone = [ask(client) for ask in asks]
  for body, one, wanted in zip(bodies, asked_together(service, asks)[0], alone):
    wrong = None if one == wanted else f'{one} for {wanted}: {str(body)[:500]}'
    found.trial('answered' if one[0] == 200 else str(one[0]), wrong)
  return found


def _recommend(draw: random.Random, folder: str, shared: str) -> Found:
  """Asks `:recommend` for any number of queries and items, with much to leave out, and changed
  bytes. Each must be answered or refused in time, and a good request after it answered."""
  cfg = make_config({'run_dir': folder})
  step, rng = task_of(cfg).step(SingleProcess()), np.random.default_rng(draw.randrange(2**32))
  texts = np.array([f'i{i}' for i in range(ITEMS)], object)
  vectors = rng.normal(size=[ITEMS, cfg.sparse.tables['default'].width]).astype(np.float32)
  export_writer.write(
    cfg,
    'items',
    {'number': 1},
    store=step.store,
    model=step.dense.model,
    dense_stats=step.dense.embedding.stats,
    items=Items(np.arange(ITEMS), texts, vectors),
  )
  good = {'instances': [{'user': '7'}, {'user': '8'}], 'k': 5, 'seen': [['i1'], []]}

  def bodies() -> Iterator[bytes]:
    yield from requests(draw, good, INPUTS // 2)
    for _ in range(INPUTS // 2):
      queries = draw.choice((1, 2, 99, 500, 501, 10_000, 10_001))
      seen = [['i1'] * draw.choice((0, 1, 100_000 // queries))] * queries
      body = {'inputs': {'user': ['7'] * queries}, 'k': draw.choice((1, 100, ITEMS, 10**12))}
      yield json.dumps(body | ({'seen': seen} if draw.random() < 0.5 else {})).encode()

  with served(_service(os.path.join(folder, 'exports'))) as client:

    def ask(body: Any) -> str:
      status, *_ = client.ask('POST', '/v1/models/ctr:recommend', body)
      return 'answered' if status == 200 else str(status)

    return _asked(bodies(), ask, {'answered', '400', '413'}, lambda: ask(good))


def _lmdb(draw: random.Random, folder: str, shared: str) -> Found:
  """Flips a bit of an LMDB store, or cuts it. A reader must refuse the store, or find every row as
  it was; the publisher must then bring it back."""
  found, run = Found(), Run(os.path.join(folder, 'run'))
  store = open_store(f'{folder}/store', '--to', writable=True)
  for kind in ('base', 'delta', 'delta', 'base', 'delta'):
    run.train()
    newest = run.export(kind)
    Publisher(run.directory, store).advance()
  store.close()

  def is_whole(path: str, writable: bool = False) -> bool:
    store = open_store(path, '--to', writable)
    try:
      if writable:
        Publisher(run.directory, store).advance()
      number, bias, rows = contents(store, run.keys.values())
      return number == bias == newest and rows == run.versions[newest]
    finally:
      store.close()

  for number in range(FLIPS):
    path = shutil.copytree(f'{folder}/store', f'{folder}/{number}')
    with open(f'{path}/data.mdb', 'r+b') as f:
      at = draw.randrange(os.path.getsize(f.name))
      if number:
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ 1 << draw.randrange(8)]))
      else:
        f.truncate(at)
    try:
      outcome, wrong = 'every row as it was', None if is_whole(path) else f'other rows: {at}'
    except DataLoss:
      outcome, wrong = 'refused', None if is_whole(path, True) else f'not published anew: {at}'
    found.trial(outcome, wrong)
  return found


KINDS = [
  Kind('gRPC', 'inputs', 10, 600, _grpc),
  Kind('requests together', 'inputs', 10, 600, _together),
  Kind(':recommend', 'inputs', 10, 600, _recommend),
  Kind('LMDB bytes', 'faults', 20, 600, _lmdb),
]
