"""gRPC calls get the scores that NumPy computes; a mistake gets one line and gRPC's status."""

import contextlib
import functools
import random
import tempfile

import numpy as np
import tensorflow as tf

try:
  import grpc
  from tensorflow_serving.apis import predict_pb2
  from tensorflow_serving.apis.prediction_service_pb2_grpc import PredictionServiceStub
except ModuleNotFoundError:
  grpc = None


from tests.support.exports import Run
from tests.support.fuzz import mixed
from tests.support.scorer import asked_together, served
from trainer.errors import UserError
from trainer.serving.limits import Limits
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.service import Service

TensorProto = type(tf.make_tensor_proto(0))


def request(inputs, name='ctr', **fields):
  made = predict_pb2.PredictRequest(**fields)
  made.model_spec.name = name
  for column, values in inputs.items():
    made.inputs[column].CopyFrom(
      values if isinstance(values, TensorProto) else tf.make_tensor_proto(values)
    )
  return made


def of_no_values(*shape):
  return repeated_value(*shape, values=())


def repeated_value(*shape, values=(1,)):
  """A tensor of few bytes whose elements are all alike."""
  made = TensorProto(dtype=tf.int64.as_datatype_enum, int64_val=values)
  for size in shape:
    made.tensor_shape.dim.add(size=size)
  return made


