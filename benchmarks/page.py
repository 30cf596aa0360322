"""Writes the results of benchmarks into pages: figures beside their goals, tables, a picture."""

import json
import os
import platform
import re
from importlib import metadata

from benchmarks.bench_data import CRITEO, OTHERS

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN, END = '<!-- written from here -->', '<!-- to here -->'

# The goals for figures of bench.json: key -> (sense, wanted, what it is).
WANTED = {
  'vs_tfra_adagrad': ('>=', 3, "our samples/s over TFRA's Keras path, AdaGrad on both sides"),
  'vs_tfra_adam': ('>=', 5, 'the same with Adam on both sides'),
  'vs_torch_static': ('>=', 1.3, 'over PyTorch nn.Embedding(sparse=True), a static vocabulary'),
  'vs_keras_static': ('>=', 0.9, "over Keras' static Embedding, no hash table at all"),
  'over_dense_floor': ('<=', 1.25, 'time of our step over its dense part alone'),
  'over_dense_floor_cpu': ('<=', 1.25, 'the same in processor time of all threads'),
  'bfloat16_over_float32': (
    '<=',
    1.02,
    'time of a step with `train.dense_dtype: bfloat16` over ours',
  ),
  'bfloat16_over_dense_floor': ('<=', 1.0, 'the same over the dense part alone, in float32'),
  'two_rank_efficiency': ('>=', 0.8, 'samples/s of 2 ranks of half the threads over one process'),
  'two_rank_efficiency_horovod': ('>=', 0.6, 'with `sync.row_exchange: horovod`'),
  'own_over_tfra_store': ('>=', 1, 'samples/s on our row store over `sparse.store: tfra`'),
  'input_over_train': ('>=', 5, 'samples/s of the input alone over training'),
  'raw_over_train': ('>=', 3, 'rows/s of converting a TSV log of 40 columns over samples/s'),
  'made_over_train': (
    '>=',
    2.5,
    'the same with four bins, two crosses and two parts of a time made',
  ),
  'parquet_over_train': ('>=', 7, 'the same of a Parquet log'),
  'topic_messages_per_second': (
    '>=',
    150_000,
    'messages/s of JSON that one core reads from a topic',
  ),
  'lifecycle_over_none': ('<=', 1.15, 'time of a step with the lifecycle on over one with it off'),
  'startup_seconds': ('<=', 15, 'from the start of the process to the end of its first step, s'),
  'rss_growth': ('<=', 1.02, 'resident memory at the end of a long run over that after 100 steps'),
  'step_5m_over_100k': ('<=', 1.6, 'time of a step on a table of 5 M features over one of 0.1 M'),
  'step_50m_over_100k': ('<=', 1.6, 'the same with 50 M features (--full)'),
  'step_20m_over_1m_bfloat16': (
    '<=',
    1.3,
    'the same of rows in bfloat16, on 20 M features over 1 M',
  ),
  'step_100m_over_1m_bfloat16': ('<=', 1.3, 'the same on 100 M features (--full)'),
  'gib_of_100m_bfloat16': ('<=', 10, 'the table of these 100 M, GiB (--full)'),
  'bytes_bfloat16': ('<=', 104, 'bytes of an admitted feature in bfloat16, D = 16, all included'),
  'memory_over_payload': ('<=', 1.5, 'bytes of an admitted feature over its weights and state'),
  'probation_bytes': ('<=', 96, 'bytes of a feature on probation'),
  'ffm_samples_per_second': ('>=', 300_000, "FFM with D = 4 on frappe's shape, samples/s"),
  'fm_over_dnn': ('<=', 1.25, 'time of a step of a DNN with FM added over one without'),
  'cross_over_dnn': ('<=', 1.25, 'the same with a cross network (2 layers of rank 32)'),
  'fwfm_over_dnn': ('<=', 1.25, 'the same with FwFM'),
  'din_10_vs_plain': ('>=', 0.9, 'DIN on histories of 10, samples/s over plain TensorFlow ops'),
  'din_50_vs_plain': ('>=', 0.9, 'the same of 50'),
  'din_200_vs_plain': ('>=', 0.9, 'the same of 200'),
  'mf_vs_better': ('>=', 1.2, 'MF with 800 shared negatives over the better of Keras and PyTorch'),
  'recommend_p99_ms': ('<=', 20, 'p99 of `:recommend` over 1 M items by the index, ms'),
  'loop_seconds': ('<=', 10, "from a pass's marker to the changed score, s"),
  'serve_100_per_second': ('>=', 1000, 'requests of 100 candidates a second'),
  'serve_100_p99_ms': ('<=', 10, 'their p99 at half of that rate, a delta every second, ms'),
  'serve_1_per_second': ('>=', 2000, 'requests of one candidate a second'),
  'wide_100_per_second': ('>=', 700, 'the same of 100 with 26 slots, 13 of them of the user'),
  'store_over_memory': ('>=', 0.8, 'requests a second from a store in a directory over memory'),
  'grpc_over_rest': ('>=', 1, 'the same by gRPC over REST'),
  'serving_over_saved_model': ('>=', 2, 'the same over a SavedModel behind the same server'),
  'serve_failed': ('<=', 0, 'failed requests through at least 50 versions'),
}

