"""Sends requests to a scorer and measures its answers.

It is a process of its own, for serving_bench: it reads the arguments of `measure` as JSON from
standard input, and prints what `measure` returns.
"""

import http.client
import json
import socket
import sys
import threading
import time


def measure(port, bodies, connections, seconds, rate=None, verb='predict'):
  """Sends requests on several connections; each connection waits for its last answer.

  Args:
    port: the scorer's port on this machine.
    bodies: JSON texts, sent in turn.
    connections: the number of requests under way.
    seconds: how long to measure.
    rate: requests per second, evenly spaced; None: as many as are answered. Latencies count from
      the time when a request was due, so they include the wait behind a slow answer.
    verb: predict or recommend.
  Returns:
    A dict of rate (answers per second), p50_ms, p99_ms and failed.
  """
  requests = [_request(body.encode(), verb) for body in bodies]
  latencies, failed = [], []
  started = time.perf_counter()
  ended = started + seconds

  def ask(first):
    connection = socket.create_connection(('127.0.0.1', port), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    number = first
    while True:
      due = started + number / rate if rate else time.perf_counter()
      if due > ended:
        break
      time.sleep(max(0, due - time.perf_counter()))
      connection.sendall(requests[number % len(requests)])
      is_good = _status(connection) == 200
      latencies.append(time.perf_counter() - due)
      if not is_good:
        failed.append(number)
      number += connections
    connection.close()

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


def _status(connection):
  """Reads an answer; returns its status."""
  answer = http.client.HTTPResponse(connection)
  answer.begin()
  answer.read()
  return answer.status


if __name__ == '__main__':
  print(json.dumps(measure(**json.load(sys.stdin))))
