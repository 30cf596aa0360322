"""NumPy's word on rows:

optimizer steps, initial factors, and a store in dicts. Written from the formulas, not from the C++.
"""

import dataclasses
import math

import numpy as np

from ops.sharding import mix64


@dataclasses.dataclass
class Optimizer:
  """The attributes of trainer.config.RowOptimizer."""

  kind: str = 'adagrad'
  learning_rate: float = 0.05
  initial_accumulator: float = 0.1
  beta1: float = 0.9
  beta2: float = 0.999
  epsilon: float = 1e-7
  l1: float = 0.0
  l2: float = 0.0
  l2_mode: str = 'touch'
  clip: float | None = None


def fresh_state(o, w):
  """A dict of float64 arrays."""
  if o.kind == 'ftrl':
    n = np.full(len(w), o.initial_accumulator)
    z = -w * (np.sqrt(n) / o.learning_rate + o.l2) - np.sign(w) * o.l1
    return {'n': n, 'z': z}
  return {
    'sgd': {},
    'adagrad': {'n': np.full(len(w), o.initial_accumulator)},
    'adagrad_row': {'n': np.zeros(1)},
    'adam': {'m': np.zeros(len(w)), 'v': np.zeros(len(w))},
    'rmsprop': {'v': np.zeros(len(w))},
  }[o.kind]


def step_row(o, w, state, gradient, scale, step, missed):
  """One step, in float64. Returns the weights; changes `state`."""
  lr = o.learning_rate
  if o.kind != 'ftrl' and o.l2_mode == 'catch_up':
    lazy = dataclasses.replace(o, l2_mode='touch')
    for before in range(missed, 0, -1):  # with the penalty's gradient alone
      w = step_row(lazy, w, state, np.zeros(len(w)), 1.0, step - before, 0)
  g = gradient * scale
  if o.clip is not None:
    g = np.clip(g, -o.clip, o.clip)
  if o.kind == 'ftrl':
    n = state['n'] + g * g
    denominator = np.sqrt(n) / lr + o.l2
    z = g + np.where(w == 0, state['z'], -w * denominator - np.sign(w) * o.l1)
    state.update(n=n, z=z)
    return np.where(np.abs(z) <= o.l1, 0, (np.sign(z) * o.l1 - z) / denominator)
  g = g + o.l2 * w
  if o.kind == 'sgd':
    w = w - lr * g
  elif o.kind == 'adagrad':
    state['n'] = state['n'] + g * g
    w = w - lr * g / (np.sqrt(state['n']) + o.epsilon)
  elif o.kind == 'adagrad_row':
    w = w - lr * g * np.sqrt(o.initial_accumulator / (o.initial_accumulator + state['n']))
    state['n'] = state['n'] + np.mean(g * g)
  elif o.kind == 'adam':
    state['m'] = o.beta1 * state['m'] + (1 - o.beta1) * g
    state['v'] = o.beta2 * state['v'] + (1 - o.beta2) * g * g
    w = w - lr * math.sqrt(1 - o.beta2**step) / (1 - o.beta1**step) * state['m'] / (
      np.sqrt(state['v']) + o.epsilon
    )
  elif o.kind == 'rmsprop':
    state['v'] = o.beta2 * state['v'] + (1 - o.beta2) * g * g
    w = w - lr * g / (np.sqrt(state['v']) + o.epsilon)
  if o.l1:
    w = np.sign(w) * np.maximum(np.abs(w) - lr * o.l1, 0)
  return w


def add_row(o, w, state, difference):
  """The weights with a difference added; of `state`, FTRL's z becomes one that they follow from."""
  w = w + difference
  if o.kind == 'ftrl':
    solved = -w * (np.sqrt(state['n']) / o.learning_rate + o.l2) - np.sign(w) * o.l1
    state['z'] = np.where(w == 0, np.clip(state['z'], -o.l1, o.l1), solved)
  return w


