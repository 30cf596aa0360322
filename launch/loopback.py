"""horovodrun for ranks on this host alone: its key-value store listens on loopback.

By itself, the store listens on all interfaces and accepts writes from anyone who reaches it.
"""

import sys
from http.server import HTTPServer

from horovod.runner.launch import run_commandline

bind = HTTPServer.server_bind


def bind_to_loopback(server: HTTPServer) -> None:
  server.server_address = '127.0.0.1', server.server_address[1]
  bind(server)


if __name__ == '__main__':  # horovodrun starts processes that import this file again
  HTTPServer.server_bind = bind_to_loopback
  sys.exit(run_commandline())
