"""The communicators of ranks that horovodrun started."""

from trainer import runtime
from trainer.comm import horovod as comm_horovod
from trainer.comm.communicator import Communicator
from trainer.config import Sync


def ranks(**sync) -> Communicator:
  """Returns the communicator that the config section `sync` asks for; every rank calls it."""
  import horovod.tensorflow as hvd

  hvd.init()
  return comm_horovod.communicator(runtime.launched(), Sync(**sync))