VECTORS = ('amx_bf16', 'avx512_bf16', 'avx512f', 'avx2')  # instructions, best first

# Published for MLPerf 1.0's DLRM: machine, samples/s and GFLOP/s per core.
PUBLISHED = (
  ('Intel, 4 sockets of Xeon 8380H', 4354, 63),
  ('Intel, 8 sockets of Xeon 8380H', 3568, 52),
)


def machine():
  """Returns what the figures depend on: processor, memory, load and versions."""
  with open('/proc/cpuinfo', encoding='utf-8') as f:
    fields = dict(line.split(':', 1) for line in f.read().replace('\t', '').splitlines() if line)
  flags = fields.get('flags', '').split()
  installed = {package.name: package.version for package in metadata.distributions()}
  versions = {
    name: installed.get(name, 'none')  # TensorFlow 2.21 has no TFRA
    for name in ('tensorflow', 'tf_keras', 'tensorflow-recommenders-addons', 'horovod', 'numpy')
  }
  return {
    'cpu': fields.get('model name', platform.machine()).strip(),
    'vectors': next((name for name in VECTORS if name in flags), 'no vectors'),
    'cores': os.cpu_count(),
    'cores_used': len(os.sched_getaffinity(0)),
    'load_before': os.getloadavg()[0],
    'memory_gib': round(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30, 1),
    'system': platform.platform(),
    'python': platform.python_version(),
    **versions,
  }


def made_by():
  """Returns a sentence with the version of TensorFlow and the processor."""
  here = machine()
  return f'TensorFlow {here["tensorflow"]}, {here["cpu"]}.'


def processor(machine):
  """Returns the name under which a machine's figures stand."""
  return f'{machine["cpu"]}, {machine["vectors"]}, {machine["cores_used"]} cores'


def picture_of(machine):
  """Returns the file name of the machine's picture."""
  return f'performance-{re.sub("[^a-z0-9]+", "-", processor(machine).lower())}.png'


def met(key, value):
  sense, wanted, _ = WANTED[key]
  return value >= wanted if sense == '>=' else value <= wanted


def goal(key):
  sense, wanted, _ = WANTED[key]
  return f'{"≥" if sense == ">=" else "≤"} {number(wanted)}'


def missed(figures):
  """Returns lines that name the goals that were missed, and those that were not measured."""
  values = {key: figures.get(key) for key in WANTED}
  wrong = [
    f'{key} {number(value)} ({goal(key)} wanted)'
    for key, value in values.items()
    if value is not None and not met(key, value)
  ]
  unknown = [key for key, value in values.items() if value is None]
  return f'missed: {", ".join(wrong) or "none"}\nnot measured: {", ".join(unknown) or "none"}'


def number(value):
  return '–' if value is None else f'{value:,.0f}' if abs(value) >= 100 else f'{value:.2f}'


def mebi(count):
  return number(count / 2**20)


def between(values):
  return f'{number(min(values))} to {number(max(values))}'


def markdown_table(head, rows):
  return '\n'.join('| ' + ' | '.join(row) + ' |' for row in [head, ['---'] * len(head), *rows])


def cell(key, figure):
  """Returns a figure as text, bold if it misses its goal.

  Args:
    key: of WANTED.
    figure: the median, or [median, lowest round, highest round]; None: not measured.
  """
  if figure is None:
    return number(None)
  median, *rounds = figure if isinstance(figure, list) else [figure]
  text = number(median) if met(key, median) else f'**{number(median)}**'
  return f'{text} ({between(rounds)})' if rounds else text


