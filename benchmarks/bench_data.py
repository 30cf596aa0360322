"""Made-up click samples with power-law features, the same for all contenders.

It needs only NumPy, because some contenders have no TensorFlow; `prepare` imports the trainer.
"""

import dataclasses
import itertools
import os
import tempfile

import numpy as np

MOST_FEATURES = 9  # in a multi-valued slot, which holds 1 to 9


@dataclasses.dataclass(frozen=True)
class Shape:
  """The shape of model and data.

  Slot f has `vocabulary[f]` features. By default the F sizes run from 10 to 2 million, evenly
  spaced in the logarithm.
  """

  batch: int = 4096  # samples a step
  slots: int = 26  # F
  dense: int = 13  # Dn
  width: int = 16  # D
  hidden: tuple = (256, 128)
  multi: int = 0  # the number of slots that hold several features: the last ones
  history: int = 0  # L: the last slot holds a sequence of L features of the first slot
  vocabulary: tuple = ()
  batches: int = 60  # distinct ones, which contenders read again and again

  def __post_init__(self):
    sizes = self.vocabulary or np.geomspace(10, 2_000_000, self.slots).astype(int)
    object.__setattr__(self, 'vocabulary', tuple(int(s) for s in sizes))
    object.__setattr__(self, 'hidden', tuple(self.hidden))

  @property
  def samples(self):
    return self.batch * self.batches

  def as_dict(self):
    return dataclasses.asdict(self)


CRITEO = Shape()
FRAPPE = Shape(
  slots=10,
  dense=0,
  width=10,
  hidden=(400, 400, 400),
  vocabulary=(957, 4082, 7, 7, 2, 3, 2, 9, 80, 233),
)
# MLPerf 1.0's DLRM with fewer features. `hidden` is its top MLP, DLRM_BOTTOM its bottom one.
RECORD = Shape(width=128, hidden=(1024, 1024, 512, 256), batches=8)
DLRM_BOTTOM = (512, 256)
# DIN by the length of histories.
ATTENTION = 36
HISTORIES = {
  length: Shape(
    batch=1024,
    slots=5,
    dense=4,
    hidden=(200, 80),
    vocabulary=(100_000, 50_000, 1000, 100, 100_000),
    batches=20,
    history=length,
  )
  for length in (10, 50, 200)
}
# Matrix factorisation of Yelp18's size: users and items, and negatives that a batch shares.
MF = Shape(batch=1024, slots=2, dense=0, width=64, hidden=(), vocabulary=(31_668, 38_048))
MF_NEGATIVES, MF_TEMPERATURE = 800, 0.11
OTHERS = {
  'width_8': dataclasses.replace(CRITEO, width=8),
  'width_32': dataclasses.replace(CRITEO, width=32),
  'batch_1k': dataclasses.replace(CRITEO, batch=1024, batches=240),
  'batch_16k': dataclasses.replace(CRITEO, batch=16384, batches=15),
  'slots_40': Shape(slots=40, multi=2),
  'frappe': FRAPPE,
}


def make(shape, seed):
  """Makes n = shape.samples samples.

  Returns:
    The ids, F arrays int64 [n] or, for a multi-valued slot, [nnz]; counts int64 [n, F], the
    features in each slot; dense float32 [n, Dn]; label float32 [n].
  """
  rng = np.random.default_rng(seed)
  counts = np.ones([shape.samples, shape.slots], np.int64)
  if shape.multi:
    counts[:, -shape.multi :] = rng.integers(1, MOST_FEATURES + 1, [shape.samples, shape.multi])
  if shape.history:
    counts[:, -1] = shape.history
  ids = [
    (size * rng.random(counts[:, f].sum()) ** 3).astype(np.int64)
    for f, size in enumerate(shape.vocabulary)
  ]
  return (
    ids,
    counts,
    rng.random([shape.samples, shape.dense], np.float32),
    (rng.random(shape.samples) < 0.25).astype(np.float32),
  )


