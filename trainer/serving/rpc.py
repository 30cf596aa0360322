"""Answers TensorFlow Serving's gRPC call PredictionService.Predict.

A request's inputs are columns, as in the REST form's "inputs": string, integer or float tensors of
shape [B], [1] or [] (one value for all samples), or [B, n] (each sample has n features). As there,
'' is a missing text; NaN is a missing number.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow_serving.apis.predict_pb2 import PredictRequest, PredictResponse

from trainer.errors import UserError, nearest
from trainer.plain_data import Json
from trainer.serving import rest
from trainer.serving.batcher import Batcher
from trainer.serving.gate import Gate
from trainer.serving.http_server import SECONDS_TO_ACCEPT, SECONDS_TO_FINISH, most_connections
from trainer.serving.limits import BadRequest, Refused, TooLarge
from trainer.serving.requests import SAMPLE_BYTES, Request, check_columns, check_cost

PREDICT = '/tensorflow.serving.PredictionService/Predict'
TensorProto = type(tf.make_tensor_proto(0))  # TensorFlow has no public name for it
_SECONDS_QUIET = 0.1  # without a new call, before the server stops
_LIST_BYTES = 64  # of a list without values, about
_STRING, _FLOAT = tf.string.as_datatype_enum, tf.float32.as_datatype_enum
_DTYPES = {
  dtype.as_datatype_enum: dtype.as_numpy_dtype
  for dtype in (tf.float32, tf.float64, tf.int32, tf.int64)
}
_CODES = {
  400: grpc.StatusCode.INVALID_ARGUMENT,
  401: grpc.StatusCode.UNAUTHENTICATED,
  404: grpc.StatusCode.NOT_FOUND,
  413: grpc.StatusCode.INVALID_ARGUMENT,
  429: grpc.StatusCode.RESOURCE_EXHAUSTED,
  500: grpc.StatusCode.INTERNAL,
  501: grpc.StatusCode.UNIMPLEMENTED,
  503: grpc.StatusCode.UNAVAILABLE,
}


class _Call:
  """One call: reads its message, and writes its answer."""

  def __init__(self, gate: Gate):
    self._gate = gate

  def parse(self, message: bytes, max_instances: int) -> Request:
    """Returns the samples of a request; Refused if it asks for another model."""
    try:
      request = PredictRequest.FromString(message)
    except DecodeError:
      raise BadRequest('found bytes that are no PredictRequest') from None
    check_columns(request.inputs)
    self._gate.check_name(request.model_spec.name)
    self._spec, self._outputs = request.model_spec, list(request.output_filter)
    columns, written = {}, 0  # bytes of values and lists that the message does not hold each
    for name, tensor in request.inputs.items():
      shape = _shape(name[:80], tensor)
      check_cost(shape[0] if shape else 1, 0, max_instances)
      size, given = math.prod(shape), tensor.ByteSize()
      if size > given or len(tensor.string_val) == 1:
        written += size * given
      if len(shape) == 2:
        written += _LIST_BYTES * max(0, shape[0] - given)
      if written > max_instances * SAMPLE_BYTES:
        what = f'{size} values' if size else f'{shape[0]} empty lists'
        raise TooLarge(f"inputs: '{name[:80]}': found {what} in {given} bytes; wanted each value")
      columns[name] = _values(name[:80], tensor, shape)
    signature = self._spec.signature_name
    return rest.request_of({'signature_name': signature, 'inputs': columns}, max_instances)

  def answer(self, request: Request, outputs: Mapping[str, np.ndarray], version: int) -> bytes:
    """Answers with {name: float32 [B]}; BadRequest, or Refused for another version."""
    spec = self._spec
    if spec.WhichOneof('version_choice') and spec.version.value != version:
      found = spec.version_label[:80] or spec.version.value
      raise Refused(404, f'version {found} is not served; wanted {version}, or none')
    response = PredictResponse()
    response.model_spec.name = spec.name
    response.model_spec.version.value = version
    response.model_spec.signature_name = rest.SIGNATURE
    for name in dict.fromkeys(self._outputs) or outputs:
      if name not in outputs:
        known = list(outputs)
        raise BadRequest(f"output_filter: '{name[:80]}' is unknown{nearest(name[:80], known)}")
      tensor = response.outputs[name]
      tensor.dtype = tf.float32.as_datatype_enum
      tensor.tensor_shape.dim.add(size=len(outputs[name]))
      tensor.float_val.extend(outputs[name].tolist())
    return response.SerializeToString()


def _shape(name: str, tensor: TensorProto) -> list[int]:
  shape = [dim.size for dim in tensor.tensor_shape.dim[:3]]
  if tensor.tensor_shape.unknown_rank or min(shape, default=0) < 0 or len(shape) > 2:
    raise BadRequest(f"inputs: '{name}': wanted a tensor of shape [samples] or [samples, features]")
  return shape


def _values(name: str, tensor: TensorProto, shape: Sequence[int]) -> Json:
  """Returns the values of a tensor, as JSON would have them."""
  size = math.prod(shape)
  try:
    # make_ndarray, the last way, takes ten times as long as the others.
    if tensor.dtype == _STRING:
      values = [value.decode() for value in tensor.string_val]
      values = values * size if len(values) == 1 else values
    elif tensor.tensor_content and (dtype := _DTYPES.get(tensor.dtype)):
      values = np.frombuffer(tensor.tensor_content, dtype).tolist()
    elif len(tensor.float_val) == size and tensor.dtype == _FLOAT:
      values = list(tensor.float_val)
    else:
      dtype = tf.as_dtype(tensor.dtype)
      if not (dtype.is_integer or dtype.is_floating or dtype.is_bool):
        raise BadRequest(f"inputs: '{name}': found {dtype.name} values; wanted texts or numbers")
      values = tf.make_ndarray(tensor).ravel().tolist()
  except UnicodeDecodeError:
    raise BadRequest(f"inputs: '{name}': found a string that is not UTF-8") from None
  except (TypeError, ValueError):
    values = []
  if len(values) != size:
    raise BadRequest(f"inputs: '{name}': found a tensor without the values of its shape")
  if len(shape) == 2:
    return [values[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]
  return values if shape else values[0]


class _Handler(grpc.GenericRpcHandler):
  """Takes the messages of all calls undecoded, to check the client's token before parsing one."""

  def __init__(self, batcher: Batcher):
    self._batcher, self._gate, self.begun = batcher, batcher.gate, 0  # calls

  def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
    is_known = details.method == PREDICT

    async def answer(message: bytes, context: grpc.aio.ServicerContext) -> bytes:
      self.begun += 1
      metadata = dict(context.invocation_metadata())
      try:
        self._gate.authorise(metadata.get('authorization', ''))
        if not is_known:
          raise Refused(501, f'method: {details.method[:80]!r} is unknown; wanted {PREDICT!r}')
        response = await self._batcher.scored(_Call(self._gate), message)
      except Exception as e:
        status, text = self._gate.told('Predict' if is_known else 'a gRPC call', e)
        await context.abort(_CODES[status], text)
      self._gate.count(200)
      return response

    return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.asynccontextmanager
