"""Sends requests to a scorer and measures its answers.

It is a process of its own, for serving_bench: it reads the arguments of `measure` as JSON from
standard input, and prints what `measure` returns.
"""

import contextlib
import json
import socket
import sys
import threading
import time


def measure(port, bodies, connections, seconds, rate=None, verb='predict', calls=False):
  """Sends requests on several connections; each connection waits for its last answer.

  Args:
    port: the scorer's port on this machine.
    bodies: JSON texts, sent in turn.
    connections: the number of requests under way.
    seconds: how long to measure.
    rate: requests per second, evenly spaced; None: as many as are answered. Latencies count from
      the time when a request was due, so they include the wait behind a slow answer.
    verb: predict or recommend.
    calls: whether the port answers gRPC calls; the bodies' columns become tensors then.
  Returns:
    A dict of rate (answers per second), p50_ms, p99_ms and failed.
  """
  if calls:
    requests = [_predict_request(json.loads(body)['inputs']) for body in bodies]
  else:
    requests = [_request(body.encode(), verb) for body in bodies]
  connected = _channel if calls else _socket
  latencies, failed = [], []
  started = time.perf_counter()
  ended = started + seconds

  def ask(first):
    number = first
    with connected(port) as is_answered:
      while True:
        due = started + number / rate if rate else time.perf_counter()
        if due > ended:
          break
        time.sleep(max(0, due - time.perf_counter()))
        is_good = is_answered(requests[number % len(requests)])
        latencies.append(time.perf_counter() - due)
        if not is_good:
          failed.append(number)
        number += connections

  def client(first):
    try:
      ask(first)
    except OSError as e:
      failed.append(e)

  threads = [threading.Thread(target=client, args=(i,)) for i in range(connections)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  latencies.sort()

  def percentile(share):
    return 1000 * latencies[int(share * (len(latencies) - 1))] if latencies else float('nan')

  return {
    'rate': len(latencies) / (time.perf_counter() - started),
    'p50_ms': percentile(0.5),
    'p99_ms': percentile(0.99),
    'failed': len(failed),
  }


def _request(body, verb):
  head = (
    f'POST /v1/models/ctr:{verb} HTTP/1.1\r\nHost: localhost\r\n'
    f'Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n'
  )
  return head.encode() + body


def _predict_request(columns):
  import tensorflow as tf
  from tensorflow_serving.apis.predict_pb2 import PredictRequest

  request = PredictRequest()
  request.model_spec.name = 'ctr'
  for name, values in columns.items():
    request.inputs[name].CopyFrom(tf.make_tensor_proto(values))
  return request.SerializeToString()


@contextlib.contextmanager
def _socket(port):
  """Opens an HTTP connection; yields a function that sends a request and says if it got a 200."""
  with socket.create_connection(('127.0.0.1', port), timeout=60) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def is_answered(request):  # http.client would take as much time as the server
      connection.sendall(request)
      answer, size = b'', -1
      while size < 0 or len(answer) < size:
        if not (piece := connection.recv(1 << 16)):
          raise ConnectionError('the server has closed the connection')
        answer += piece
        if size < 0 and (end := answer.find(b'\r\n\r\n')) >= 0:
          head = answer[:end].lower()
          size = end + 4 + int(head.partition(b'content-length:')[2].split(b'\r\n')[0])
      return answer.startswith(b'HTTP/1.1 200 ')

    yield is_answered


@contextlib.contextmanager
def _channel(port):
  """Opens a gRPC connection; yields a function that makes a call and says if it was answered."""
  import grpc

  # Else all channels of a process share one connection.
  options = [('grpc.use_local_subchannel_pool', 1)]
  with grpc.insecure_channel(f'127.0.0.1:{port}', options) as channel:
    call = channel.unary_unary('/tensorflow.serving.PredictionService/Predict')

    def is_answered(request):
      try:
        return bool(call(request, timeout=60))
      except grpc.RpcError:
        return False

    yield is_answered


if __name__ == '__main__':
  print(json.dumps(measure(**json.load(sys.stdin))))
