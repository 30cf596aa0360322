"""What bfloat16 costs in AUC: `python -m benchmarks.dtypes` rewrites that part of docs/quality.md.

It compares float32 and bfloat16 on two logs, all else being equal: `train.dense_dtype` with the
tuned DeepFM, and `sparse.tables.default.dtype` with the default FM. The median over seeds should be
at most .0005 below float32. Runs lie in build/dtypes/; finished ones are kept. `python -m
benchmarks.dtypes dense` makes one comparison and only prints it.

If the processor cannot multiply in bfloat16, factors are rounded and multiplied in float32.
"""

import contextlib
import copy
import os
from collections.abc import Sequence
from unittest import mock

import numpy as np
import tensorflow as tf
from absl import app

from benchmarks.compared_logs import LOGS, evaluated, fm_settings, of_test, prepared
from benchmarks.page import ROOT, made_by, markdown_table, write_between
from ops import bfloat16, float32

OUT = os.path.join('build', 'dtypes')
PAGE = os.path.join('docs', 'quality.md')
MARGIN = 0.0005
NAMES = ('frappe', 'demo')


def product(
  a: tf.Tensor | Sequence[tf.Tensor],
  b: tf.Tensor,
  bias: tf.Tensor | None = None,
  relu: bool = False,
  transpose_b: bool = False,
) -> tf.Tensor:
  """Does what ops.bfloat16.product does, on any processor; the order of sums differs."""

  @tf.custom_gradient
  def rounded_product(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    a, b = rounded(a), rounded(b)

    def gradients(grad: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      grad = rounded(grad)
      return tf.matmul(grad, b, transpose_b=True), tf.matmul(a, grad, transpose_a=True)

    return tf.matmul(a, b), gradients

  left = tf.concat(a, 1) if isinstance(a, (list, tuple)) else a
  found = rounded_product(left, tf.transpose(b) if transpose_b else b)
  return float32.finished(found, bias, relu)


def rounded(x: tf.Tensor) -> tf.Tensor:
  return tf.cast(tf.cast(x, tf.bfloat16), tf.float32)


# name -> settings of a log, the number of seeds, and the key that is float32 or bfloat16
COMPARISONS = {
  'dense': (lambda name: copy.deepcopy(LOGS[name][4]), 3, ('train', 'dense_dtype')),
  'rows': (
    lambda name: {**fm_settings('adagrad_row'), 'train': {'epochs': LOGS[name][3]}},
    5,
    ('sparse', 'tables', 'default', 'dtype'),
  ),
}


def aucs(name: str, comparison: str, dtype: str) -> np.ndarray:
  """Returns, for each seed, the AUC on test of the epoch that is best on validation."""
  settings, seeds, (*sections, key) = COMPARISONS[comparison]
  tree = {'data': prepared(name), **settings(name)}
  section = tree
  for part in sections:
    section = section[part]
  section[key] = dtype
  run_dir = os.path.join(OUT, f'{name}_{comparison}_{dtype}_seed')
  return np.array([of_test(evaluated(f'{run_dir}{s}', tree, s))[0] for s in range(1, seeds + 1)])


def row_of(name: str, comparison: str) -> list[str]:
  exact, near = (aucs(name, comparison, dtype) for dtype in ('float32', 'bfloat16'))
  apart = np.median(near) - np.median(exact)
  far = f' (wanted: at most {MARGIN:.4f} below)' if apart < -MARGIN else ''
  listed = [', '.join(f'{auc:.4f}' for auc in found) for found in (exact, near)]
  medians = [f'{np.median(found):.4f}' for found in (exact, near)]
  return [LOGS[name][0], comparison, *medians, f'{apart:+.5f}{far}', *listed]


def pages(comparisons: Sequence[str]) -> str:
  """Trains everything; returns the text for the page."""
  own = bfloat16.available()
  multiplied = contextlib.nullcontext()
  if not own:
    multiplied = mock.patch.multiple(bfloat16, available=lambda: True, product=product)
  with multiplied:
    table = [row_of(name, comparison) for comparison in comparisons for name in NAMES]
  head = ['log', 'what is in bfloat16', 'AUC in float32', 'in bfloat16', 'apart']
  text = markdown_table([*head, 'float32, each seed', 'bfloat16, each seed'], table)
  how = made_by()
  if not own:
    how += (
      ' It has no avx512_bf16: factors were rounded to bfloat16 and multiplied in float32, with '
      'sums in another order.'
    )
  return f'{text}\n\n{how}'


def main(argv: list[str]) -> None:
  comparisons = argv[1:] or list(COMPARISONS)
  for name in comparisons:
    if name not in COMPARISONS:
      raise app.UsageError(f"found '{name}'; wanted some of {', '.join(COMPARISONS)}")
  os.makedirs(OUT, exist_ok=True)
  text = pages(comparisons)
  print(text)
  if set(comparisons) == set(COMPARISONS):
    write_between(PAGE, text, 'benchmarks.dtypes')
    print(f'wrote {PAGE}')


if __name__ == '__main__':
  os.chdir(ROOT)
  app.run(main)
