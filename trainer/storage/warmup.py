"""Warm-up requests for TensorFlow Serving: what it sends a new version before it counts as loaded.

They lie in `assets.extra/tf_serving_warmup_requests` beside the SavedModel: a TFRecord file of
`tensorflow.serving.PredictionLog` messages. The few message types that this takes are declared here
with the field numbers of tensorflow_serving/apis/*.proto; the package that has them all brings a
gRPC client along.
"""

import os
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

FILE = os.path.join('assets.extra', 'tf_serving_warmup_requests')
SIZES = (1, 100)  # samples of the requests
_PACKAGE = 'tensorflow.serving'
_OPTIONAL = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
_REPEATED = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_TENSOR = type(tf.make_tensor_proto(0)).DESCRIPTOR


def _message_class() -> type:
  """Returns the class of PredictionLog."""
  file = descriptor_pb2.FileDescriptorProto(
    name='ctr_trainer/warmup.proto', package=_PACKAGE, syntax='proto3'
  )
  file.dependency.append(_TENSOR.file.name)

  def message(parent: Message, name: str, *fields: tuple) -> Message:
    added = parent.add(name=name)
    for field, number, kind, label in fields:
      is_text = kind == _STRING
      added.field.add(
        name=field,
        number=number,
        label=label,
        type=_STRING if is_text else _MESSAGE,
        type_name=None if is_text else f'.{kind}',
      )
    return added

  message(
    file.message_type,
    'ModelSpec',
    ('name', 1, _STRING, _OPTIONAL),
    ('signature_name', 3, _STRING, _OPTIONAL),
  )
  request = message(
    file.message_type,
    'PredictRequest',
    ('model_spec', 1, f'{_PACKAGE}.ModelSpec', _OPTIONAL),
    ('inputs', 2, f'{_PACKAGE}.PredictRequest.InputsEntry', _REPEATED),
  )
  entry = message(
    request.nested_type,
    'InputsEntry',
    ('key', 1, _STRING, _OPTIONAL),
    ('value', 2, 'tensorflow.TensorProto', _OPTIONAL),
  )
  entry.options.map_entry = True
  message(file.message_type, 'PredictLog', ('request', 1, f'{_PACKAGE}.PredictRequest', _OPTIONAL))
  message(
    file.message_type, 'PredictionLog', ('predict_log', 6, f'{_PACKAGE}.PredictLog', _OPTIONAL)
  )
  pool = descriptor_pool.Default()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName(f'{_PACKAGE}.PredictionLog'))


PredictionLog = _message_class()


def write(path: str, specs: Mapping[str, tf.TensorSpec]) -> None:
  """Writes requests of some sizes, with zeros and blanks, for `serving_default`.

  Args:
    path: the directory of a SavedModel.
    specs: its inputs by name, each with the samples as its first dimension.
  """
  file = os.path.join(path, FILE)
  os.makedirs(os.path.dirname(file), exist_ok=True)
  with tf.io.TFRecordWriter(file) as writer:
    for size in SIZES:
      log = PredictionLog()
      request = log.predict_log.request
      request.model_spec.signature_name = 'serving_default'
      for name, spec in specs.items():
        shape = [size, *spec.shape[1:]]
        value = np.full(shape, b'0') if spec.dtype == tf.string else np.zeros(shape)
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value, spec.dtype))
      writer.write(log.SerializeToString())