async def listening(batcher: Batcher, host: str, port: int, shared: bool) -> AsyncIterator[int]:
  """Answers gRPC calls while the context lasts; yields the port, any free one for port 0.

  `shared` is whether other processes of this server listen there.
  """
  options = {
    'grpc.max_receive_message_length': batcher.gate.limits.body_bytes,
    # Else two servers could share a port, and each answer some calls.
    'grpc.so_reuseport': int(shared),
    # Whoever sends nothing, or not all of it, keeps no place of a connection for long.
    'grpc.max_allowed_incoming_connections': most_connections() // 2,
    'grpc.server_handshake_timeout_ms': int(1000 * batcher.gate.limits.seconds_to_send),
    'grpc.max_connection_idle_ms': 75_000,
    'grpc.max_connection_age_ms': 600_000,
    'grpc.max_connection_age_grace_ms': 60_000,
  }
  server = grpc.aio.server(options=list(options.items()))
  server.add_generic_rpc_handlers((handler := _Handler(batcher),))
  try:
    bound = server.add_insecure_port(f'[{host}]:{port}' if ':' in host else f'{host}:{port}')
  except RuntimeError:
    raise UserError(
      f'--host {host}, --grpc_port {port}: found in use or not of this machine'
    ) from None
  await server.start()
  try:
    yield bound
  finally:
    before, quiet_by = -1, time.monotonic() + SECONDS_TO_ACCEPT
    while handler.begun > before and time.monotonic() < quiet_by:  # else calls that wait would fail
      before = handler.begun
      await asyncio.sleep(_SECONDS_QUIET)
    await server.stop(SECONDS_TO_FINISH)
