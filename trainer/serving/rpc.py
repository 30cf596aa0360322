"""Answers TensorFlow Serving's gRPC call PredictionService.Predict.

A request's inputs are columns, as in the REST form's "inputs": string, integer or float tensors of
shape [B], [1] or [] (one value for all samples), or [B, n] (each sample has n features). As there,
'' is a missing text; NaN is a missing number.
"""

import contextlib
import math
import sys
from collections.abc import AsyncIterator, Mapping

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import prediction_service_pb2_grpc as service_pb2
from tensorflow_serving.apis.predict_pb2 import PredictRequest, PredictResponse

from trainer.errors import UserError, nearest
from trainer.plain_data import Json
from trainer.serving import rest
from trainer.serving.http import SECONDS_TO_FINISH, App, Refused
from trainer.serving.scorer import BadRequest

TensorProto = type(tf.make_tensor_proto(0))  # TensorFlow has no public name for it
_STRING = tf.string.as_datatype_enum
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
  503: grpc.StatusCode.UNAVAILABLE,
}


def parse(message: PredictRequest, max_instances: int) -> rest.Request:
  """Returns the samples of a request.

  Raises:
    BadRequest: if the request is malformed; the message is one line.
    TooLarge: if it has more than `max_instances` samples.
  """
  # A tensor may give one value for all its elements, so its size is not bounded by the message's.
  most = max(max_instances, message.ByteSize())
  columns = {name: _values(name[:80], tensor, most) for name, tensor in message.inputs.items()}
  signature = message.model_spec.signature_name
  return rest.request_of({'signature_name': signature, 'inputs': columns}, max_instances)


def _values(name: str, tensor: TensorProto, most: int) -> Json:
  """Returns the values of a tensor of at most `most` elements, as JSON would have them."""
  shape = [dim.size for dim in tensor.tensor_shape.dim]
  if tensor.tensor_shape.unknown_rank or min(shape, default=0) < 0 or len(shape) > 2:
    raise BadRequest(f"inputs: '{name}': wanted a tensor of shape [samples] or [samples, features]")
  size = math.prod(shape)
  if size > most:
    raise rest.TooLarge(f"inputs: '{name}': found {size} values; wanted at most {most}")
  try:
    # The first two take a tenth of the time of make_ndarray.
    if tensor.dtype == _STRING:
      values = [value.decode() for value in tensor.string_val]
      values = values * size if len(values) == 1 else values
    elif tensor.tensor_content and (dtype := _DTYPES.get(tensor.dtype)):
      values = np.frombuffer(tensor.tensor_content, dtype).tolist()
    else:
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


def answer(
  request: rest.Request, outputs: Mapping[str, np.ndarray], version: int
) -> PredictResponse:
  """Returns the answer to a request for scores.

  Args:
    outputs: {name: float32 [B]}.
  """
  response = PredictResponse()
  response.model_spec.version.value = version
  response.model_spec.signature_name = rest.SIGNATURE
  for name, values in outputs.items():
    tensor = response.outputs[name]
    tensor.dtype = tf.float32.as_datatype_enum
    tensor.tensor_shape.dim.add(size=len(values))
    tensor.float_val.extend(values.tolist())
  return response


class _Predictions(service_pb2.PredictionServiceServicer):
  """The gRPC service of an application; its limits, token and metrics hold here too."""

  def __init__(self, app: App):
    self._app = app

  async def Predict(
    self, request: PredictRequest, context: grpc.aio.ServicerContext
  ) -> PredictResponse:
    try:
      response = await self._answer(request, dict(context.invocation_metadata()))
    except Exception as e:
      status, text = self._app.told('Predict', e)
      await context.abort(_CODES[status], text)
    self._app.count(200)
    return response

  async def _answer(self, request: PredictRequest, metadata: Mapping[str, str]) -> PredictResponse:
    spec = request.model_spec
    self._app.authorise(metadata.get('authorization', ''))
    self._app.check_name(spec.name)
    response = await self._app.scored(sys.modules[__name__], request, request.ByteSize())
    response.model_spec.name = spec.name
    version = response.model_spec.version.value
    if spec.WhichOneof('version_choice') and spec.version.value != version:
      found = spec.version_label[:80] or spec.version.value
      raise Refused(404, f'version {found} is not served; wanted {version}, or none')
    wanted = set(request.output_filter) or response.outputs.keys()
    for name in wanted - response.outputs.keys():
      known = list(response.outputs)
      raise BadRequest(f"output_filter: '{name[:80]}' is unknown{nearest(name[:80], known)}")
    for name in response.outputs.keys() - wanted:
      del response.outputs[name]
    return response


@contextlib.asynccontextmanager
async def listening(app: App, host: str, port: int) -> AsyncIterator[int]:
  """Answers gRPC calls while the context lasts; yields the port.

  Args:
    port: the port to listen at; 0: any free port.
  Raises:
    UserError: if the port cannot be listened at.
  """
  options = {
    'grpc.max_receive_message_length': app.limits.body_bytes,
    'grpc.so_reuseport': 0,  # else two servers could share a port, and each answer some calls
  }
  server = grpc.aio.server(options=list(options.items()))
  service_pb2.add_PredictionServiceServicer_to_server(_Predictions(app), server)
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
    await server.stop(SECONDS_TO_FINISH)
