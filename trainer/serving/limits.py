"""What a server allows, and how it refuses the rest."""

import dataclasses

from trainer.errors import UserError


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits for each request and for all requests together."""

  body_bytes: int = 4 << 20
  instances: int = 10_000
  concurrency: int = 64  # requests at a time, scored or waiting
  seconds_to_send: float = 10.0  # for a request's head, and again for its body
  threads: int = 1  # which compute scores
  strict: bool = False  # whether columns that the model does not read are refused, not ignored


class Refused(UserError):
  """A request is refused; `status` is the HTTP status of the answer."""

  def __init__(self, status: int, text: str):
    super().__init__(text)
    self.status = status


class BadRequest(Refused):
  """A client's mistake."""

  def __init__(self, text: str):
    super().__init__(400, text)


class TooLarge(Refused):
  """A request that exceeds a limit."""

  def __init__(self, text: str):
    super().__init__(413, text)
