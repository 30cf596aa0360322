"""A server of several processes; and the campaign against the loop from export to score, in short,
of which the long one is a command (campaigns/serving.py).
"""

import collections
import json
import os
import re
import signal
import socket
import subprocess
import unittest

import pytest
import tensorflow as tf

from tests.support import commands
from tests.support.exports import RedisServer, Run
from tests.support.scorer import Client


class ServingTest(tf.test.TestCase):
  def campaign(self, *arguments):
    done = commands.run('-m', 'campaigns.serving', *arguments)
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertIn(' right, 0 wrong', done.stdout)

  @pytest.mark.long
  def test_killed_at_any_moment_nothing_wrong_is_served(self):
    self.campaign('--kills', '5')

  @unittest.skipUnless(RedisServer.installed(), 'redis-server is not installed')
  @pytest.mark.long
  def test_the_same_with_redis(self):
    self.campaign('--kills', '5', '--source', 'redis', '--seed', '2')

  @pytest.mark.long
  def test_the_same_without_a_publisher(self):
    self.campaign('--kills', '5', '--source', 'run', '--seed', '4')

  @pytest.mark.long
  def test_the_same_with_the_trainer(self):
    self.campaign('--trainer', '--kills', '4', '--seconds_between_kills', '2', '--seed', '3')


