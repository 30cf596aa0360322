"""PyTorch's nn.Embedding(sparse=True) over a static vocabulary, with sparse Adagrad.

One table of D + 1 columns holds vectors and weights.
"""

import itertools

import torch

from benchmarks.bench_data import Shape, batches, static_ids
from benchmarks.contenders import channel

if __name__ == '__main__':
  spec = channel.spec()
  shape = Shape(**spec['shape'])
  rows = torch.nn.Embedding(sum(shape.vocabulary), shape.width + 1, sparse=True)
  torch.nn.init.normal_(rows.weight, 0, 0.01)
  widths = [shape.slots * shape.width + shape.dense, *shape.hidden]
  hidden = [
    m for i, o in itertools.pairwise(widths) for m in (torch.nn.Linear(i, o), torch.nn.ReLU())
  ]
  net = torch.nn.Sequential(*hidden, torch.nn.Linear(widths[-1], 1))
  optimizers = [torch.optim.Adagrad(m.parameters(), lr=1e-2) for m in (rows, net)]

  def step(keys, dense, label):
    row = rows(keys)
    linear, vectors = row[:, :, :1].sum(1), row[:, :, 1:]
    total = vectors.sum(1)
    fm = 0.5 * (total * total - (vectors * vectors).sum(1)).sum(1, keepdim=True)
    logits = (
      linear + fm + net(torch.cat([vectors.reshape(-1, shape.slots * shape.width), dense], 1))
    )
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
    for optimizer in optimizers:
      optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
      optimizer.step()

  arrays = zip(*batches(shape, spec['seed'], static_ids(shape)))
  tensors = [tuple(map(torch.from_numpy, batch)) for batch in arrays]
  channel.train(spec, step, tensors, lambda _: None, {'version': f'torch {torch.__version__}'})