class RpcTest(tf.test.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if grpc is None:
      raise cls.skipTest(cls, 'tensorflow-serving-api is not installed')
    cls.stack = contextlib.ExitStack()
    cls.run_ = Run(cls.stack.enter_context(tempfile.TemporaryDirectory()))
    store = MemoryStore()
    cls.service = Service(store, Publisher(cls.run_.directory, store).advance)
    cls.run_.train()
    cls.version = cls.run_.export('base')
    cls.service.refresh()
    cls.http, cls.predict = cls.stack.enter_context(
      cls.serving(limits=Limits(body_bytes=500_000, instances=100))
    )
    rng = np.random.default_rng(1)
    slots = {name for name, _ in cls.run_.keys}
    cls.columns = {name: [str(i) for i in rng.integers(0, 600, 60)] for name in slots}
    samples = [{n: [c[i]] for n, c in cls.columns.items()} for i in range(60)]
    cls.wanted = [cls.run_.score(cls.version, sample) for sample in samples]

  @classmethod
  def tearDownClass(cls):
    cls.stack.close()
    super().tearDownClass()

  @classmethod
  @contextlib.contextmanager
  def serving(cls, service=None, **settings):
    """Yields a client of the HTTP side, and the gRPC call."""
    with served(service or cls.service, rpc=True, **settings) as client:
      with grpc.insecure_channel(f'127.0.0.1:{client.rpc_port}') as channel:
        yield client, PredictionServiceStub(channel).Predict

  def scores(self, inputs, **fields):
    answer = self.predict(request(inputs, **fields), timeout=60)
    self.assertEqual(answer.model_spec.name, 'ctr')
    self.assertEqual(answer.model_spec.version.value, self.version)
    return tf.make_ndarray(answer.outputs['probability'])

  def refused(self, code, text, made, predict=None, **settings):
    with self.assertRaises(grpc.RpcError) as raised:
      (predict or self.predict)(made, timeout=60, **settings)
    error = raised.exception
    self.assertEqual(error.code(), getattr(grpc.StatusCode, code), error.details())
    self.assertRegex(error.details(), text)

  def test_scores_are_those_of_numpy_and_of_http(self):
    found = self.scores(self.columns)
    self.assertEqual(found.dtype, np.float32)
    self.assertAllClose(found, self.wanted, atol=1e-6, rtol=0)
    self.assertGreater(np.std(found), 1e-2)
    _, of_http = self.http.predict({'inputs': self.columns})
    self.assertAllEqual(found, np.array(of_http['outputs'], np.float32))

  def test_columns_of_every_form(self):
    whole = {name: np.array(column, np.int64) for name, column in self.columns.items()}
    self.assertAllClose(self.scores(whole), self.wanted, atol=1e-6, rtol=0)
    (name, column), *others = self.columns.items()
    for one in (column[0], [column[0]]):  # a scalar and one value, for all samples
      given = {name: one, **dict(others)}
      alike = {name: column[:1] * 60, **dict(others)}
      self.assertAllEqual(self.scores(given), self.scores(alike))
    lists = {n: [[c] for c in column] for n, column in self.columns.items()}
    self.assertAllEqual(self.scores(lists), self.scores(self.columns))
    missing = {name: [''] * 60, **dict(others)}
    left_out = [{n: [c[i]] for n, c in others} for i in range(60)]
    wanted = [self.run_.score(self.version, sample) for sample in left_out]
    self.assertAllClose(self.scores(missing), wanted, atol=1e-6, rtol=0)

  def test_strangers_do_not_change_an_answer(self):
    """Calls and requests by HTTP that wait together are answered as each alone."""
    rng = random.Random(2)
    rows = [{n: c[i] for n, c in self.columns.items()} for i in range(60)]

    def ask(client, body):
      if 'inputs' not in body or len(str(body)) % 3 == 0:
        return client.ask('POST', '/v1/models/ctr:predict', body)[:2]
      with grpc.insecure_channel(f'127.0.0.1:{client.rpc_port}') as channel:
        try:
          answer = PredictionServiceStub(channel).Predict(request(body['inputs']), timeout=60)
        except grpc.RpcError as e:
          return e.code(), e.details()
        return answer.SerializeToString(deterministic=True)

    bodies = [b for b in mixed(rng, rows, [min(self.columns)], 40) if 'None' not in str(b)]
    asks = [functools.partial(ask, body=body) for body in bodies]
    with self.serving() as (client, _):
      wanted = [one(client) for one in asks]
    found, sizes = asked_together(self.service, asks, rpc=True)
    self.assertEqual(found, wanted)
    self.assertLess(len(sizes), len(bodies) / 2)

  def test_mistakes_have_a_status_and_one_line(self):
    good = self.columns
    (name, column), *_ = good.items()

    def changed(value):
      return request(good | {name: value})

    repeated = TensorProto(dtype=tf.int64.as_datatype_enum, int64_val=[1])
    repeated.tensor_shape.dim.add(size=1 << 40)
    short = tf.make_tensor_proto(column)
    short.tensor_shape.dim[0].size = 59
    many = {f'c{i}': repeated_value(99, 100) for i in range(9)}
    lists = {f'c{i}': of_no_values(99, 0) for i in range(19)}
    wide = {f'c{i}': repeated for i in range(10_001)}
    negative = tf.make_tensor_proto(column)
    negative.tensor_shape.dim[0].size = -1
    of_no_type = TensorProto(dtype=0)
    for code, text, made in (
      ('NOT_FOUND', "'ctz' is unknown.*'ctr'", request(good, name='ctz')),
      (
        'INVALID_ARGUMENT',
        f"column '{name}' is missing",
        request({n: good[n] for n in list(good)[1:]}),
      ),
      ('INVALID_ARGUMENT', 'inputs', request({})),
      ('INVALID_ARGUMENT', 'UTF-8', changed([b'\xff'] * 60)),
      (
        'INVALID_ARGUMENT',
        f"found '{name}' with 59 .* with 60 ",
        changed(column[:59]),
      ),
      ('INVALID_ARGUMENT', 'without the values of its shape', changed(short)),
      ('INVALID_ARGUMENT', 'wanted a tensor of shape', changed(negative)),
      ('INVALID_ARGUMENT', 'wanted a tensor of shape', changed([[[c]] for c in column])),
      ('INVALID_ARGUMENT', 'found a tensor without', changed(of_no_type)),
      ('INVALID_ARGUMENT', 'found 1099511627776 samples', changed(repeated)),
      ('INVALID_ARGUMENT', 'found 1000000000000 samples', changed(of_no_values(10**12, 0))),
      ('INVALID_ARGUMENT', 'found 9900 values in 15 bytes', request(good | many)),
      ('INVALID_ARGUMENT', 'found 10001 columns', request(wide)),
      ('INVALID_ARGUMENT', 'found 99 empty lists in 10 bytes', request(good | lists)),
      ('INVALID_ARGUMENT', 'found resource values', changed(TensorProto(dtype=20))),
      ('INVALID_ARGUMENT', 'found a tensor without', changed(TensorProto(dtype=77))),
      ('INVALID_ARGUMENT', f"'{name}', sample 0: found 1.5", changed([1.5] * 60)),
      ('INVALID_ARGUMENT', 'found 101 samples', request({n: ['1'] * 101 for n in good})),
      ('RESOURCE_EXHAUSTED', 'larger than max', changed(['x' * 10_000] * 60)),
      (
        'INVALID_ARGUMENT',
        "'probabilty' is unknown.*'probability'",
        request(good, output_filter=['probabilty']),
      ),
      (
        'INVALID_ARGUMENT',
        "signature_name: found 'other'",
        request(good, model_spec={'signature_name': 'other'}),
      ),
      (
        'NOT_FOUND',
        'version 77 is not served',
        request(good, model_spec={'version': {'value': 77}}),
      ),
      (
        'NOT_FOUND',
        'version new is not served',
        request(good, model_spec={'version_label': 'new'}),
      ),
    ):
      with self.subTest(text):
        self.refused(code, f'(?s)^(?!.*\n).*{text}', made)
    self.scores(
      good, model_spec={'version': {'value': self.version}}, output_filter=['probability']
    )

  def test_token_and_metrics(self):
    with self.serving(token='secret') as (client, predict):
      made = request(self.columns)
      self.refused('UNAUTHENTICATED', 'Bearer TOKEN', made, predict)
      predict(made, timeout=60, metadata=[('authorization', 'Bearer secret')])
      _, text, _ = client.ask('GET', '/metrics', Authorization='Bearer secret')
      for line in (
        b'ctr_requests_total{status="200"} 1.0',
        b'ctr_requests_total{status="401"} 1.0',
        b'ctr_samples_total 60.0',
        b'ctr_request_seconds_count 1.0',
      ):
        self.assertIn(line, text)

  def test_no_stranger_is_listened_to_or_fills_the_log(self):
    with served(self.service, rpc=True, token='secret') as client, self.assertLogs() as logged:
      with grpc.insecure_channel(f'127.0.0.1:{client.rpc_port}') as channel:
        for method, code, text in (
          ('Predict', 'INVALID_ARGUMENT', 'found bytes that are no PredictRequest'),
          ('Classify', 'UNIMPLEMENTED', "method: '/tensorflow.serving.*/Classify' is unknown"),
        ):
          call = channel.unary_unary(f'/tensorflow.serving.PredictionService/{method}')
          for _ in range(20):
            self.refused('UNAUTHENTICATED', 'Bearer TOKEN', b'\xff\xff', call)
          allowed = [('authorization', 'Bearer secret')]
          self.refused(code, text, b'\xff\xff', call, metadata=allowed)
    self.assertLen(logged.output, 4)
    self.assertNotIn('Traceback', str(logged.output))

  def test_before_the_first_version(self):
    service = Service(MemoryStore())
    with self.serving(service) as (_, predict):
      for why in ('the server is loading its first version', 'no version is published yet'):
        self.refused('UNAVAILABLE', f'^{why}$', request(self.columns), predict)
        service.refresh()

  def test_too_many_at_a_time(self):
    with self.serving(limits=Limits(concurrency=0)) as (_, predict):
      self.refused('RESOURCE_EXHAUSTED', 'under way', request(self.columns), predict)

  def test_a_port_in_use_is_refused(self):
    with self.assertRaisesRegex(UserError, '--grpc_port .* in use'):
      with served(self.service, rpc=True, rpc_port=self.http.rpc_port):
        pass


if __name__ == '__main__':
  tf.test.main()
