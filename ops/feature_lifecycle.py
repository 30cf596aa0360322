"""The feature lifecycle: admission, decay, eviction and the selection of features to export.

The rules (`Policy`), their defaults and their names come from PaddlePaddle's CTR accessor. The
operations ("verbs") are written in C++; their contracts are in ops/cc/lifecycle/feature_table.h.
They work eagerly, in `tf.function` and in v1 graphs.
"""

import copy
import functools
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from ops import chunks, library
from ops.library import TensorLike
from ops.policy import Policy
from ops.sharding import IN_TABLE_SHARD, SHARDS, within

__all__ = ['KINDS', 'FeatureLifecycle', 'Policy', 'Remote', 'capacity_cut']

KINDS = ('delta', 'base', 'all')
CHUNK_FEATURES, CHUNK_BYTES = 65536, 16 << 20  # the most that one chunk of an export holds

# The dtypes of which int64 can hold every value.
_KEY_DTYPES = ('int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32')
_COUNT_DTYPES = (*_KEY_DTYPES, 'uint64', 'float16', 'bfloat16', 'float32', 'float64')

# (device, name) -> the deleter of an eager table; all users of the table hold it.
_deleters = weakref.WeakValueDictionary()


def _invalid(message: str) -> tf.errors.InvalidArgumentError:
  return tf.errors.InvalidArgumentError(None, None, message)


def _vector(name: str, value: TensorLike, dtypes: tuple[str, ...], dtype: tf.DType) -> tf.Tensor:
  """Returns `value` as a tensor [n] of `dtype`; InvalidArgumentError if it cannot be one."""
  if not tf.is_tensor(value):
    try:
      value = np.asarray(value)
    except ValueError:
      raise _invalid(f'{name}: found a ragged list; wanted shape [n]') from None
    if value.size == 0 and value.dtype == np.float64:  # an empty list
      value = value.astype(dtype.as_numpy_dtype)
  if value.dtype.name not in dtypes:
    raise _invalid(f'{name}: found dtype {value.dtype.name}; wanted {dtype.name}')
  if tf.TensorShape(value.shape).rank not in (1, None):  # None: a graph's tensor of unknown rank
    raise _invalid(f'{name}: found shape {list(value.shape)}; wanted [n]')
  return tf.cast(value, dtype)


def _keys(value: TensorLike) -> tf.Tensor:
  return _vector('keys', value, _KEY_DTYPES, tf.int64)


def _check_kind(kind: str) -> None:
  if kind not in KINDS:
    raise _invalid(f'kind: found {kind!r}; wanted one of ' + ', '.join(KINDS))


def capacity_cut(capacity: int, histogram: Callable[[tf.Tensor], np.ndarray]) -> tf.Tensor:
  """Finds the sort key that divides the best `capacity` features from the others (radix selection).

  `histogram` is `FeatureLifecycle.rank_histogram`, summed over all tables that share the capacity.
  Returns int32 [d], the first d digits of the lowest sort key to keep; features whose first d
  digits are lower are to be evicted. Empty if all features are kept.
  """
  cut, wanted = [], capacity
  while True:
    counts = np.asarray(histogram(tf.constant(cut, tf.int32)))
    if not cut and counts.sum() <= wanted:
      return tf.zeros([0], tf.int32)
    at_or_above = np.cumsum(counts[::-1])
    place = int(np.searchsorted(at_or_above, wanted))
    cut.append(len(counts) - 1 - place)
    if at_or_above[place] == wanted:
      return tf.constant(cut, tf.int32)
    wanted -= int(at_or_above[place] - counts[cut[-1]])


class Remote:
  """Lets code outside of a v1 graph call methods that add ops to the graph.

  A call `m(…)` becomes `run(of.m, …)`, which adds the method's ops, if absent, and runs them.
  """

  def __init__(self, of: object, run: Callable):
    self._of, self._run = of, run

  def __getattr__(self, name: str) -> Callable:
    return functools.partial(self._run, getattr(self._of, name))


