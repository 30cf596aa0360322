"""Only our input: shuffled and prefetched batches of a prepared pass. The spec has `config`."""

from benchmarks.contenders import channel
from benchmarks.contenders.ours import stream
from trainer import config

if __name__ == '__main__':
  from trainer.comm.communicator import SingleProcess

  spec = channel.spec()
  batches = stream(config.load(spec['config']), SingleProcess())

  def take_steps(count):
    for _ in range(count):
      next(batches)

  channel.serve(spec, take_steps)
