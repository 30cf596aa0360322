"""Computes expressions over numbers in float64, in NumPy and in TensorFlow.

Both do the same operations in the same order, and only operations whose rounding IEEE 754 defines,
so their results agree to the bit. The logarithm is built from such operations, because the
logarithms of the two libraries differ in the last bit.
"""

import ast
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


class _Numpy:
  """NumPy's functions for operations that Python has no operator for."""

  where, abs = staticmethod(np.where), staticmethod(np.abs)
  equal, is_nan = staticmethod(np.equal), staticmethod(np.isnan)

  @staticmethod
  def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).view(np.int64)

  @staticmethod
  def of_bits(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits, np.int64).view(np.float64)

  @staticmethod
  def number(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64)

  @staticmethod
  def held(x: np.ndarray) -> np.ndarray:
    return x


class _Tensors:
  """TensorFlow's functions for the same operations."""

  where, abs = staticmethod(tf.where), staticmethod(tf.abs)
  equal, is_nan = staticmethod(tf.equal), staticmethod(tf.math.is_nan)

  @staticmethod
  def bits(x: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(x, tf.int64)

  @staticmethod
  def of_bits(bits: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(bits, tf.float64)

  @staticmethod
  def number(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float64) if tf.is_tensor(x) else tf.constant(x, tf.float64)

  @staticmethod
  def held(x: tf.Tensor) -> tf.Tensor:
    """Returns x through a bitcast, which keeps the graph optimizer from reordering sums around it.

    Another order would round differently.
    """
    return tf.bitcast(tf.bitcast(x, tf.int64), tf.float64)


_Library = type[_Numpy] | type[_Tensors]


def _log(x: TensorLike, xp: _Library) -> TensorLike:
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


def _value(node: ast.expr, columns: Mapping[str, TensorLike], xp: _Library) -> TensorLike:
  """Computes a part of an expression: float64, or a Python float."""
  if (name := config.column_of(node)) is not None:
    return columns[name]
  match node:
    case ast.Constant():
      return xp.number(node.value)
    case ast.UnaryOp():
      return -_value(node.operand, columns, xp)
    case ast.BinOp():
      return _arithmetic(
        node.op, _value(node.left, columns, xp), _value(node.right, columns, xp), xp
      )
    case ast.Compare():
      left, right = (_value(one, columns, xp) for one in (node.left, node.comparators[0]))
      return xp.number(_compared(node.ops[0], left, right, xp))
  return _called(node.func.id, [_value(one, columns, xp) for one in node.args], xp)


def _arithmetic(op: ast.operator, left: TensorLike, right: TensorLike, xp: _Library) -> TensorLike:
  """Adds, subtracts, multiplies or divides; a result below the least normal number is 0."""
  match op:
    case ast.Add():
      found = left + right
    case ast.Sub():
      found = left - right
    case ast.Mult():
      found = left * right
    case _:
      found = left / right
  found = xp.held(found)
  return xp.where(xp.abs(found) < _TINY, found * 0.0, found)


def _compared(op: ast.cmpop, left: TensorLike, right: TensorLike, xp: _Library) -> TensorLike:
  match op:
    case ast.Lt():
      return left < right
    case ast.LtE():
      return left <= right
    case ast.Gt():
      return left > right
    case ast.GtE():
      return left >= right
    case ast.Eq():
      return xp.equal(left, right)
  return ~xp.equal(left, right)


def _called(name: str, args: list[TensorLike], xp: _Library) -> TensorLike:
  x = args[0]
  match name:
    case 'log':
      return _log(x, xp)
    case 'abs':
      return xp.abs(x)
    case 'missing':
      return xp.number(xp.is_nan(x))
    case 'min':
      return _least(x, args[1], xp)
    case 'max':
      return -_least(-x, -args[1], xp)
    case 'clip':
      return _least(-_least(-x, -args[1], xp), args[2], xp)
  return xp.where(x > 0, args[1], args[2])


def _least(x: TensorLike, y: TensorLike, xp: _Library) -> TensorLike:
  """Returns the smaller of two numbers, NaN if one of them is."""
  return xp.where(xp.is_nan(x), x, xp.where(xp.is_nan(y), y, xp.where(y < x, y, x)))


def _finite(found: TensorLike, xp: _Library) -> TensorLike:
  """Rounds to float32 and returns that as float64; NaN where it is not finite."""
  most = float(np.finfo(np.float32).max)
  found = xp.where(xp.abs(found) <= most, found, np.nan)
  return xp.where(xp.abs(found) < _TINY32, found * 0.0, found)


def arrow(made: config.Expression, reader: ArrowReader) -> pa.Array:
  columns = {name: reader.numbers(name) for name, _ in made.reads()}
  with np.errstate(all='ignore'):
    found = _finite(_value(made.tree(), columns, _Numpy), _Numpy)
  found = np.broadcast_to(found, [reader.num_records])
  return pa.array(found, mask=np.isnan(found))


def graph(made: config.Expression, reader: GraphReader) -> GraphColumn:
  columns = {name: reader.numbers(name) for name, _ in made.reads()}
  return GraphColumn.single(_finite(_value(made.tree(), columns, _Tensors), _Tensors))
