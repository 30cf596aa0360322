"""The contender's end of the line to benchmarks.run. Standard library only: contenders run in
several environments.

A contender is a process `python -m benchmarks.contenders.NAME SPEC`, SPEC being a JSON object; it
connects to the Unix socket
`spec['socket']` and speaks lines of JSON. It says `{"pid", "startup_seconds", ...}` once its first
step is done; then, for each line N, it takes N steps and says `{"seconds", "cpu_seconds", "rss",
...}`. It ends when the line does. In between run.py stops it (SIGSTOP): one works at a time.
"""

import json
import os
import socket
import sys
import time


def spec():
  return json.loads(sys.argv[1])


def rss():
  """Bytes of this process that lie in memory."""
  with open('/proc/self/statm', encoding='ascii') as f:
    return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def serve(spec, take_steps, hello=None, more=dict):
  """Serves rounds until run.py hangs up.

  Args:
    take_steps: N -> nothing, having finished N steps.
    hello: what to tell of this contender, beside pid and startup_seconds.
    more: called after each round, untimed: what to tell beside these.
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


def turns(items):
  """`next_item()`, which goes round `items`."""
  place = [-1]

  def following():
    place[0] = (place[0] + 1) % len(items)
    return items[place[0]]

  return following
