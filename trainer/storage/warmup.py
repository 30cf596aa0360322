"""Writes the requests by which TensorFlow Serving warms up a new version before serving it.

The file `assets.extra/tf_serving_warmup_requests` holds them, as TFRecords of
`tensorflow.serving.PredictionLog` messages. We encode these ourselves, by the field numbers of
tensorflow_serving/apis/*.proto: the package with their classes needs a gRPC client.
"""

import os
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

FILE = os.path.join('assets.extra', 'tf_serving_warmup_requests')
SIZES = (1, 100)  # samples of the requests


def _field(number: int, content: bytes) -> bytes:
  """Encodes a field of a Protocol Buffers message: its tag, its length in base 128, its content."""
  length, rest = bytearray(), len(content)
  while rest >= 128:
    length.append(rest % 128 + 128)
    rest //= 128
  return bytes([number << 3 | 2, *length, rest]) + content


def write(path: str, specs: Mapping[str, tf.TensorSpec]) -> None:
  """Writes two warm-up requests into the SavedModel `path`, one of 1 sample and one of 100 samples.

  They call `serving_default` with 0 in place of every number and the text '0' in every string.
  """
  file = os.path.join(path, FILE)
  os.makedirs(os.path.dirname(file), exist_ok=True)
  with tf.io.TFRecordWriter(file) as writer:
    for size in SIZES:
      request = _field(1, _field(3, b'serving_default'))  # model_spec { signature_name }
      for name, spec in specs.items():
        shape = [size, *spec.shape[1:]]
        value = np.full(shape, b'0') if spec.dtype == tf.string else np.zeros(shape)
        tensor = tf.make_tensor_proto(value, spec.dtype).SerializeToString()
        request += _field(2, _field(1, name.encode()) + _field(2, tensor))  # inputs { key value }
      writer.write(_field(6, _field(1, request)))  # predict_log { request }