def batches(shape, seed, keys_of):
  """Makes the batches of a shape without multi-valued slots.

  Args:
    shape: a Shape.
    seed: of the samples.
    keys_of: (slot, ids) -> keys; how the contender numbers features.
  Returns:
    Lists of keys int64 [B, F], dense float32 [B, Dn] and label float32 [B, 1].
  """
  ids, _, dense, label = make(shape, seed)
  keys = np.stack([keys_of(f, i) for f, i in enumerate(ids)], 1)
  return tuple(np.split(a, shape.batches) for a in (keys, dense, label[:, None]))


def history_batches(shape, seed):
  """Makes the batches of a shape with a history, whose features `static_ids` numbers.

  Returns:
    Lists of keys int64 [B, F - 1], history int64 [B, L], dense float32 [B, Dn] and label float32
    [B, 1].
  """
  ids, _, dense, label = make(shape, seed)
  number = static_ids(shape)
  keys = np.stack([number(f, i) for f, i in enumerate(ids[:-1])], 1)
  history = number(0, ids[-1]).reshape(-1, shape.history)
  return tuple(np.split(a, shape.batches) for a in (keys, history, dense, label[:, None]))


def static_ids(shape):
  """Returns the `keys_of` of a static vocabulary: it numbers slot after slot, without gaps."""
  starts = list(itertools.accumulate(shape.vocabulary, initial=0))
  return lambda f, ids: ids + starts[f]


def hashed_keys(f, ids):
  """The `keys_of` of hash tables: slot id, then 52 mixed bits, like trainer.data.features."""
  mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(12)
  return np.int64(f + 1) << 52 | mixed.astype(np.int64)


def config(
  shape,
  path,
  optimizer='adagrad',
  interactions=None,
  lifecycle=None,
  store='rows',
  sync=None,
  dense_dtype='float32',
  small_rows=False,
  retrieval=False,
):
  """Returns our trainer's config, a dict, for a prepared pass of this shape.

  Args:
    shape: a Shape.
    path: the directory of the pass.
    optimizer: of rows and of dense variables; the learning rate is 0.01, as with the others.
    interactions: default: linear, fm, and a dnn of the shape's hidden layers.
    lifecycle: default: every feature is admitted at its first show, since the other contenders
      have no admission.
    store: `sparse.store`.
    sync: the section of the config.
    dense_dtype: `train.dense_dtype`.
    small_rows: whether factors are bfloat16 with one number of state per row.
    retrieval: whether the model is matrix factorisation of the two slots, users and items; each
      sample is then a positive.
  """
  row_optimizer = {'kind': optimizer, 'learning_rate': 0.01}
  several = {f: {'separator': '|'} for f in range(shape.slots) if f >= shape.slots - shape.multi}
  if shape.history:
    sequence = {'max_length': shape.history}
    several[shape.slots - 1] = {'separator': '|', 'shares': 'C0', 'sequence': sequence}
  table = {'width': shape.width, 'linear': row_optimizer, 'factors': row_optimizer}
  if small_rows:
    table |= {'factors': {'kind': 'adagrad_row', 'learning_rate': 0.01}, 'dtype': 'bfloat16'}
  interactions = interactions or ['linear', 'fm', {'dnn': {'hidden': list(shape.hidden)}}]
  model = {'interactions': interactions}
  if lifecycle is None:
    lifecycle = {'admission': 'score', 'admission_threshold': 0.1}
  if retrieval:
    towers = {'query': {'slots': ['C0']}, 'item': {'slots': ['C1']}}
    model = {'retrieval': towers | {'negatives': MF_NEGATIVES, 'temperature': MF_TEMPERATURE}}
  return {
    'run_dir': os.path.join('build', 'bench', 'run'),
    'data': {
      'train': [path],
      'format': 'prepared',
      'slots': [{'name': f'C{f}'} | several.get(f, {}) for f in range(shape.slots)],
      'dense': [{'name': f'I{i}'} for i in range(shape.dense)],
    }
    | ({'label': None, 'group': 'C0'} if retrieval else {}),
    'sync': sync or {},
    'sparse': {'store': store, 'tables': {'default': table}},
    'lifecycle': lifecycle,
    'model': model,
    'train': {
      'batch_size': shape.batch,
      'dense_optimizer': {'kind': optimizer, 'learning_rate': 0.01},
      'dense_dtype': dense_dtype,
    },
  }