def initial_factors(keys, seed, width, scale):
  """float64 [n, width]."""
  golden = np.uint64(0x9E3779B97F4A7C15)
  with np.errstate(over='ignore'):
    streams = mix64(np.asarray(keys, np.int64).view(np.uint64) ^ mix64(np.uint64(seed) + golden))
    pairs = np.arange(1, (width + 1) // 2 + 1).astype(np.uint64)
    bits = mix64((streams[:, None] + golden * pairs).astype(np.uint64))
  first = ((bits >> np.uint64(41)).astype(np.float64) + 0.5) / 2**23
  second = (bits & np.uint64(0x7FFFFF)).astype(np.float64) / 2**23
  radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
  both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 2)
  return scale * both.reshape(len(bits), -1)[:, :width]


def rounded_by_chance(rows, keys, seed, step):
  """Rows as a table in bfloat16 keeps them after a step: the bits, uint16 [n, k].

  Args:
    rows: float32 [n, k].
    keys: int64 [n].
    seed: the store's.
    step: the global step.
  """
  golden = np.uint64(0x9E3779B97F4A7C15)
  with np.errstate(over='ignore'):
    of_step = mix64(np.uint64(seed) + golden * np.uint64(step + 1))
    streams = mix64(np.asarray(keys, np.int64).view(np.uint64) ^ of_step)
    words = np.arange(1, (rows.shape[1] + 3) // 4 + 1).astype(np.uint64)
    chances = mix64(streams[:, None] + golden * words).view('<u2')[:, : rows.shape[1]]
  bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
  return ((bits + chances) >> 16).astype(np.uint16)


class Store:
  """Rows in a dict.

  Admission by score >= threshold with the default coefficients, or none (threshold None).
  """

  def __init__(self, tables, optimizers, slot_table, seed, threshold):
    self.tables, self.optimizers, self.slot_table, self.seed, self.threshold = (
      tables,
      optimizers,
      slot_table,
      seed,
      threshold,
    )
    self.rows = {}  # key -> dict: w [1], state, v [D] or None, vstate, last, show, click

  def table(self, key):
    return self.slot_table[key >> 52]

  def initial(self, key):
    t = self.tables[self.table(key)]
    return initial_factors([key], self.seed, t.width, t.init_scale)[0]

  def pull(self, keys, train):
    """Returns: linear [u], a list of factors (or None) a key."""
    linear, factors = [], []
    for key in map(int, keys):
      row = self.rows.get(key)
      linear.append(row['w'][0] if row else 0.0)
      if row and row['v'] is not None:
        factors.append(row['v'])
      else:
        factors.append(self.initial(key) if self.threshold is None and train else None)
    return np.array(linear), factors

  def push(self, keys, had_factors, shows, clicks, linear_grad, factors_grads, scale, step):
    for i, key in enumerate(map(int, keys)):
      row = self.rows.setdefault(
        key, dict(w=np.zeros(1), state=None, v=None, vstate=None, last=0, show=0.0, click=0.0)
      )
      linear, factors = self.optimizers[self.table(key)]
      missed = max(0, step - 1 - row['last']) if row['last'] else 0
      if row['last'] == 0:
        row['state'] = fresh_state(linear, row['w'])
      row['w'] = step_row(
        linear, row['w'], row['state'], np.array([linear_grad[i]]), scale[i], step, missed
      )
      if had_factors[i] and self.threshold is None and row['v'] is None:
        row['v'] = self.initial(key)
        row['vstate'] = fresh_state(factors, row['v'])
      if had_factors[i] and row['v'] is not None:
        row['v'] = step_row(
          factors, row['v'], row['vstate'], factors_grads[i], scale[i], step, missed
        )
      row['last'] = step
      row['show'] += shows[i]
      row['click'] += clicks[i]
      score = (row['show'] - row['click']) * 0.1 + row['click']
      if row['v'] is None and (self.threshold is None or score >= self.threshold):
        row['v'] = self.initial(key)
        row['vstate'] = fresh_state(factors, row['v'])