class FeatureLifecycle:
  """A table of features, with the operations (verbs) of their lifecycle.

  Keys are int64 [n], >= 0, in any order, and may repeat. A verb that gets invalid input changes
  nothing and raises `tf.errors.InvalidArgumentError`, which names argument, index and value.

  Args:
    name: objects with the same name on one device share one table, and must have equal policies.
      The table lives as long as any of them; in a v1 graph, as long as the session or server.
    create_handle: a function of `policy` and `shared_name` that makes the table's resource; only
      for a subclass that keeps rows beside the features.
  """

  def __init__(
    self,
    policy: Policy | None = None,
    name: str | None = None,
    *,
    create_handle: Callable[..., tf.Tensor] | None = None,
  ):
    self.policy = Policy() if policy is None else policy
    if not isinstance(self.policy, Policy):
      raise _invalid(f'policy: found {type(policy).__name__}; wanted a Policy')
    self.name = name
    self._ops = self._reads = library.load()  # `_reads`: ops that may run twice
    create_handle = create_handle or self._ops.ctr_lifecycle_handle
    with tf.init_scope():
      eager = tf.executing_eagerly()
      shared_name = name or (f'{type(self).__name__}_{uuid.uuid4().hex}' if eager else '')
      self.handle = create_handle(policy=self.policy.serialize(), shared_name=shared_name)
      if eager:
        at = (self.handle.device, shared_name)
        self._deleter = _deleters.get(at) or library.ResourceDeleter(self.handle)
        _deleters[at] = self._deleter

  def remote(self, run: Callable, read: Callable) -> 'FeatureLifecycle':
    """Returns a copy for a v1 graph, whose verbs run at once as in eager mode.

    `run` is as in `Remote`; `read` is for ops that change nothing, and so may run twice.
    """
    table = copy.copy(self)
    table._ops, table._reads = Remote(self._ops, run), Remote(self._reads, read)
    return table

  def observe(
    self, keys: TensorLike, shows: TensorLike, clicks: TensorLike, slots: TensorLike | None = None
  ) -> tf.Tensor:
    """Adds shows and clicks to features, and creates features that the table does not have.

    Args:
      keys: int64 [n]; if one repeats, its shows and clicks are summed first.
      shows: float64 [n], finite, >= 0.
      clicks: float64 [n], finite, >= 0; at most shows unless shows is 0, as if they came late.
      slots: int64 [n] in [0, 2047], for created features; None for bits 52 to 62 of the key.
    Returns:
      bool [n], whether the feature is admitted afterwards.
    """
    keys = _keys(keys)
    shows = _vector('shows', shows, _COUNT_DTYPES, tf.float64)
    clicks = _vector('clicks', clicks, _COUNT_DTYPES, tf.float64)
    slots = [] if slots is None else [_vector('slots', slots, _KEY_DTYPES, tf.int64)]
    return self._ops.ctr_lifecycle_observe(self.handle, keys, shows, clicks, slots)

  def admitted(self, keys: TensorLike) -> tf.Tensor:
    """Returns whether each key's feature is admitted, bool [n]."""
    return self._reads.ctr_lifecycle_admitted(self.handle, _keys(keys))

  def lookup(self, keys: TensorLike) -> dict[str, tf.Tensor]:
    """Returns what the table holds for each key's feature; zeros if it does not have the feature.

    {name: tensor [n]}: show, click and delta_score (the score gained since a delta or base last
    wrote it), float64; unseen_days, age_days and slot, int32; admitted and exists, bool.
    """
    return self._reads.ctr_lifecycle_lookup(self.handle, _keys(keys))._asdict()

  def decay(self) -> None:
    """Multiplies the shows and clicks of every feature by the policy's decay."""
    return self._ops.ctr_lifecycle_decay(self.handle)

  def evict(self, all_reduce: Callable[[np.ndarray], np.ndarray] | None = None) -> tf.Tensor:
    """Deletes the features that the policy does not keep; returns the keys deleted here, int64 [m].

    First those that fail the tests of `policy.eviction`, then all but the best `policy.capacity`.
    An `all_reduce` (eager only) sums an int64 array over all processes that hold parts of one
    table: the same features are kept as if one process held it.
    """
    if all_reduce is None or self.policy.capacity is None:
      return self._forget_rows(self._ops.ctr_lifecycle_evict(self.handle))
    by_tests = self.evict_by_tests()
    cut = capacity_cut(
      self.policy.capacity, lambda prefix: all_reduce(self.rank_histogram(prefix).numpy())
    )
    return tf.concat([by_tests, self.evict_below(cut)], 0)

  def evict_by_tests(self) -> tf.Tensor:
    """Deletes the features that fail `policy.eviction`'s tests; returns their keys, int64 [m]."""
    return self._forget_rows(self._ops.ctr_lifecycle_evict(self.handle, capacity=False))

  def rank_histogram(self, prefix: TensorLike) -> tf.Tensor:
    """Counts the features whose sort key starts with `prefix`, for each next digit, int64 [65536].

    A sort key is a number of nine 16-bit digits. The better a feature is by `policy.capacity_by`,
    the higher its sort key; no two features have the same. `prefix` is int32 [d], d < 9.
    """
    return self._reads.ctr_lifecycle_rank_histogram(self.handle, prefix)

  def evict_below(self, cut: TensorLike) -> tf.Tensor:
    """Deletes the features below a `capacity_cut`; returns their keys, int64 [m]."""
    return self._forget_rows(self._ops.ctr_lifecycle_evict_below(self.handle, cut))

  def _forget_rows(self, keys: tf.Tensor) -> tf.Tensor:
    """Deletes the rows of evicted features in a subclass that keeps rows; returns the keys."""
    return keys

  def clear(self) -> None:
    """Deletes all features and their rows."""
    return self._ops.ctr_lifecycle_clear(self.handle)

  def age(self) -> None:
    """Adds 1 to unseen_days and age_days of every feature; call it once a day."""
    return self._ops.ctr_lifecycle_age(self.handle)

  def select(self, kind: str, among: TensorLike | None = None) -> tf.Tensor:
    """Returns the keys of the features that belong in an export of this kind, int64 [m].

    They are ordered by shard, then by key. For 'delta' and 'base', the table remembers the features
    and their present delta_score, until `commit` or until the same kind is selected again. With
    `among`, the keys of some features, int64 [n], it looks at no others.
    """
    _check_kind(kind)
    among = [] if among is None else [_keys(among)]
    return self._reads.ctr_lifecycle_select(self.handle, among, kind=kind)

  def commit(self, kind: str, keys: TensorLike) -> None:
    """Marks selected features as written; call it once their export is complete.

    The delta_score of the selection is subtracted, which leaves what the feature has gained since;
    for kind 'all' nothing is. Features deleted since the selection are skipped. Keys that are not
    in the selection or were committed before are invalid.
    """
    _check_kind(kind)
    return self._ops.ctr_lifecycle_commit(self.handle, _keys(keys), kind=kind)

  def size(self) -> tf.Tensor:  # int64 [], how many features
    return self._reads.ctr_lifecycle_size(self.handle)

  def admitted_size(self) -> tf.Tensor:
    return self._reads.ctr_lifecycle_admitted_size(self.handle)

  def bytes(self) -> tf.Tensor:
    """Returns how many bytes of memory the table and its rows take, int64 []."""
    return self._reads.ctr_lifecycle_bytes(self.handle)

  def count_changes(self) -> tf.Tensor:
    """Returns how many features have changed since the last `keep_changes`, int64 [].

    It is -1 if that is not known, because there was no such call, a feature was deleted, a day has
    ended, or about half of the features have changed.
    """
    return self._reads.ctr_lifecycle_count_changes(self.handle)

  def keep_changes(self) -> None:
    """Begins to note changes anew; call it once a checkpoint has the features as they are."""
    return self._ops.ctr_lifecycle_keep_changes(self.handle)

  def take_changes(self) -> np.ndarray | None:
    """Returns the keys of the features that have changed since the last call, int64 [n].

    None if that is not known, as for `count_changes`. Changes by `commit` are left out.
    """
    known, keys = self._ops.ctr_lifecycle_take_changes(self.handle)
    return np.asarray(keys) if known else None

  def export_state(
    self, shards: range = range(SHARDS), changed: bool = False
  ) -> Iterator[chunks.Chunk]:
    """Yields all columns of the features of these logical shards, without loss. Eager only.

    A chunk (ops/chunks.py) has at most 65536 features and about 16 MiB. With `changed`, only the
    features that `count_changes` counts.
    """
    most = max(1, min(CHUNK_FEATURES, CHUNK_BYTES // (64 + 4 * self._row_floats())))
    # The shards of the table to read; the first and the last may also hold other logical shards.
    shard, stop, place = shards.start // IN_TABLE_SHARD, -(-shards.stop // IN_TABLE_SHARD), 0
    is_whole = shards.start % IN_TABLE_SHARD == shards.stop % IN_TABLE_SHARD == 0
    while shard < stop:
      span = np.array([shard, place, stop, most])
      columns = self._reads.ctr_lifecycle_export(self.handle, span, changed=changed)._asdict()
      shard, place = columns.pop('next').numpy().tolist()
      chunk = {name: column.numpy() for name, column in columns.items()}
      if not is_whole:
        kept = within(chunk['key'], shards)
        chunk = {name: column[kept] for name, column in chunk.items()}
      if len(chunk['key']):
        yield chunk

  def import_state(self, source: Iterable[chunks.Chunk], replace: bool = True) -> None:
    """Imports chunks of any number of tables, in place of all features if `replace`. Eager only.

    Raises DataLossError if a chunk is damaged, or a feature exists already; after any error the
    table is empty, even if `replace` is False.
    """
    if replace:
      self.clear()
    try:
      for i, chunk in enumerate(source):
        self.import_chunk(f'chunk {i}', chunk)
    except BaseException:
      self.clear()
      raise

  def import_chunk(self, where: str, chunk: chunks.Chunk) -> None:
    """Adds one chunk's features; DataLossError naming `where` if damaged, perhaps after some."""
    for name, dtype in self._columns().items():
      own = getattr(chunk[name], 'dtype', type(chunk[name])) if name in chunk else 'nothing'
      if own != dtype:
        text = f'{where}: {name}: found {own}; wanted a column of {np.dtype(dtype)}'
        raise tf.errors.DataLossError(None, None, text)
    try:
      self._import(chunk)
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as e:
      raise tf.errors.DataLossError(None, None, f'{where}: {e.message}') from None

  # What a subclass that keeps rows beside the features adds to an export.

  def _row_floats(self) -> int:  # of the widest row
    return 0

  def _columns(self) -> dict[str, np.dtype]:
    return chunks.COLUMNS

  def _import(self, chunk: chunks.Chunk) -> None:
    self._ops.ctr_lifecycle_import(self.handle, **{name: chunk[name] for name in chunks.COLUMNS})
