"""A worker's access to the servers: a v1 graph placed on /job:ps, and the session that runs it.

Rows, dense variables and their optimizer state are on the servers. Every worker builds the same
graph, and they share its resources by name, in a new TensorFlow container each time the job forms;
earlier rows are then freed. In a step, workers and servers exchange keys, values (in
`sparse.exchange_dtype`), counts and dense tensors.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from absl import logging

from ops import packing, row_store, sharding
from ops.dedupe import dedupe
from trainer.config import Config
from trainer.embedding.exchange import gradient_scale
from trainer.embedding.row_table import counts_of
from trainer.embedding.stores import make_store
from trainer.errors import BadPass, one_line
from trainer.parameter_server.client import CoordinatorClient
from trainer.parameter_server.cluster import Cluster, cpu_config, on_server
from trainer.parameter_server.sync_replicas import synced_step
from trainer.training.dense_part import DensePart, dense_optimizer
from trainer.training.schedule import Rates
from trainer.training.step import LEAST_WEIGHT

v1 = tf.compat.v1

_COUNTS = 5  # the fields of StepCounts

Array = np.ndarray | tf.Tensor
Fetched = TypeVar('Fetched')  # nested arrays


class Push(NamedTuple):
  """What a worker sends to the S servers in a step; keys are distinct and ordered by server."""

  keys: Array  # int64 [u]
  shows: Array  # float32 [u]
  clicks: Array  # float32 [u]
  buffer: Array  # exchange_dtype [m], gradients or changes of rows, packed by ops.packing
  keys_per_server: Array  # int32 [S], how many keys go to each server
  values_per_server: Array  # int32 [S], how many values of `buffer` go to each server
  dense: list[Array]  # gradients or changes of the dense variables
  counts: Array  # float32 [5], the fields of StepCounts


class Servers:
  """Reads and updates the state on the servers, for one worker.

  `target` is the address of this worker's tf.distribute.Server. The servers' dense variables have
  the shapes of those of `dense`, this worker's dense part.
  """

  def __init__(
    self,
    cfg: Config,
    cluster: Cluster,
    target: str,
    communicator: CoordinatorClient,
    dense: DensePart,
  ):
    self.count, self._cluster, self._communicator = len(cluster.servers), cluster, communicator
    self._reads_counts = bool(cfg.counted_fields())
    self._cfg = cfg
    self.bytes = 0  # how many bytes this worker's steps have sent and received
    self._dtype = tf.as_dtype(cfg.sparse.exchange_dtype)
    self._in_lockstep = cfg.sync.mode == 'ps'
    # How many seconds to wait for the answer to a request.
    self.patience = cfg.sync.lost_peer_seconds
    self._lock = threading.RLock()  # guards the graph
    self._graph = tf.Graph()
    self._remote_graphs: dict[tuple[int, Callable, str], tuple[Fetched, list[tf.Tensor]]] = {}
    self._embedding = dense.embedding
    with self._placed(0):
      self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name='step')
      self._rates = Rates(cfg.train.schedule)
      self._dense = self._dense_variables([v.shape for v in dense.trainable])
      self._optimizer = dense_optimizer(cfg.train.dense_optimizer)
      self._optimizer.learning_rate = lambda: 0.0  # no variable of its own: each step sets it
      self._optimizer._create_all_weights(self._dense)  # private: see DensePart
      self.stores = []  # for each of `count` servers, its store of rows, within the graph
      for i in range(self.count):
        with tf.device(on_server(i)):
          self.stores.append(make_store(cfg, dense.embedding, 'rows'))
      pulls = {train: self._pull_graph(train) for train in (True, False)}
      if self._in_lockstep:
        push = self._push_together_graph()
      else:
        push = self._push_at_once_graph(differences=cfg.sync.mode == 'ps_geo')
      state = {
        'state': [*self._dense, *self._optimizer.weights],
        'step': self._step,
        'rate': self._rates.factor,
        'first_step': self._rates.first_step,
      }
      self._state_fetches = tf.nest.map_structure(lambda v: v.read_value(), state)
      variables = tf.nest.flatten(state)
      self._state_feeds = [v1.placeholder(v.dtype, v.shape) for v in variables]
      self._assign_state = tf.group([v.assign(p) for v, p in zip(variables, self._state_feeds)])
      self._initialize = v1.global_variables_initializer()
    options = cpu_config(device_filters=['/job:ps', f'/job:worker/task:{cluster.index}'])
    if communicator.rank == 0 and not communicator.late:
      self._free_earlier_rows(target, options)
    self.session = v1.Session(target, self._graph, options)
    self._pulls = {train: self.session.make_callable(*graph) for train, graph in pulls.items()}
    self._push = self.session.make_callable(*push)

  @contextlib.contextmanager
  def _placed(self, server: int) -> Iterator[None]:
    """Places the ops of the `with` block on a server, in the job's TensorFlow container."""
    container = f'generation{self._communicator.generation}'
    with self._graph.as_default(), self._graph.container(container), tf.device(on_server(server)):
      yield

  def _free_earlier_rows(self, target: str, options: v1.ConfigProto) -> None:
    """Frees the rows that earlier generations of this job left on the servers."""
    # Not by Session.reset, which would wait for a worker that is frozen.
    with tf.Graph().as_default() as graph:
      for generation in range(1, self._communicator.generation):
        for i in range(self.count):
          with graph.container(f'generation{generation}'), tf.device(on_server(i)):
            make_store(self._cfg, self._embedding, 'rows')
      handles = [t for op in graph.get_operations() for t in op.outputs if t.dtype == tf.resource]
      for handle in handles:
        with tf.device(handle.device):
          tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)
      if handles:
        with contextlib.closing(v1.Session(target, graph, options)) as session:
          session.run([op for op in graph.get_operations() if op.type == 'DestroyResourceOp'])

  def _dense_variables(self, shapes: Sequence[tf.TensorShape]) -> list[tf.Variable]:
    """Makes dense variables of zeros, each on the server with the fewest elements so far."""
    sizes, variables = [0] * self.count, []
    for i, shape in enumerate(shapes):
      server = sizes.index(min(sizes))
      sizes[server] += shape.num_elements()
      with tf.device(on_server(server)):
        variables.append(tf.Variable(tf.zeros(shape), name=f'dense_{i}'))
    return variables

  # The graphs of a step; each method *_graph adds one and returns its (fetches, feeds)

  def _on_worker(self) -> contextlib.AbstractContextManager:
    return tf.device(f'/job:worker/task:{self._cluster.index}/device:CPU:0')

  def _pull_graph(self, train: bool) -> tuple[tuple, list[tf.Tensor]]:
    with self._on_worker():
      keys = v1.placeholder(tf.int64, [None])
      sent = sharding.owner_counts(keys, self.count)
      parts = tf.split(keys, sent, num=self.count)
    buffers, counts = [], []
    for i, (store, part) in enumerate(zip(self.stores, parts)):
      with tf.device(on_server(i)):
        rows, size = store.pull(part, train), tf.size(part)
        buffers.append(packing.pack_rows(rows, tf.range(size), size[None], self._dtype).buffer)
        if self._reads_counts:
          counts.append(counts_of(store, part))
    with self._on_worker():
      buffer, store = tf.concat(buffers, 0), self.stores[0]
      linear, factors, offsets = packing.unpack_rows(
        buffer, sent, keys, store.slot_table, store.widths
      )
      show_click = tf.concat(counts, 0) if self._reads_counts else ()
      rows = row_store.PulledRows(tf.zeros([0], tf.int64), offsets, linear, factors, show_click)
    dense = [v.read_value() for v in self._dense] if train else []
    return (rows, sent, dense, tf.size(buffer)), [keys]

  def _push_feeds(self) -> tuple[Push, list[tuple[tf.Tensor, ...]]]:
    """Adds a push's placeholders; returns them and, by server, keys, shows, clicks and values."""
    with self._on_worker():
      feeds = Push(
        keys=v1.placeholder(tf.int64, [None]),
        shows=v1.placeholder(tf.float32, [None]),
        clicks=v1.placeholder(tf.float32, [None]),
        buffer=v1.placeholder(self._dtype, [None]),
        keys_per_server=v1.placeholder(tf.int32, [self.count]),
        values_per_server=v1.placeholder(tf.int32, [self.count]),
        dense=[v1.placeholder(tf.float32, v.shape) for v in self._dense],
        counts=v1.placeholder(tf.float32, [_COUNTS]),
      )
      columns = [
        tf.split(column, feeds.keys_per_server, num=self.count)
        for column in (feeds.keys, feeds.shows, feeds.clicks)
      ]
      columns.append(tf.split(feeds.buffer, feeds.values_per_server, num=self.count))
    return feeds, list(zip(*columns))

  def _apply_dense(
    self, gradients: Sequence[tf.Tensor], scale: tf.Tensor, rate: tf.Tensor
  ) -> tf.Operation:
    self._optimizer.learning_rate = self._cfg.train.dense_optimizer.learning_rate * rate
    return self._optimizer.apply_gradients([(g * scale, v) for g, v in zip(gradients, self._dense)])

  def _push_together_graph(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Adds the push of mode ps: queues collect all workers' gradients; worker 0 takes one step."""
    workers = self._communicator.size
    feeds, parts = self._push_feeds()
    all_counts = tf.Variable(tf.zeros([_COUNTS]), trainable=False, name='counts')
    types = [tf.int64, tf.float32, tf.float32, self._dtype]
    queues, waiting = [], []
    for i, part in enumerate(parts):
      with tf.device(on_server(i)):
        names = [f'gradients_{rank}' for rank in range(workers)]
        queues.append([v1.FIFOQueue(1, types, shared_name=name) for name in names])
        waiting.append(queues[i][self._communicator.rank].enqueue(part))

    def apply_sums(sums: list[tf.Tensor]) -> tf.Operation:
      *gradients, counts = sums
      # The loss, NaN if a worker's gradient is not finite; then for each server its sums.
      finite = [tf.math.is_finite(counts[1])]
      gradients = [tf.where(finite[0], g, tf.zeros_like(g)) for g in gradients]
      scale = 1 / tf.maximum(counts[0], LEAST_WEIGHT)
      step = tf.identity(self._step.assign_add(1))
      rate = self._rates.at(step - 1)
      hyper = self._embedding.hyper(rate)
      pushes = []
      for i, store in enumerate(self.stores):
        with tf.device(on_server(i)):
          # In the order of the workers, not in the order of arrival.
          keys, shows, clicks, buffers = zip(*(q.dequeue() for q in queues[i]))
          sizes = tf.stack([tf.size(k) for k in keys])
          owned = dedupe(tf.concat(keys, 0), tf.concat(shows, 0), tf.concat(clicks, 0))
          rows = store.pull(owned.unique, True)
          of_rows = packing.sum_gradients(tf.concat(buffers, 0), sizes, rows.offsets, owned)
          # The store would refuse what is not finite, and the chief take no further step.
          total = tf.add_n([tf.reduce_sum(g) for g in of_rows])
          finite.append(finite[0] & tf.math.is_finite(total))
          of_rows = [tf.where(finite[-1], g, tf.zeros_like(g)) for g in of_rows]
          by = gradient_scale(self._cfg.sparse.gradient_scale, scale, owned.shows)
          pushes.append(
            store.push(owned.unique, rows, owned.shows, owned.clicks, *of_rows, by, hyper, step)
          )
      dense = self._apply_dense(gradients, scale, rate)
      # All workers read these counts, and refuse the pass.
      counts = tf.where(tf.reduce_all(finite), counts, np.nan)
      return tf.group(dense, all_counts.assign(counts), *pushes)

    # A worker's counts follow its row gradients, so once all counts are there, all gradients are.
    with tf.control_dependencies(waiting):
      counts = tf.identity(feeds.counts)
    # The counts travel as one more gradient, so that `apply_sums` has the weight of all workers'
    # samples, and divides by it once.
    sums, variables = [*feeds.dense, counts], [*self._dense, all_counts]
    self._synced = synced_step(sums, variables, workers, apply_sums)
    with tf.control_dependencies([self._synced.push]):
      return all_counts.read_value(), tf.nest.flatten(feeds)

  def _push_at_once_graph(self, differences: bool) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Adds the push of modes ps_async and ps_geo: servers apply it without waiting for others.

    Without `differences` (ps_async), it carries gradients, which the servers divide by the weight
    of this worker's samples. With them (ps_geo), it carries changes to add, of `counts[0]` steps.
    """
    feeds, parts = self._push_feeds()
    scale = 1 / tf.maximum(feeds.counts[0], LEAST_WEIGHT)
    steps = tf.cast(feeds.counts[0], tf.int64) if differences else 1
    step = tf.identity(self._step.assign_add(steps))
    rate = self._rates.at(step - steps)
    hyper = self._embedding.hyper(rate)
    pushes = []
    for i, (store, (keys, shows, clicks, buffer)) in enumerate(zip(self.stores, parts)):
      with tf.device(on_server(i)):
        # Gradients are packed as rows, which say which features have factors: another worker may
        # admit a feature between this worker's pull and push.
        size = tf.size(keys)[None]
        linear, factors, offsets = packing.unpack_rows(
          buffer, size, keys, store.slot_table, store.widths
        )
        rows = row_store.PulledRows(-tf.ones_like(keys), offsets, linear, factors)
        by = gradient_scale(self._cfg.sparse.gradient_scale, scale, shows)
        pushes.append(
          store.push(keys, rows, shows, clicks, linear, factors, by, hyper, step, add=differences)
        )
    if differences:
      pushes += [v.assign_add(change) for change, v in zip(feeds.dense, self._dense)]
    else:
      pushes.append(self._apply_dense(feeds.dense, scale, rate))
    with tf.control_dependencies(pushes):
      return tf.identity(step), tf.nest.flatten(feeds)

  # A step

  def start(self, state: Sequence[np.ndarray]) -> None:
    """Initialises the servers' variables and, in mode ps, queues; only the first worker calls it.

    `state` has the values of the dense variables, then those of the optimizer's variables.
    """
    self.session.run(self._initialize)
    self.assign(state=state)
    if self._in_lockstep:
      self.session.run(self._synced.start_chief)

  def start_worker(self, failed: Callable[[Exception], None]) -> None:
    """Prepares this worker for the steps of mode ps, after `start`; does nothing in other modes.

    On the first worker, a thread takes each step when all have sent gradients, or calls `failed`.
    """
    if not self._in_lockstep:
      return
    self.session.run(self._synced.start_worker)
    if self._communicator.rank == 0:
      step = self.session.make_callable(self._synced.run_chief)

      def run() -> None:
        try:
          while True:
            step()
        except tf.errors.CancelledError:
          pass
        except Exception as e:  # else the workers would wait forever
          failed(e)

      threading.Thread(target=run, name='steps', daemon=True).start()

  def pull(
    self, keys: np.ndarray, train: bool
  ) -> tuple[row_store.PulledRows, np.ndarray, list[np.ndarray]]:
    """Reads the rows of keys, int64 [u], which are distinct and ordered by logical shard.

    Returns the rows as NumPy arrays, without ids; the number of keys on each server, int32 [S]; and
    the dense variables if `train`, else [].
    """
    rows, sent, dense, values = self._repeat(functools.partial(self._pulls[train], keys))
    if train:
      self.bytes += keys.nbytes + values * self._dtype.size + sum(v.nbytes for v in dense)
    return rows, sent, dense

  def push(self, push: Push) -> np.ndarray:
    """Sends the changes of a step, and waits until the servers have applied them.

    In modes ps_async and ps_geo, a push that is aborted or not answered in time is only a warning,
    and BadPass is raised if a change of rows is not finite.

    Returns:
      In mode ps, the fields of StepCounts, summed over all workers, float32 [5]; all are NaN if the
        loss or a sum of gradients is not finite. In other modes, the number of steps so far.
    """
    arrays = [np.asarray(array) for array in tf.nest.flatten(push)]
    self.bytes += sum(array.nbytes for array in arrays)
    if self._in_lockstep:
      return self._push(*arrays)
    try:
      return self._push(*arrays, options=_within(self.patience))
    except tf.errors.OutOfRangeError as e:  # see RowStore.push
      raise BadPass(f'the servers refuse what a step has changed: {one_line(e)}') from e
    except (tf.errors.AbortedError, tf.errors.DeadlineExceededError):
      logging.warning(
        'a push was aborted or not answered; the servers may have applied only a part of it'
      )
      return self.state()[1]

  def _repeat(self, read: Callable[..., Fetched]) -> Fetched:
    """Repeats a read until it is answered: after every time-out, and after one abort.

    About one run in 50,000 is aborted by chance: TensorFlow draws the ids of requests at random,
    and a server aborts one whose id is among its last 100,000. If a worker has aborted a part of a
    run, a server waits for this part forever; so each run has a time limit.
    """
    seconds, was_aborted = self.patience, False
    while True:
      try:
        return read(options=_within(seconds))
      except tf.errors.DeadlineExceededError:
        seconds *= 2
      except tf.errors.AbortedError:
        if was_aborted:
          raise
        was_aborted = True

  # State

  def _read_state(self) -> dict[str, Fetched]:
    return self._repeat(functools.partial(self.session.run, self._state_fetches))

  def state(self) -> tuple[list[np.ndarray], int]:
    """Returns the dense variables followed by the optimizer's variables, and the step's number."""
    parts = self._read_state()
    return parts['state'], parts['step']

  def assign(self, **parts: Fetched) -> None:
    """Sets `state` (as in `start`), `step`, `rate` or `first_step` while no worker trains."""
    values = tf.nest.flatten(self._read_state() | parts)
    self.session.run(self._assign_state, dict(zip(self._state_feeds, values)))

  def call(
    self,
    server: int,
    only_reads: bool,
    function: Callable[..., Fetched],
    *args: object,
    **kwargs: object,
  ) -> Fetched | None:
    """Runs an op, which `function` makes, on a server, and returns its outputs as eager tensors.

    An op that `only_reads` may run again if it gets no answer. Arguments that are arrays are fed at
    each call; others become part of the graph, with one op for each function and set of these.
    """
    arrays = [np.asarray(a) for a in tf.nest.flatten((args, kwargs)) if _is_array(a)]
    signature = tf.nest.map_structure(lambda a: a.dtype if _is_array(a) else a, (args, kwargs))
    key = server, function, repr(signature)
    with self._lock:
      if key not in self._remote_graphs:
        feeds = []

        def placeholder(a: object) -> object:
          if not _is_array(a):
            return a
          feeds.append(v1.placeholder(tf.as_dtype(a.dtype), [None] * len(a.shape)))
          return feeds[-1]

        with self._placed(server):
          args, kwargs = tf.nest.map_structure(placeholder, (args, kwargs))
          self._remote_graphs[key] = function(*args, **kwargs), feeds
      fetches, feeds = self._remote_graphs[key]
    run = functools.partial(self.session.run, fetches, dict(zip(feeds, arrays)))
    result = self._repeat(run) if only_reads else run()
    return None if result is None else tf.nest.map_structure(tf.constant, result)


def _within(seconds: float) -> v1.RunOptions:
  return v1.RunOptions(timeout_in_ms=int(1000 * seconds))


def _is_array(value: object) -> bool:
  """Returns whether a value is an array or an eager tensor."""
  if tf.is_tensor(value):
    return not tf.is_symbolic_tensor(value)
  return isinstance(value, (np.ndarray, np.generic))
