"""horovodrun as launch/ranks.py starts it: strangers read no variables and reach no store.

By itself, horovodrun writes all variables of its environment into the command lines of ranks, which
every user of a host can read. Its key-value store accepts writes from anyone who reaches it, and a
wrong value there aborts a rank. Here command lines hold no such variables: a rank on this host
inherits them, launch/rank.sh reads them on others. The store answers only requests whose path
begins with the job's token, and listens on loopback if all ranks are on this host.
"""

import hmac
import os
import sys
from http.server import HTTPServer

from horovod.runner import gloo_run
from horovod.runner.common.util import env
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from horovod.runner.launch import run_commandline
from horovod.runner.util import remote
from ranks import SSH, STORE_TOKEN

_FORBIDDEN = 403
bind = HTTPServer.server_bind


class Handler(RendezvousHandler):
  """Answers requests for /TOKEN:PORT/SCOPE/KEY, and refuses all others before it reads them."""

  def parse_request(self) -> bool:
    if not super().parse_request():
      return False
    token, _, rest = self.path.removeprefix('/').partition('/')
    wanted = f'{os.environ[STORE_TOKEN]}:{self.server.server_port}'
    if not hmac.compare_digest(token.encode(), wanted.encode()):
      self.close_connection = True
      self.send_status_code(_FORBIDDEN)
      return False
    self.path = f'/{rest}'
    return True


class Store(gloo_run.RendezvousServer):
  """horovodrun's key-value store, for the processes of the job alone."""

  def start(self) -> int:
    return super().start(Handler)


def bind_to_loopback(server: HTTPServer) -> None:
  server.server_address = '127.0.0.1', server.server_address[1]
  bind(server)


if __name__ == '__main__':  # horovodrun starts processes that import this file again
  if sys.argv[1] == '--loopback':
    del sys.argv[1]
    HTTPServer.server_bind = bind_to_loopback
  gloo_run.RendezvousServer = Store
  RendezvousHTTPServer.handle_error = lambda *_: None  # a stranger's broken request is no news
  env.is_exportable = lambda name: False
  remote.SSH_COMMAND_PREFIX = ' '.join(SSH)
  sys.exit(run_commandline())
