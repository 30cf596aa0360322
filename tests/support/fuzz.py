"""Requests that are almost right, or not at all."""

import copy
import json
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

_VALUES = (
  None,
  True,
  False,
  0,
  -1,
  2**70,
  10**400,
  1.5,
  1e308,
  float('nan'),
  float('inf'),
  '',
  ' ',
  'x' * 2000,
  '\ud800',
  '\0',
  '|;:|;:',
  'größe',
  [],
  [[]],
  [None],
  ['a', 1, None],
  {},
  {'b64': 'eA=='},
  {'b64': '*'},
  {'b64': 1},
  {'a': {'b': []}},
)


def _places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
  """Yields the path of every value in a JSON tree."""
  yield path
  if isinstance(tree, (dict, list)):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
      yield from _places(value, (*path, key))


def requests(rng: random.Random, good: dict[str, Any], count: int) -> Iterator[bytes]:
  """Yields bodies: a good one with some values changed, added or gone, or some bytes."""
  for _ in range(count):
    tree: Any = copy.deepcopy(good)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
      places = [path for path in _places(tree) if path]
      if not places:
        break
      *path, last = rng.choice(places)
      node = tree
      for key in path:
        node = node[key]
      if rng.random() < 0.3:
        del node[last]
      elif isinstance(node, dict) and rng.random() < 0.2:
        node[f'{last}{rng.randrange(9)}'] = rng.choice(_VALUES)
      else:
        node[last] = copy.deepcopy(rng.choice(_VALUES))
    body = bytearray(json.dumps(tree).encode())
    if rng.random() < 0.3:
      for _ in range(rng.choice((1, 3, 30))):
        at = rng.randrange(len(body) + 1)
        body[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    if rng.random() < 0.05:
      body = body[: rng.randrange(len(body) + 1)]
    yield bytes(body)


def mixed(
  rng: random.Random, rows: Sequence[dict[str, Any]], shared: Collection[str], count: int
) -> Iterator[dict[str, Any]]:
  """Yields requests of every form and size, none and many samples too; some lack a column.

  Args:
    rows: the samples to take.
    shared: the names of columns of which all samples of a request may have one value.
  """
  for _ in range(count):
    size = rng.choice((0, 0, 1, 1, 2, 3, 7, 30, rng.choice((256, 300))))
    some = [rng.choice(rows) for _ in range(size)]
    one = rng.choice(rows)
    if rng.random() < 0.1:
      gone = rng.choice(sorted(one))
      some = [{n: v for n, v in row.items() if n != gone} for row in some]
    form = rng.choice(('rows', 'columns', 'context')) if size else 'columns'
    if form == 'rows':
      yield {'instances': some}
    elif form == 'context':
      own = [{n: v for n, v in row.items() if n not in shared} for row in some]
      yield {'context': {n: one[n] for n in shared}, 'instances': own}
    else:
      names = rng.choice((list(shared), rng.sample(sorted(one), rng.randrange(len(one) + 1))))
      columns = {n: [one[n]] if n in names else [row.get(n) for row in some] for n in one}
      yield {'inputs': columns}
