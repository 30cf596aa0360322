"""What keras_mf does, with PyTorch's nn.Embedding(sparse=True) and sparse Adagrad."""

import torch

from benchmarks.bench_data import MF_NEGATIVES, MF_TEMPERATURE, Shape, batches, static_ids
from benchmarks.contenders import channel

if __name__ == '__main__':
  spec = channel.spec()
  shape = Shape(**spec['shape'])
  users, items = shape.vocabulary
  rows = torch.nn.Embedding(users + items, shape.width, sparse=True)
  torch.nn.init.normal_(rows.weight, 0, 0.01)
  optimizer = torch.optim.Adagrad(rows.parameters(), lr=1e-2)
  labels = torch.zeros([shape.batch], dtype=torch.int64)

  def step(keys):
    drawn = torch.randint(users, users + items, [MF_NEGATIVES])
    vectors = torch.nn.functional.normalize(rows(torch.cat([keys.reshape(-1), drawn])), dim=1)
    pairs = vectors[: shape.batch * 2].reshape(shape.batch, 2, shape.width)
    positive = (pairs[:, 0] * pairs[:, 1]).sum(1, keepdim=True)
    negative = pairs[:, 0] @ vectors[shape.batch * 2 :].T
    negative = negative.masked_fill(keys[:, 1:] == drawn, -1e9)
    logits = torch.cat([positive, negative], 1) / MF_TEMPERATURE
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(logits, labels).backward()
    optimizer.step()

  keys_of_batches, _, _ = batches(shape, spec['seed'], static_ids(shape))
  tensors = [(torch.from_numpy(keys),) for keys in keys_of_batches]
  channel.train(spec, step, tensors, lambda _: None, {'version': f'torch {torch.__version__}'})
