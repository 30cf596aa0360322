"""The servers as a worker sees them: one v1 graph whose rows and dense variables are placed on
/job:ps, and the session that runs it.

Every worker builds the same graph; resources on the servers are shared by name, in a container of
the job's generation. What
crosses the wire are keys, values (as `sparse.exchange_dtype`), counts and dense tensors, never
optimizer state.
"""

import contextlib
import functools
import threading

import numpy as np
import tensorflow as tf
from absl import logging

from ops import packing, row_store, sharding
from ops.dedupe import dedupe
from trainer.parameter_server.cluster import refused_as_duplicate

v1 = tf.compat.v1
_READS = (
  'lookup',
  'histogram',
  'select',
  'size',
  'bytes',
  'export',
  'pull',
)  # what changes nothing ends so


def _on_server(i):
  return f'/job:ps/task:{i}/device:CPU:0'


def _within(seconds):
  return v1.RunOptions(timeout_in_ms=int(1000 * seconds))


@contextlib.contextmanager
def _without_warnings():
  """TensorFlow logs errors only."""
  logger = tf.get_logger()
  level = logger.level
  logger.setLevel('ERROR')
  try:
    yield
  finally:
    logger.setLevel(level)


def cpu_config(**more):
  """Session and server options: CPUs only, with this process's number of threads."""
  threads = tf.config.threading.get_intra_op_parallelism_threads()
  return v1.ConfigProto(device_count={'GPU': 0}, intra_op_parallelism_threads=threads, **more)


class Mean(v1.train.Optimizer):
  """What SyncReplicasOptimizer has the chief run once a step: exact weighted means to the Keras
  optimizer, and the rows' one push.

  The accumulators give means over the workers of what each summed over its samples; counts, the
  last of the gradients, hold
  (weight, loss, …), so that the division by the global weight happens here, once.

  Args:
    apply: (gradient sums of the dense variables, counts of the step) -> op.
  """

  def __init__(self, workers, counts, apply):
    super().__init__(use_locking=False, name='mean')
    self._workers, self._counts, self._apply_sums = workers, counts, apply

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    sums = [gradient * self._workers for gradient, _ in grads_and_vars]
    with tf.control_dependencies(
      sums
    ):  # the chief is ahead, waiting for gradients: until they come, rates and counters may change
      applied = self._apply_sums(sums[:-1], sums[-1])
    with tf.control_dependencies([applied, self._counts.assign(sums[-1])]):
      return global_step.assign_add(1)


