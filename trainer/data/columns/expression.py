"""Computes expressions over numbers in float64, in NumPy and in TensorFlow.

Both do the same operations in the same order, and only those whose rounding IEEE 754 defines, so
their results agree to the bit. Their own logarithms differ; `_log` is built from such operations.
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
from trainer.data.columns.arrow_columns import TINY, TINY32, ArrowReader
from trainer.data.columns.graph_columns import GraphColumn, GraphReader

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# As in fdlibm: (log(1 + f) - f + f²/2) ≈ s·(f²/2 + R), R a polynomial of s² = (f / (2 + f))².
_LOG = (
  6.666666666666735130e-01,
  3.999999999940941908e-01,
  2.857142874366239149e-01,
  2.222219843214978396e-01,
  1.818357216161805012e-01,
  1.531383769920937332e-01,
  1.479819860511658591e-01,
)


# In each library, the functions for which Python has no operator.
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
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.Lt: operator.lt,
  ast.LtE: operator.le,
  ast.Gt: operator.gt,
  ast.GtE: operator.ge,
  ast.Eq: operator.eq,
  ast.NotEq: operator.ne,
}
_FUNCTIONS = {
  'log': lambda xp, x: _log(x, xp),
  'abs': lambda xp, x: xp.abs(x),
  'missing': lambda xp, x: xp.number(xp.is_nan(x)),
  'min': lambda xp, x, y: _least(x, y, xp),
  'max': lambda xp, x, y: -_least(-x, -y, xp),
  'clip': lambda xp, x, low, high: _least(-_least(-x, -low, xp), high, xp),
  'where': lambda xp, x, yes, no: xp.where(x > 0, yes, no),
}


def _log(x: TensorLike, xp: Library) -> TensorLike:
  """Returns the natural logarithm of x, NaN if x is negative or 0; x must not be subnormal."""
  bits = xp.bits(x)
  # x = 2^k·m with m in [√½, √2): the bits are shifted so that the exponent field gives k.
  k = (bits - 0x3FE6A09E667F3BCD) // 2**52
  f = xp.of_bits(bits - k * 2**52) - 1.0
  k = xp.number(k)
  s = f / (f + 2.0)
  z = xp.held(s * s)
  r = z * 0.0
  for c in reversed(_LOG):
    r = xp.held(xp.held(r + c) * z)
  half = xp.held(xp.held(f * 0.5) * f)
  inner = xp.held(xp.held(s * xp.held(half + r)) + xp.held(k * _LN2_LOW))
  logarithm = xp.held(k * _LN2_HIGH) - (xp.held(half - inner) - f)
  return xp.where(x > 0, logarithm, x * np.nan)


def _value(node: ast.expr, columns: Mapping[str, TensorLike], xp: Library) -> TensorLike:
  """Computes a node of an expression's syntax tree, in float64."""
  if (name := config.column_of(node)) is not None:
    return columns[name]
  value = lambda part: _value(part, columns, xp)
  match node:
    case ast.Constant():
      return xp.number(node.value)
    case ast.UnaryOp():
      return -value(node.operand)
    case ast.BinOp():
      result = xp.held(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
      return xp.where(xp.abs(result) < TINY, result * 0.0, result)
    case ast.Compare():
      left, right = value(node.left), value(node.comparators[0])
      return xp.number(_OPERATORS[type(node.ops[0])](left, right))
  return _FUNCTIONS[node.func.id](xp, *map(value, node.args))


def _least(x: TensorLike, y: TensorLike, xp: Library) -> TensorLike:
  """Returns the smaller of two numbers; NaN if either is NaN."""
  return xp.where(xp.is_nan(x), x, xp.where(xp.is_nan(y), y, xp.where(y < x, y, x)))


def _finite(x: TensorLike, xp: Library) -> TensorLike:
  """Returns x, but NaN where it is beyond float32's range, and 0 where it would be subnormal."""
  x = xp.where(xp.abs(x) <= float(np.finfo(np.float32).max), x, np.nan)
  return xp.where(xp.abs(x) < TINY32, x * 0.0, x)


def arrow(made: config.Expression, reader: ArrowReader) -> pa.Array:
  columns = {name: reader.numbers(name) for name in made.reads()}
  with np.errstate(all='ignore'):
    numbers = _finite(_value(made.tree(), columns, _NUMPY), _NUMPY)
  numbers = np.broadcast_to(numbers, [reader.num_records])
  return pa.array(numbers, mask=np.isnan(numbers))


def graph(made: config.Expression, reader: GraphReader) -> GraphColumn:
  columns = {name: reader.numbers(name) for name in made.reads()}
  return GraphColumn.single(_finite(_value(made.tree(), columns, _TENSORFLOW), _TENSORFLOW))