def side_by_side(of_processors):
  """Returns the table of goals as Markdown, with a column for each processor.

  Args:
    of_processors: processor -> its figures by key.
  """
  rows = [
    [f'`{key}`', what, goal(key), *(cell(key, f.get(key)) for f in of_processors.values())]
    for key, (_, _, what) in WANTED.items()
  ]
  return markdown_table(['key', 'what', 'wanted', *of_processors], rows)


def figures_of(result):
  """Returns the figures with goals of what bench.json holds, in the form that `cell` takes."""
  return {
    key: [result[key], *s] if (s := result['spread'].get(key)) else result[key] for key in WANTED
  }


def rates_table(group):
  """Returns the median rate of each contender of a group and the spread of its rounds."""
  rows = [[n, number(r['samples_per_second']), between(r['rounds'])] for n, r in group.items()]
  return markdown_table(['', 'samples/s', 'rounds'], rows)


def tables(result):
  """Returns the tables of one processor as Markdown, from the content of bench.json."""
  m, raw = result['machine'], result['raw']
  versions = [
    f'TensorFlow {m["tensorflow"]}',
    f'TFRA {m["tensorflow-recommenders-addons"]}',
    f'Horovod {m["horovod"]}',
    *sorted({v for v in raw.get('versions', {}).values() if not v.startswith('tensorflow')}),
  ]
  parts = [
    f'## {processor(m)}',
    f'Measured on {m["cores_used"]} of {m["cores"]} cores, {m["memory_gib"]} GiB, load before '
    f'{m["load_before"]:.1f}; {", ".join(versions)}; seed {result["seed"]}; {result["rounds"]} '
    'rounds.',
  ]
  if raw.get('main'):
    parts += ['### Side by side', f'![Samples a second]({picture_of(m)})', rates_table(raw['main'])]
  if any(name in raw for name in OTHERS):
    rows = [
      [
        name,
        str(s.batch),
        f'{s.slots}, {s.multi} of them multi-valued' if s.multi else str(s.slots),
        str(s.width),
        '-'.join(map(str, s.hidden)),
        number(result.get(f'{name}_samples_per_second')),
        number(result.get(f'{name}_over_dense_floor')),
      ]
      for name, s in OTHERS.items()
    ]
    head = ['', 'batch', 'slots', 'D', 'MLP', 'samples/s', 'time over its dense part']
    parts += ['### Other shapes', markdown_table(head, rows)]
  if raw.get('histories'):
    parts += [
      '### Histories',
      'DIN of 200-80 and an activation unit of 36 on batches of 1024 with histories of L features, '
      "ours beside the paper's formula in plain TensorFlow ops on a static Keras Embedding.",
      rates_table(raw['histories']),
    ]
  if raw.get('record'):
    of_ours = {
      name: (r['samples_per_second_a_core'], r['gflops_a_core'])
      for name, r in raw['record'].items()
    }
    of_others = {f'published: {name}': figures for name, *figures in PUBLISHED}
    rows = [[name, *map(number, figures)] for name, figures in (of_ours | of_others).items()]
    parts += [
      "### The record's shape",
      "MLPerf's DLRM: 26 slots of D = 128, 13 dense columns through 512-256-128, dots, then "
      '1024-1024-512-256-1. GFLOP/s count 6 operations per multiplication of the MLPs. The '
      'published figures are of other processors, in bfloat16, with batches of 32 k over several '
      'sockets and tables of 24 G weights; ours are of one process and smaller tables.',
      markdown_table(['', 'samples/s a core', 'GFLOP/s a core'], rows),
    ]
  if raw.get('ranks'):
    parts += ['### Between 2 ranks', rates_table(raw['ranks'])]
  if result.get('bytes_per_sample') is not None:
    parts += [
      f'For each sample the ranks send {number(result["bytes_per_sample"])} bytes in all-to-alls. '
      'The unique keys, their rows and their gradients need '
      f'{number(result["bytes_per_sample_needed"])}. The dense allreduce adds '
      f'{number(result["dense_bytes_per_sample"])}.',
    ]
  if raw.get('table'):
    rows = [
      [
        name,
        number(r['samples_per_second']),
        f'{r["features"]:,}',
        mebi(r['table_bytes']),
        mebi(r['rss']),
      ]
      for name, r in (raw['table'] | raw.get('small_rows', {})).items()
    ]
    head = ['', 'samples/s', 'features', 'table, MiB', 'process, MiB']
    parts += ['### Tables and memory', markdown_table(head, rows)]
  if raw.get('memory'):
    r = {name: number(count) for name, count in raw['memory'].items()}
    parts += [
      f'A feature with D = {CRITEO.width} and AdaGrad has {r["payload_bytes"]} bytes of weights '
      f'and state. Once admitted it takes {r["admitted_bytes"]} bytes of the table '
      f'({r["admitted_resident_bytes"]} of the process), on probation {r["probation_bytes"]} '
      f'({r["probation_resident_bytes"]}), and admitted with factors in bfloat16 and one number of '
      f'state per row {r["bfloat16_bytes"]} ({r["bfloat16_resident_bytes"]}).'
    ]
  if raw.get('flat'):
    r = raw['flat']
    parts += [
      f'Resident memory is {mebi(r["early_rss"])} MiB after {r["early_steps"]} steps, '
      f'{mebi(r["rss"])} MiB after {r["steps"]:,}.'
    ]
  if raw.get('parts'):
    rows = [[name, f'{wall:.2f}', f'{cpu:.2f}'] for name, (wall, cpu) in raw['parts'].items()]
    parts += [
      '### Where a step goes',
      'Each part runs by itself, as a function of its own, on the same batches; the figures are '
      'medians. On a busy machine only the CPU time means anything.',
      markdown_table(['part', 'ms', 'CPU ms, all threads'], rows),
    ]
  for name, other in result['others'].items():
    output = other['output'].rstrip()
    parts += [f'### {name}', f'`{other["command"]}` printed', f'```\n{output}\n```']
  parts += [f'Left out: {name}: {why}.' for name, why in result['left_out'].items()]
  return '\n\n'.join(parts)