# Four bins, two crosses and two parts of a time.
MADE = [
  *({'name': f'B{i}', 'from': {'bins': f'I{i}', 'boundaries': [*range(20)]}} for i in range(3)),
  {'name': 'B3', 'from': {'bins': 'I3', 'log_squared': True}},
  {'name': 'X0', 'from': {'cross': ['C5', 'C20']}},
  {'name': 'X1', 'from': {'cross': ['C0', 'C25', 'B0']}},
  {'name': 'hour', 'from': {'time': 'time', 'part': 'hour', 'unit': 'seconds'}},
  {'name': 'day', 'from': {'time': 'time', 'part': 'weekday', 'unit': 'seconds'}},
]


def raw_config(shape, path, made=()):
  """Returns the config, a dict, to convert a raw log that `write_log` wrote.

  Args:
    shape: of the log.
    path: of the log.
    made: slots to make from other columns.
  """
  tree = config(shape, path)
  slots, dense = tree['data']['slots'], tree['data']['dense']
  tree['data'] |= {'format': None, 'label': 'label'}
  if not path.endswith('.parquet'):
    columns = ['label', *(c['name'] for c in [*dense, *slots]), 'time']
    tree['data'] |= {'columns': columns, 'delimiter': '\t'}
  slots += made
  return tree


def write_log(shape, seed, path):
  """Writes a log in the form of Criteo's, unless the file exists.

  The columns are the label, the integers, categories of 8 hexadecimal digits, and a time in seconds
  within one month. A fifth of the integers and a tenth of the categories are blank.

  Args:
    shape: of the samples.
    seed: of the samples.
    path: a .tsv file, which gets no header line, or a .parquet file.
  """
  import pyarrow as pa
  import pyarrow.csv
  import pyarrow.parquet

  if os.path.exists(path):
    return
  ids, _, _, label = make(shape, seed)
  rng = np.random.default_rng(seed + 1)
  columns = {'label': pa.array(label.astype(np.int8))}
  for i in range(shape.dense):
    counts = np.exp(rng.normal(2, 2, shape.samples)).astype(np.int64)
    columns[f'I{i}'] = pa.array(counts, mask=rng.random(shape.samples) < 0.2)
  for f, own in enumerate(ids):
    names = [f'{key & 0xFFFFFFFF:08x}' for key in hashed_keys(f, own).tolist()]
    columns[f'C{f}'] = pa.array(names, mask=rng.random(shape.samples) < 0.1)
  columns['time'] = pa.array(1_700_000_000 + rng.integers(0, 30 * 86_400, shape.samples))
  table = pa.table(columns)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as directory:
    temporary = os.path.join(directory, 'log')
    if path.endswith('.parquet'):
      pa.parquet.write_table(table, temporary)
    else:
      options = pa.csv.WriteOptions(include_header=False, delimiter='\t', quoting_style='none')
      pa.csv.write_csv(table, temporary, options)
    os.rename(temporary, path)


def prepare(shape, seed, cfg, directory):
  """Writes the samples as a prepared pass of this config, unless the directory exists."""
  from trainer.data.parse import Parsed
  from trainer.data.prepared_writer import Writer
  from trainer.data.schema import schema

  if os.path.exists(directory):
    return
  ids, counts, dense, label = make(shape, seed)
  keys = [hashed_keys(f, i) for f, i in enumerate(ids)]
  if shape.history:
    keys[-1] = hashed_keys(0, ids[-1])
  os.makedirs(os.path.dirname(directory), exist_ok=True)
  temporary = tempfile.mkdtemp(dir=os.path.dirname(directory))
  writer = Writer(temporary, cfg.data, cfg.labels)
  if cfg.model.retrieval is None:
    writer.add(Parsed(counts, keys, None, dense, label[:, None]))
  else:
    writer.add(Parsed(counts, keys, None, dense, np.ones_like(label)[:, None], group=ids[0]))
  writer.close({'schema': schema(cfg), 'day': None, 'dense': {}, 'source': {'path': directory}})
  os.rename(temporary, directory)
