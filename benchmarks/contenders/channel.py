"""The protocol between a contender and benchmarks.run; standard library only.

A contender is a process `python -m benchmarks.contenders.NAME SPEC`, where SPEC is a JSON object.
It connects to the Unix socket `spec['socket']`, and both sides send lines of JSON. After its first
step it sends `{"pid", "startup_seconds", …}`. For each line N that it then receives, it takes N
steps and answers `{"seconds", "cpu_seconds", "rss", …}`. It ends when the connection closes.
Between its turns run.py stops it (SIGSTOP), so that one contender works at a time. Contenders run
in several environments.
"""

import itertools
import json
import os
import socket
import sys
import time


def spec():
  return json.loads(sys.argv[1])


def rss():
  """Returns the resident bytes of this process."""
  with open('/proc/self/statm', encoding='ascii') as f:
    return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def serve(spec, take_steps, hello=None, more=dict):
  """Serves rounds until run.py closes the connection.

  Args:
    spec: of the contender.
    take_steps: takes a number of steps and returns when they are finished.
    hello: what the first message holds besides.
    more: called after each round, untimed; returns what the answer holds besides.
  """
  take_steps(1)
  with socket.socket(socket.AF_UNIX) as line:
    line.connect(spec['socket'])
    with line.makefile('rw', encoding='ascii') as text:

      def say(message):
        text.write(json.dumps(message) + '\n')
        text.flush()

      say({'pid': os.getpid(), 'startup_seconds': time.time() - spec['launched'], **(hello or {})})
      for request in text:
        start, cpu = time.perf_counter(), time.process_time()
        take_steps(int(request))
        spent = {'seconds': time.perf_counter() - start, 'cpu_seconds': time.process_time() - cpu}
        say(spent | {'rss': rss(), **more()})


def train(spec, step, batches, wait, hello=None):
  """Serves rounds of `step(*batch)`, again and again over the batches.

  Args:
    spec: of the contender.
    step: a training step.
    batches: tuples of arguments.
    wait: takes the result of the last step of a round and waits until it is computed.
    hello: as of `serve`.
  """
  endless = itertools.cycle(batches)

  def take_steps(count):
    for _ in range(count):
      result = step(*next(endless))
    wait(result)

  serve(spec, take_steps, hello)