def picture(rates, path):
  """Draws bars of samples/s with the spread of the rounds.

  Args:
    rates: name -> {samples_per_second, rounds}.
    path: of the picture.
  """
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  floor = rates.get('dense part alone')
  names = sorted(
    (n for n in rates if n not in ('input alone', 'dense part alone')),
    key=lambda n: rates[n]['samples_per_second'],
  )
  medians = [rates[n]['samples_per_second'] / 1000 for n in names]
  low = [m - min(rates[n]['rounds']) / 1000 for m, n in zip(medians, names)]
  high = [max(rates[n]['rounds']) / 1000 - m for m, n in zip(medians, names)]
  colors = ['#1f6fb4' if n.startswith('ours') else '#b8b8b8' for n in names]
  figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(names) + 1.2), layout='constrained')
  axes.barh(names, medians, xerr=[low, high], color=colors, error_kw={'lw': 1})
  if floor:
    axes.axvline(
      floor['samples_per_second'] / 1000, color='#444444', ls=':', label='dense part alone'
    )
    axes.legend(frameon=False, loc='lower right')
  axes.set_xlabel('thousand samples/s, complete training step')
  axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(path, dpi=120)


def markers(by=''):
  """Returns the lines between which a benchmark writes; `by` names it if the page has several."""
  return tuple(m.replace(' -->', f' by {by} -->') if by else m for m in (BEGIN, END))


def write_between(path, text, by=''):
  """Replaces the text between the `markers` of a page; if it has none, appends them."""
  begin, end = markers(by)
  with open(path, encoding='utf-8') as f:
    page = f.read()
  if begin not in page:
    page = f'{page.rstrip()}\n\n{begin}\n{end}\n'
  before, rest = page.split(begin)
  with open(path, 'w', encoding='utf-8') as f:
    f.write(f'{before}{begin}\n\n{text.strip()}\n\n{end}{rest.split(end)[1]}')


def write_results(path, result):
  """Writes a machine's figures into a page, beside those of other processors.

  A .json file beside the page holds the figures of all processors.
  """
  name, kept = processor(result['machine']), os.path.splitext(path)[0] + '.json'
  of_processors = {}
  if os.path.exists(kept):
    with open(kept, encoding='utf-8') as f:
      of_processors = json.load(f)
  of_processors[name] = figures_of(result)
  with open(kept, 'w', encoding='utf-8') as f:
    json.dump(of_processors, f, indent=1)
    f.write('\n')
  write_between(path, side_by_side(of_processors))
  write_between(path, tables(result), name)