class ProcessesTest(tf.test.TestCase):
  def test_a_process_that_crashes_is_started_again(self):
    program = (
      'import os, signal, sys\n'
      'from trainer.serving import processes\n'
      'processes.time.sleep = lambda seconds: print("pause", seconds)\n'
      'turns = processes.Turns(2)\n'
      'processes.crash_alone(sys.argv[1], turns)\n'
      'turns.own = 1\n'
      'turns.has(1)\n'
      'print("at work", *["behind another"] * turns.are_anothers(), flush=True)\n'
      'turns.own = 0\n'
      'turns.has(0)\n'
      'os.write(1, open(sys.argv[1] + "/damaged", "rb").read() + b"\\n")'
      ' if os.path.exists(sys.argv[1] + "/damaged") else None\n'
      'with open(sys.argv[1] + "/times", "a") as f:\n'
      '  f.write(".")\n'
      'count = os.path.getsize(sys.argv[1] + "/times")\n'
      'os.kill(os.getpid(), [signal.SIGBUS, signal.SIGSEGV][count - 1]) if count < 3 else None\n'
      'sys.exit(7)\n'
    )
    done = commands.run('-c', program, self.get_temp_dir())
    self.assertEqual(done.returncode, 7, done.stderr)
    found = [line for line in done.stdout.splitlines() if line]
    said = 'a process that used it crashed: SIG'
    wanted = ['at work', 'at work', f'{said}BUS', 'at work', f'{said}SEGV']
    self.assertEqual([line for line in found if 'pause' not in line], wanted)
    self.assertRegex(done.stderr, r'(?s)crashed \(SIGBUS\); .* in 1 s.*\(SIGSEGV\); .* in 2 s')

  def test_connections_are_spread_evenly(self):
    program = (
      'import asyncio, os, types\n'
      'from trainer.serving import http_server, processes\n'
      'from trainer.serving.limits import Limits\n'
      'http_server._TRIES = 1 << 60\n'  # however slow the machine is
      'async def tell(scope, receive, send):\n'
      '  head = [(b"content-length", b"8")]\n'
      '  await send({"type": "http.response.start", "status": 200, "headers": head})\n'
      '  await send({"type": "http.response.body", "body": b"%8d" % os.getpid()})\n'
      'async def serve():\n'
      '  serving = asyncio.create_task(server.serve(sockets=[listener]))\n'
      '  while not server.started:\n'
      '    await asyncio.sleep(0)\n'
      '  print(listener.getsockname()[1], flush=True)\n'
      '  await serving\n'
      'listener = processes.listener("127.0.0.1", 0)\n'
      'member = processes.fork(2, listener)\n'
      'app = types.SimpleNamespace(asgi=tell, gate=types.SimpleNamespace(limits=Limits()))\n'
      'server = http_server.server(app, member.turns)\n'
      'member.starts()\n'
      'asyncio.run(serve())\n'
    )
    server = commands.start('-c', program, stdout=subprocess.PIPE)
    self.addCleanup(server.kill)
    port, _ = (int(server.stdout.readline()) for _ in range(2))  # both accept

    def ask(connection, kept='keep-alive'):
      connection.write(f'GET / HTTP/1.1\r\nHost: x\r\nConnection: {kept}\r\n\r\n'.encode())
      connection.flush()
      while connection.readline() != b'\r\n':
        pass
      return connection.read(8)

    open_ones = []
    for _ in range(2):
      while len(open_ones) < 10:
        one = self.enter_context(socket.create_connection(('127.0.0.1', port)))
        open_ones.append(self.enter_context(one.makefile('rwb')))
        ask(open_ones[-1])  # the server counts it now
      pids = list(map(ask, open_ones))
      self.assertEqual(sorted(collections.Counter(pids).values()), [5, 5])
      for one, pid in zip(open_ones, pids):
        if pid == pids[0]:
          ask(one, 'close')
          self.assertEmpty(one.read())  # the server no longer counts it
      open_ones = [one for one, pid in zip(open_ones, pids) if pid != pids[0]]
    server.terminate()
    self.assertEqual(server.wait(), 0)

  def test_two_processes_answer_as_one(self):
    run_dir = f'{self.get_temp_dir()}/run'
    words = '-m', 'trainer.cli.serve', '--run_dir', run_dir, '--port', '0', '--processes', '2'
    server = commands.start(*words, stdout=subprocess.PIPE)
    self.addCleanup(server.kill)
    told = f' waiting: --run_dir {run_dir}: no such directory yet\n'
    self.assertEndsWith(server.stdout.readline(), told)
    run = Run(run_dir)
    run.train()
    run.export('base')
    slots = dict(run.keys)  # the last text of each
    sample = {slot: [text] for slot, text in slots}
    for lost in (False, True):
      if lost:
        server = commands.start(*words, stdout=subprocess.PIPE)
        self.addCleanup(server.kill)
      port = int(re.search(r':(\d+)/', server.stdout.readline())[1])

      def ask(port=port):
        status, answer = Client(port).predict({'inputs': sample})
        if status == 200:
          self.assertNear(answer['outputs'][0], run.score(1, sample), 1e-6)
        return status

      while ask() == 503:  # the first process has not loaded the version yet
        pass
      children = []
      while len(children) < 2:
        with open(f'/proc/{server.pid}/task/{server.pid}/children') as f:
          children = list(map(int, f.read().split()))
      if lost:
        os.kill(children[1], signal.SIGKILL)
        self.assertEqual(server.wait(), 1)
        continue
      for child in children:  # the other one answers
        os.kill(child, signal.SIGSTOP)
        self.assertEqual(ask(), 200)
        os.kill(child, signal.SIGCONT)
      figures = Client(port).ask('GET', '/metrics')[1].decode()
      self.assertIn('ctr_requests_total{status="200"} 3.0', figures)
      self.assertIn('ctr_version 1.0', figures)
      body = json.dumps({'inputs': sample})
      head = 'POST /v1/models/ctr:predict HTTP/1.1\r\nHost: x\r\nContent-Length: '
      waiting = []
      for child in children:
        os.kill(child, signal.SIGSTOP)
      for _ in range(40):
        waiting.append(self.enter_context(socket.create_connection(('127.0.0.1', port))))
        waiting[-1].sendall(f'{head}{len(body)}\r\n\r\n{body}'.encode())
      server.terminate()
      for child in children:
        os.kill(child, signal.SIGCONT)
      for one in waiting:  # they were not accepted yet
        self.assertStartsWith(one.makefile('rb').read(), b'HTTP/1.1 200 OK')
      self.assertEqual(server.wait(), 0)


if __name__ == '__main__':
  tf.test.main()
