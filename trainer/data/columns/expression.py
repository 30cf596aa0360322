"""Computes expressions over numbers in float64, in NumPy and in TensorFlow.

Both do the same operations in the same order, and only operations whose rounding IEEE 754 defines,
so their results agree to the bit. The logarithm is built from such operations, because the
logarithms of the two libraries differ in the last bit.
"""

import ast
import functools
import operator
import types
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import tensorflow as tf

from ops.library import TensorLike
from trainer import config
from trainer.data.columns.arrow_columns import ArrowReader
from trainer.data.columns.graph_columns import GraphColumn, GraphReader

_TINY = float(np.finfo(np.float64).tiny)
_TINY32 = float(np.finfo(np.float32).tiny)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Of fdlibm's log: (log(1 + f) - f + f²/2) ≈ s·(f²/2 + R), R a polynomial of s² = (f / (2 + f))².
_LOG = (
  6.666666666666735130e-01,
  3.999999999940941908e-01,
  2.857142874366239149e-01,
  2.222219843214978396e-01,
  1.818357216161805012e-01,
  1.531383769920937332e-01,
  1.479819860511658591e-01,
)


# What Python has no operator for, in each library.
Library = types.SimpleNamespace
_NUMPY = Library(
  where=np.where,
  abs=np.abs,
  is_nan=np.isnan,
  number=functools.partial(np.asarray, dtype=np.float64),
  bits=lambda x: x.view(np.int64),
  of_bits=lambda bits: bits.view(np.float64),
  held=lambda x: x,
)
_TENSORFLOW = Library(
  where=tf.where,
  abs=tf.abs,
  is_nan=tf.math.is_nan,
  number=lambda x: tf.cast(x, tf.float64) if tf.is_tensor(x) else tf.constant(x, tf.float64),
  bits=functools.partial(tf.bitcast, type=tf.int64),
  of_bits=functools.partial(tf.bitcast, type=tf.float64),
  # A bitcast keeps the graph optimizer from reordering sums, which would round differently.
  held=lambda x: tf.bitcast(tf.bitcast(x, tf.int64), tf.float64),
)
_ARITHMETIC = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}
_COMPARISONS = {
  ast.Lt: operator.lt,
  ast.LtE: operator.le,
  ast.Gt: operator.gt,
  ast.GtE: operator.ge,
  ast.Eq: operator.eq,
  ast.NotEq: operator.ne,
}


def _log(x: TensorLike, xp: Library) -> TensorLike:
  """Returns the natural logarithm of x, NaN if x is negative or 0; x must not be subnormal."""
  bits = xp.bits(x)
  # x = 2^k·m with m in [√½, √2): the bits are moved so that the exponent counts from there.
  shifted = bits - 0x3FE6A09E667F3BCD
  k = shifted // 2**52
  f = xp.of_bits(bits - k * 2**52) - 1.0
  k = xp.number(k)
  s = f / (f + 2.0)
  z = xp.held(s * s)
  r = z * 0.0
  for c in reversed(_LOG):
    r = xp.held(xp.held(r + c) * z)
  half = xp.held(xp.held(f * 0.5) * f)
  inner = xp.held(xp.held(s * xp.held(half + r)) + xp.held(k * _LN2_LOW))
  found = xp.held(k * _LN2_HIGH) - (xp.held(half - inner) - f)
  return xp.where(x > 0, found, x * np.nan)


def _value(node: ast.expr, columns: Mapping[str, TensorLike], xp: Library) -> TensorLike:
  """Computes a part of an expression, in float64."""
  if (name := config.column_of(node)) is not None:
    return columns[name]
  match node:
    case ast.Constant():
      return xp.number(node.value)
    case ast.UnaryOp():
      return -_value(node.operand, columns, xp)
    case ast.BinOp():
      left, right = (_value(one, columns, xp) for one in (node.left, node.right))
      found = xp.held(_ARITHMETIC[type(node.op)](left, right))
      return xp.where(xp.abs(found) < _TINY, found * 0.0, found)
    case ast.Compare():
      left, right = (_value(one, columns, xp) for one in (node.left, node.comparators[0]))
      return xp.number(_COMPARISONS[type(node.ops[0])](left, right))
  x, *others = (_value(one, columns, xp) for one in node.args)
  match node.func.id:
    case 'log':
      return _log(x, xp)
    case 'abs':
      return xp.abs(x)
    case 'missing':
      return xp.number(xp.is_nan(x))
    case 'min':
      return _least(x, *others, xp)
    case 'max':
      return -_least(-x, -others[0], xp)
    case 'clip':
      return _least(-_least(-x, -others[0], xp), others[1], xp)
  return xp.where(x > 0, *others)


def _least(x: TensorLike, y: TensorLike, xp: Library) -> TensorLike:
  """Returns the smaller of two numbers, NaN if one of them is."""
  return xp.where(xp.is_nan(x), x, xp.where(xp.is_nan(y), y, xp.where(y < x, y, x)))


def _finite(found: TensorLike, xp: Library) -> TensorLike:
  """Rounds to float32 and returns that as float64; NaN where it is not finite."""
  most = float(np.finfo(np.float32).max)
  found = xp.where(xp.abs(found) <= most, found, np.nan)
  return xp.where(xp.abs(found) < _TINY32, found * 0.0, found)


def arrow(made: config.Expression, reader: ArrowReader) -> pa.Array:
  columns = {name: reader.numbers(name) for name in made.reads()}
  with np.errstate(all='ignore'):
    found = _finite(_value(made.tree(), columns, _NUMPY), _NUMPY)
  found = np.broadcast_to(found, [reader.num_records])
  return pa.array(found, mask=np.isnan(found))


def graph(made: config.Expression, reader: GraphReader) -> GraphColumn:
  columns = {name: reader.numbers(name) for name in made.reads()}
  return GraphColumn.single(_finite(_value(made.tree(), columns, _TENSORFLOW), _TENSORFLOW))
