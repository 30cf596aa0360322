"""How a process joins a job on servers, and the connection that a worker keeps when it restarts.

A worker that goes back to the last checkpoint replaces its program. The new one takes over the
connection, and sends beats before it imports TensorFlow, so it stays a member all the while.
"""

import os
import time
from multiprocessing.connection import Connection

from trainer import runtime
from trainer.comm import messages


def connect(address: messages.Address, secret: bytes, seconds: float) -> messages.MessageConnection:
  """Connects to a coordinator; ConnectionError if none that knows the secret answers in time."""
  return _with_beats(messages.connect(address, secret, seconds), seconds)


def inherited(seconds: float) -> messages.MessageConnection | None:
  """Returns the connection of the program that this one replaces; None if it replaces none."""
  descriptor = runtime.inherited_connection()
  if descriptor is None:
    return None
  os.set_inheritable(descriptor, False)
  return _with_beats(Connection(descriptor), seconds)


def _with_beats(connection: Connection, seconds: float) -> messages.MessageConnection:
  began = time.monotonic()
  # Until the client of the coordinator reports progress in place of this.
  return messages.MessageConnection(connection, seconds, lambda: ['beat', time.monotonic() - began])