class Servers:
  """The state on the servers and the verbs of a worker on it.

  Args:
    cfg: trainer.config.Config.
    cluster: trainer.parameter_server.cluster.Cluster; target: of this worker's
      tf.distribute.Server.
    communicator: trainer.parameter_server.coordinator.CoordinatorClient.
    shapes: of the dense variables.
    make_optimizer: () -> a legacy Keras optimizer for them.
    make_store: name -> a store of trainer.embedding.stores.
    hyper: float32 [T, 2, H], the rows' hyperparameters before plateaus lower the rates.
  Attributes:
    bytes: sent and received by this worker's steps so far.
  """

  def __init__(self, cfg, cluster, target, communicator, shapes, make_optimizer, make_store, hyper):
    self.count, self._cluster, self._communicator = len(cluster.servers), cluster, communicator
    self.per_feature = cfg.sparse.gradient_scale == 'feature'
    self._dtype = tf.as_dtype(cfg.sparse.exchange_dtype)
    self._rate_of_dense = cfg.train.dense_optimizer.learning_rate
    self.bytes = 0
    self._lock = threading.RLock()
    self._graph = tf.Graph()
    self._cache = {}
    with (
      self._graph.as_default(),
      self._graph.container(f'generation{communicator.generation}'),
      tf.device(_on_server(0)),
    ):
      self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name='step')
      self._rate = tf.Variable(1.0, trainable=False, name='rate')
      self._dense = self._dense_variables(shapes)
      self._optimizer = make_optimizer()
      self._optimizer.learning_rate = lambda: self._rate_of_dense * self._rate.read_value()
      self._optimizer._create_all_weights(self._dense)  # private: see DensePart
      self.stores = []
      for i in range(self.count):
        with tf.device(_on_server(i)):
          self.stores.append(make_store('rows'))
      self._hyper = lambda: tf.concat(
        [hyper[..., :1] * self._rate.read_value(), hyper[..., 1:]], -1
      )
      pulls = {train: self._pull_graph(train) for train in (True, False)}
      push = (
        self._push_together_graph()
        if cfg.sync.mode == 'ps'
        else self._push_at_once_graph(add=cfg.sync.mode == 'ps_geo')
      )
      state = [*self._dense, *self._optimizer.weights, self._step, self._rate]
      self._state_fetch = [v.read_value() for v in state]
      self._state_feed = [v1.placeholder(v.dtype, v.shape) for v in state]
      self._state_assign = tf.group([v.assign(p) for v, p in zip(state, self._state_feed)])
      self._start = v1.global_variables_initializer()
    self.session = v1.Session(
      target,
      self._graph,
      cpu_config(device_filters=['/job:ps', f'/job:worker/task:{cluster.index}']),
    )
    self._pulls = {
      train: self.session.make_callable(fetches, feeds) for train, (fetches, feeds) in pulls.items()
    }
    self._push = self.session.make_callable(*push)
    self._sync = cfg.sync.mode == 'ps'
    self._patience = cfg.sync.lost_peer_seconds

  def _dense_variables(self, shapes):
    """Zeros until `assign`; each on the server that holds the least."""
    held, variables = [0] * self.count, []
    for i, shape in enumerate(shapes):
      at = held.index(min(held))
      held[at] += int(np.prod(shape))
      with tf.device(_on_server(at)):
        variables.append(tf.Variable(tf.zeros(shape), name=f'dense_{i}'))
    return variables

  # Graphs of a step

  def _split(self, tensors, sent):
    """Tensors of all servers, and how many values each has -> a list for each server."""
    return list(zip(*(tf.split(t, s, num=self.count) for t, s in zip(tensors, sent))))

  def _pull_graph(self, train):
    with self._on_worker():
      keys = v1.placeholder(tf.int64, [None])
      sent = sharding.owner_counts(keys, self.count)
      parts = tf.split(keys, sent, num=self.count)
    buffers = []
    for i, (store, part) in enumerate(zip(self.stores, parts)):
      with tf.device(_on_server(i)):
        n = tf.size(part)
        buffers.append(
          packing.pack_rows(store.pull(part, train), tf.range(n), n[None], self._dtype)[0]
        )
    with self._on_worker():
      buffer = tf.concat(buffers, 0)
      rows = packing.unpack_rows(
        buffer, sent, keys, self.stores[0].slot_table, self.stores[0].widths
      )
      fetches = [*rows, sent, tf.size(buffer)]
    if train:
      fetches += [v.read_value() for v in self._dense]
    return fetches, [keys]

  def _on_worker(self):
    return tf.device(f'/job:worker/task:{self._cluster.index}/device:CPU:0')

  def _placeholders(self):
    """What a worker sends in a step:

    keys, shows, clicks [u], a buffer of gradients, how much of each goes where; dense gradients;
    counts.
    """
    with self._on_worker():
      feeds = [
        v1.placeholder(tf.int64, [None]),
        v1.placeholder(tf.float32, [None]),
        v1.placeholder(tf.float32, [None]),
        v1.placeholder(self._dtype, [None]),
        v1.placeholder(tf.int32, [self.count]),
        v1.placeholder(tf.int32, [self.count]),
      ]
      keys, shows, clicks, buffer, sent, values = feeds
      parts = self._split([keys, shows, clicks, buffer], [sent, sent, sent, values])
      dense = [v1.placeholder(tf.float32, v.shape) for v in self._dense]
      counts = v1.placeholder(tf.float32, [5])
    return parts, dense, counts, [*feeds, *dense, counts]

  def _scale(self, scale, shows):
    return 1 / tf.maximum(shows, 1) if self.per_feature else tf.reshape(scale, [1])

  def _push_together_graph(self):
    """mode ps:

    each worker's gradients wait in its queue on each server until all are there; then the chief's
    op pushes once.
    """
    workers = self._communicator.size
    parts, dense, counts, feeds = self._placeholders()
    self._counts = tf.Variable(tf.zeros([5]), trainable=False, name='counts')
    global_step = tf.Variable(0, dtype=tf.int64, trainable=False, name='tokens')
    types = [tf.int64, tf.float32, tf.float32, self._dtype]
    queues, waiting = [], []
    for i, part in enumerate(parts):
      with tf.device(_on_server(i)):
        queues.append(
          [v1.FIFOQueue(1, types, shared_name=f'gradients_{r}') for r in range(workers)]
        )
        waiting.append(queues[i][self._communicator.rank].enqueue(part))

    def apply(sums, total):
      scale = 1 / tf.maximum(total[0], 1e-12)  # a step in which nobody has a sample changes nothing
      step, hyper = tf.identity(self._step.assign_add(1)), self._hyper()
      pushes = []
      for i, store in enumerate(self.stores):
        with tf.device(_on_server(i)):
          keys, shows, clicks, buffers = zip(
            *(q.dequeue() for q in queues[i])
          )  # in the order of the workers, whoever came first
          owned = dedupe(tf.concat(keys, 0), tf.concat(shows, 0), tf.concat(clicks, 0))
          rows = store.pull(owned.unique, True)
          linear, factors = packing.sum_gradients(
            tf.concat(buffers, 0), tf.stack([tf.size(k) for k in keys]), rows.offsets, owned
          )
          by = self._scale(scale, owned.shows)
          pushes.append(
            store.push(
              owned.unique, rows, owned.shows, owned.clicks, linear, factors, by, hyper, step
            )
          )
      return tf.group(
        self._optimizer.apply_gradients([(g * scale, v) for g, v in zip(sums, self._dense)]),
        *pushes,
      )

    with tf.control_dependencies(waiting):  # whoever has the counts of all workers has their rows
      last = tf.identity(counts)
    with _without_warnings():  # that SyncReplicasOptimizer is deprecated
      together = v1.train.SyncReplicasOptimizer(
        Mean(workers, self._counts, apply),
        replicas_to_aggregate=workers,
        total_num_replicas=workers,
      )
      step = together.apply_gradients(
        [*zip(dense, self._dense), (last, self._counts)], global_step=global_step
      )
      # Unused: the coordinator says when the first worker is ready.
      together.ready_for_local_init_op.mark_used()
    with tf.control_dependencies([step]):
      result = self._counts.read_value()
    with tf.control_dependencies([global_step.assign(0)]):
      self._start_chief = tf.group(together.chief_init_op, together.get_init_tokens_op(0))
    self._start_worker = together.local_step_init_op
    self._step_of_chief = together.get_chief_queue_runner().enqueue_ops[0]
    return result, feeds

  def _push_at_once_graph(self, add=False):
    """mode ps_async: this worker's gradients are applied as they come, its mean over its own
    samples.

    add: mode ps_geo: what comes are differences to add, of rows and of dense variables, and
      counts[0] is the steps that made them.
    """
    parts, dense, counts, feeds = self._placeholders()
    scale = 1 / tf.maximum(counts[0], 1e-12)
    step, hyper = (
      tf.identity(self._step.assign_add(tf.cast(counts[0], tf.int64) if add else 1)),
      self._hyper(),
    )
    pushes = []
    for i, (store, (keys, shows, clicks, buffer)) in enumerate(zip(self.stores, parts)):
      with tf.device(_on_server(i)):
        sums = self._unpack(store, keys, buffer)
        pushes.append(
          store.push(
            keys,
            sums,
            shows,
            clicks,
            sums.linear,
            sums.factors,
            self._scale(scale, shows),
            hyper,
            step,
            add=add,
          )
        )
    if add:
      pushes += [v.assign_add(g) for g, v in zip(dense, self._dense)]
    else:
      pushes.append(
        self._optimizer.apply_gradients([(g * scale, v) for g, v in zip(dense, self._dense)])
      )
    with tf.control_dependencies(pushes):
      return tf.identity(step), feeds

  def _unpack(self, store, keys, buffer):
    """Gradients or differences that came as rows do:

    between a worker's pull and its push others may have admitted a feature.
    """
    linear, factors, offsets = packing.unpack_rows(
      buffer, tf.size(keys)[None], keys, store.slot_table, store.widths
    )
    return row_store.Rows(-tf.ones_like(keys), offsets, linear, factors)

  # A step

  def start(self, state):
    """Makes the state on the servers what this worker, the first, says.

    Args: state: arrays, of dense variables and optimizer slots.
    """
    self.session.run(self._start)
    self.assign(state=state)
    if self._sync:
      self.session.run(self._start_chief)

  def start_worker(self, failed):
    """Readies this worker, after `start`.

    Args: failed: called with the error where the chief's part of a step fails.
    """
    if not self._sync:
      return
    self.session.run(self._start_worker)
    if self._communicator.rank == 0:
      step = self.session.make_callable(self._step_of_chief)

      def run():
        try:
          while True:
            step()
        except tf.errors.CancelledError:
          pass
        except Exception as e:  # the workers wait for its tokens
          failed(e)

      threading.Thread(target=run, name='steps', daemon=True).start()

  def _read(self, run):
    """Runs what only reads, again where it was refused or is not answered."""
    seconds = self._patience
    while True:
      try:
        return run(options=_within(seconds))
      except tf.errors.DeadlineExceededError:
        seconds *= 2
      except tf.errors.AbortedError as e:
        if not refused_as_duplicate(e):
          raise

  def pull(self, keys, train):
    """Rows of distinct keys (int64 [u], by logical shard) as NumPy:

    (Rows, keys of each server int32 [S], dense variables where train).
    """
    linear, factors, offsets, sent, values, *dense = self._read(
      functools.partial(self._pulls[train], keys)
    )
    if train:
      self.bytes += keys.nbytes + values * self._dtype.size + sum(v.nbytes for v in dense)
    return row_store.Rows(None, offsets, linear, factors), sent, dense

  def push(self, *arrays):
    """Sends a step: keys, shows, clicks, buffer, keys of each server, values of each, dense
    gradients …, counts [5].

    Returns: mode ps: the counts of all workers; else the number of pushes so far.
    """
    self.bytes += sum(a.nbytes for a in arrays)
    if self._sync:
      return self._push(*arrays)
    try:
      return self._push(*arrays, options=_within(self._patience))
    except (tf.errors.AbortedError, tf.errors.DeadlineExceededError) as e:
      if isinstance(e, tf.errors.AbortedError) and not refused_as_duplicate(e):
        raise
      logging.warning(
        'a push was refused or not answered: the servers may have taken only a part of it'
      )
      return self.state()[1]

  # State

  def state(self):
    """Arrays of (dense variables and optimizer slots, step, rate)."""
    *state, step, rate = self._read(functools.partial(self.session.run, self._state_fetch))
    return state, step, rate

  def assign(self, state=None, step=None, rate=None):
    """Sets what is given. Workers must not be training."""
    old = self.state()
    state, step, rate = (a if b is None else b for a, b in zip(old, (state, step, rate)))
    self.session.run(self._state_assign, dict(zip(self._state_feed, [*state, step, rate])))

  def run(self, server, function, *args, **kwargs):
    """Runs on a server what `function` builds of the graph, as if it were eager here: arrays in,
    eager tensors out.

    Args:
      args, kwargs: arrays are fed; anything else stays in the graph, which is built once for each
        function and such arguments.
    """

    def is_array(a):
      return (
        isinstance(a, (np.ndarray, np.generic)) or tf.is_tensor(a) and not tf.is_symbolic_tensor(a)
      )

    arrays = [np.asarray(a) for a in tf.nest.flatten((args, kwargs)) if is_array(a)]
    key = (
      server,
      function,
      repr(tf.nest.map_structure(lambda a: a.dtype if is_array(a) else a, (args, kwargs))),
    )
    with self._lock:
      if key not in self._cache:
        feeds = []

        def placeholder(a):
          if not is_array(a):
            return a
          feeds.append(v1.placeholder(tf.as_dtype(a.dtype), [None] * len(a.shape)))
          return feeds[-1]

        with (
          self._graph.as_default(),
          self._graph.container(f'generation{self._communicator.generation}'),
          tf.device(_on_server(server)),
        ):
          args, kwargs = tf.nest.map_structure(placeholder, (args, kwargs))
          self._cache[key] = function(*args, **kwargs), feeds
      fetches, feeds = self._cache[key]
    run = functools.partial(self.session.run, fetches, dict(zip(feeds, arrays)))
    result = self._read(run) if function.__name__.endswith(_READS) else run()
    return None if result is None else tf.nest.map_structure(tf.constant, result)
