"""Finds values that a config leaves to the run, such as recipe, bins, crosses and batch size."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from trainer import config
from trainer.data import crosses
from trainer.data.block import Block
from trainer.data.columns import lookup
from trainer.data.columns.arrow_columns import ArrowReader, only_unicode
from trainer.data.conversion import blocks_of_pass, data_of_table
from trainer.data.file_system import exists, normal
from trainer.data.parse import parse
from trainer.data.passes import announced, passes, paths_of_log
from trainer.data.prepared import PreparedPass, is_prepared, read_meta
from trainer.data.schema import wanted_columns
from trainer.data.values import Writing, as_text, canonical, floats, trim
from trainer.errors import BadPass, UserError, plain_errors, printable, short
from trainer.plain_data import Json, JsonObject

# Steps of an epoch, and of all epochs. With fewer, training ends before the model has converged.
# The second matters where a log of many days is trained on once.
LEAST_STEPS, LEAST_STEPS_IN_ALL = 30, 200
# With data.watch, each pass is trained on once, and the model must learn from the first ones. On
# two logs of 17,000 samples a day, AUC on the last day was 0.03 and 0.08 higher with batches of 256
# than with 2048.
LEAST_STEPS_OF_A_PASS = 60
# Smaller batches follow the noise of each pass of a stream; those of a log with days, where there
# are days enough for LEAST_STEPS_IN_ALL, may be larger (docs/quality.md).
SMALLEST, SMALLEST_OF_A_STREAM, SMALLEST_OF_DAYS = 64, 256, 1024
FEATURES, LISTS = 'sparse.features_per_sample', 'sparse.shared_lists'
RECIPE, BINS, CROSSES = 'model.recipe', 'data.dense_bins', 'data.crosses'
MOST_OF_RACE, EPOCHS_OF_RACE = 4_000_000, 2  # samples; a race of more would take too long
LEAST_LEAD = 0.005  # the share of the metric that bins or crosses must gain; less may be chance
MOST_CONTENT = 1 << 20  # bytes of a table in the config
MOST_FOR_FEATURES = 65_536  # samples of a prepared pass on which features are counted
MOST_SAMPLES = 1_000_000  # on which bins are measured
MOST_OF_ENSEMBLE = 100_000  # samples; on more one perceptron is as good (docs/quality.md)


def measured(
  cfg: config.Config, init_from: str | None = None, race: Callable | None = None
) -> tuple[dict[str, Json], list[str]]:
  """Measures or reads the values that a config leaves to the run, such as the boundaries of bins.

  Values that this run measured when it began are kept; recipe, bins and crosses that the run_dir
  `init_from` measured are taken from there; all others are measured now, on the passes that are
  there. `race(config, epochs)` trains, and returns how well data.valid judges the model, higher is
  better, or None. Returns {config key: value}, and lines for the user that say where the values
  come from.
  """
  values, told = config.measured_of_run(cfg, cfg.run_dir), []
  for key, value in values.items():
    table = _table_of(cfg.data, key)
    if value is None:
      continue
    is_other = table and os.path.exists(table) and _content(cfg.data, key) != value
    has_changed = f'; {table} has changed since, which a new run_dir would read' if is_other else ''
    told.append(f'{in_words(cfg.data, key, value)} when the run began{has_changed}')
  of_other = config.measured_of_run(cfg, init_from) if init_from else {}

  def take_over(keys: Iterable[str]) -> None:
    for key in of_other.keys() & keys - values.keys():
      values[key] = of_other[key]
      told.append(f'{key}: {values[key]}, as in {init_from}')

  is_alike = (of_other.get(RECIPE) == 'stream') == (cfg.model.recipe == 'stream')
  take_over([RECIPE, BINS, CROSSES] if is_alike else [BINS, CROSSES])
  found = {} if RECIPE in values else recipe(cfg)
  than = f'of {"at least" if "plain" in found.values() else "less than"} '
  suits = 'trained on once' if 'stream' in found.values() else f'{than}{MOST_OF_ENSEMBLE:,} samples'
  told += [f'{in_words(cfg.data, k, v)} for a log {suits}' for k, v in found.items()]
  values |= found
  chosen = {key: values[key] for key in values.keys() & {RECIPE, BINS, CROSSES}}
  cfg = config.resolve(cfg, chosen)
  if race and (keys := _may_race(cfg)):
    raced, lines = _raced(cfg, keys, race)
    values, told = values | raced, told + lines
    cfg = config.resolve(cfg, raced)
  take_over([key for key in cfg.data.left_open() if _table_of(cfg.data, key) is None])
  if 'batch_size' not in cfg.train.model_fields_set and 'train.batch_size' not in values:
    size, samples, of = suitable(cfg)
    values['train.batch_size'] = size
    if size != cfg.train.batch_size:
      told.append(
        f'train.batch_size: {size}, measured: {of} has {samples:,} samples '
        f'({cfg.train.batch_size} in a large one)'
      )
    elif cfg.data.stream and not samples:
      where = 'data.topic' if cfg.data.topic else 'data.watch'
      told.append(
        f"train.batch_size: {size}, the default: {where}: '{cfg.data.stream}' has no pass to "
        f'measure it on; if a pass has fewer than {LEAST_STEPS_OF_A_PASS * size:,} samples, a '
        'smaller one learns faster'
      )
  if 'shared_lists' not in cfg.sparse.model_fields_set and LISTS not in values:
    adds_up = cfg.adds_up_rows and any(s.is_list_of_another for s in cfg.data.slots)
    values[LISTS] = 'mean' if adds_up else None  # the default, so not told
  new = open_values(config.resolve(cfg, values))
  if 'features_per_sample' not in cfg.sparse.model_fields_set and FEATURES not in values:
    new[FEATURES] = _features_per_sample(config.resolve(cfg, values | new))
  told += [in_words(cfg.data, key, value) for key, value in new.items() if value is not None]
  return values | new, told


def recipe(cfg: config.Config) -> dict[str, Json]:
  """Returns the recipe that suits the log; {} if the config leaves none open."""
  if not cfg.origin(RECIPE).startswith('from'):
    return {}
  if cfg.model.recipe == 'stream':
    return {RECIPE: 'stream'}
  is_large = _count(cfg, MOST_OF_ENSEMBLE)[0] == MOST_OF_ENSEMBLE
  return {RECIPE: 'plain' if is_large else 'ensemble'}


def _may_race(cfg: config.Config) -> list[str]:
  """Returns the keys whose defaults a new run measures by a race: of bins and crosses of slots."""
  data = cfg.data
  if cfg.model.recipe != 'plain' or any(is_prepared(data, path) for path in paths_of_log(data)):
    return []
  added = {cfg.origin(f'data.slots.{i}.name') for i in range(len(data.slots))}
  keys = [CROSSES] if cfg.origin(CROSSES).startswith('from') else []
  if cfg.origin(BINS).startswith('from') and 'from data.dense_bins' in added:
    keys.insert(0, BINS)
  return keys if keys and _count(cfg, MOST_OF_RACE)[0] < MOST_OF_RACE else []


def _raced(
  cfg: config.Config, keys: Sequence[str], race: Callable
) -> tuple[dict[str, Json], list[str]]:
  """Returns the values of `keys` that won on data.valid, and lines for the user.

  Each key is tried beside the values that won for the keys before it.
  """

  def variant(values: Mapping[str, Json]) -> config.Config:
    one = config.resolve(cfg, values)
    return config.resolve(one, measured(one)[0])

  without: dict[str, Json] = {BINS: None, CROSSES: []}
  chosen = {key: without[key] for key in keys}
  best, reached, told = variant(chosen), None, []
  for key in keys:
    rival = config.BINS if key == BINS else crosses.found(best)
    if not rival:
      told.append(f'{key}: [], measured (none tells more than its parts)')
      continue
    what = 'bins' if key == BINS else ', '.join(map(config.cross_slot, rival))
    if reached is None:
      reached = race(best, EPOCHS_OF_RACE)
    other = variant(chosen | {key: rival})
    of_rival = None if reached is None else race(other, EPOCHS_OF_RACE)
    if of_rival is None:
      wins, by = key == BINS, 'the default: data.valid cannot judge'
    else:
      lead = of_rival - reached
      wins = lead >= LEAST_LEAD * abs(reached)
      how = f'{abs(lead):.4f} {"better" if lead > 0 else "worse"} with {what}'
      by = f'measured ({cfg.deciding_metric} {how}, after {EPOCHS_OF_RACE} epochs)'
    if wins:
      chosen[key], best, reached = rival, other, of_rival
    told.append(f'{key}: {json.dumps(chosen[key])}, {by}')
  return chosen, told


def in_words(data: config.Data, key: str, value: Json) -> str:
  """Says in one line which table was read, or which value was measured, for an open config key."""
  column = data.left_open().get(key)
  if table := _table_of(data, key):
    return f"'{column.name}': its look-up table {table}, read"
  of_column = f" of '{column.name}'" if column else ''
  how = 'the default, as' if config.is_default(key, value) else 'measured'
  return f'{key}{of_column}: {value}, {how}'


def _table_of(data: config.Data, key: str) -> str | None:
  """Returns the path of the look-up table whose content is a key's value; None for other keys."""
  column = data.left_open().get(key)
  return column.made.table if column and isinstance(column.made, config.Lookup) else None


def open_values(cfg: config.Config) -> JsonObject:
  """Reads the look-up tables and measures the bins that a config leaves open."""
  left_open = cfg.data.left_open()
  new = {key: _content(cfg.data, key) for key in left_open if _table_of(cfg.data, key)}
  if len(left_open) > len(new):  # bins are still open; their numbers may come from tables
    new |= _boundaries(config.resolve(cfg, new).data)
  return new


def _content(data: config.Data, key: str) -> str:
  """Reads the look-up table that a config key names; returns its content as a config stores it."""
  made = data.left_open()[key].made
  names, table = (made.key or made.lookup, made.value), {}
  if not exists(normal(made.table)):
    raise UserError(f'{key.removesuffix("content")}table: {made.table}: no such file')
  with plain_errors(f'{key}: cannot read {made.table}'):
    plain = data_of_table(data, made.table, names, {'slots': [], 'dense': []})
    keys = [key.removesuffix('content') + of for of in ('key', 'value')]
    missing = canonical(trim(pa.array(data.missing_values, pa.string()))).to_pylist()
    for block in blocks_of_pass(plain, made.table, dict(zip(names, keys))):
      if block.malformed:
        raise UserError(f'{key}: {block.malformed[0]._replace(path=made.table)}')
      for text, value in zip(*(_texts(block, name, made.table) for name in names)):
        if text in table:
          raise UserError(f'{made.table}: the key {short(text)} is there twice; wanted it once')
        if text:
          table[text] = '' if value in missing else value
  if key.startswith('data.dense') and not data.max_bad_share:
    _, wrong = floats(pa.array(table.values(), pa.string()), made.value, (), Writing.of(data))
    for text in np.array(list(table), object)[wrong][:1]:
      raise UserError(
        f"{made.table}: column '{made.value}' beside {short(text)}: found {short(table[text])}; "
        'wanted a finite number, blank for missing, or a text of data.missing_values'
      )
  content = lookup.encoded(table)
  if len(content) > MOST_CONTENT:
    raise UserError(
      f'{made.table}: found {len(table):,} keys, {len(content):,} bytes once compressed; wanted at '
      f'most {MOST_CONTENT:,}: join so large a table with the log'
    )
  return content


def suitable(cfg: config.Config) -> tuple[int, int, str]:
  """Returns the batch size for a config that gives none, and how many samples of what decide it.

  These are the samples of the log or, in a stream, the mean over the passes that are there,
  counted until there are enough for the default batch size, which a log without samples gets too.
  """
  steps, least = max(LEAST_STEPS, -(-LEAST_STEPS_IN_ALL // cfg.train.epochs)), SMALLEST
  if cfg.data.stream:
    steps, least = LEAST_STEPS_OF_A_PASS, SMALLEST_OF_A_STREAM
  samples, passes = _count(cfg, steps * config.BATCH_SIZE)
  of_pass = samples // max(1, passes)
  if cfg.data.stream:
    return _fitting(of_pass, steps, least), of_pass, 'a pass'
  size = _fitting(samples, steps, least)
  if cfg.data.has_days and cfg.train.epochs == 1:
    of_days = _fitting(of_pass, LEAST_STEPS_OF_A_PASS, SMALLEST_OF_DAYS)
    if of_days < size:
      return of_days, of_pass, 'a pass'
  return size, samples, 'the log'


def _fitting(samples: int, steps: int, least: int) -> int:
  """Returns the largest batch size, at least `least`, that gives so many steps."""
  size = config.BATCH_SIZE
  while size > least and 0 < samples < steps * size:
    size //= 2
  return size


def _features_per_sample(cfg: config.Config) -> float | None:
  """Returns how many features the log's first samples have on average, at least one a slot.

  A list whose mean the layers read (`Config.averaged`) counts as one feature. The result is None
  if no slot may hold several features, if no pass has a sample that can be read, or with
  model.retrieval, which does not add up rows.
  """
  slots = len(cfg.data.slots)
  summed = [f for f, is_mean in enumerate(cfg.averaged()) if not is_mean]
  of_many = any(cfg.ordered_slots[f].may_hold_several for f in summed)
  if not (cfg.adds_up_rows and of_many):
    return None
  for path in paths_of_log(cfg.data):
    with contextlib.suppress(Exception):  # the run refuses the pass, and says why
      if is_prepared(cfg.data, path):
        batch = next(PreparedPass(path, cfg).batches(MOST_FOR_FEATURES))
        samples, of_slots = len(batch.label), np.bincount(batch.segments % slots, minlength=slots)
      else:
        with contextlib.closing(blocks_of_pass(cfg.data, path, wanted_columns(cfg))) as blocks:
          parsed = parse(cfg, next(blocks))
        samples, of_slots = len(parsed.label), np.zeros([slots])
        if parsed.counts is not None:  # else no sample has several features in a slot
          of_slots = parsed.counts.sum(0)
      if samples:
        mean = of_slots[summed].sum() / samples + slots - len(summed)
        return max(float(slots), float(f'{mean:.3g}'))
  return None


def _count(cfg: config.Config, most: int) -> tuple[int, int]:
  """Counts the samples of the log up to `most`, and their passes; a damaged pass ends there."""
  samples, passes, wanted = 0, 0, wanted_columns(cfg)
  for path in paths_of_log(cfg.data):
    before = samples
    with contextlib.suppress(Exception):  # the run refuses the pass, and says why
      for length in _lengths(cfg.data, path, wanted):
        samples += length
        if samples >= most:
          return most, passes + 1
    passes += samples > before
  return samples, passes


def _lengths(data: config.Data, path: str, wanted: dict[str, str]) -> Iterator[int]:
  """Yields the number of samples in each block of a pass; a prepared pass is one block."""
  if is_prepared(data, path):
    yield read_meta(path)['samples']
    return
  with contextlib.closing(blocks_of_pass(data, path, wanted)) as blocks:
    for block in blocks:
      yield len(block.lines)


def _texts(block: Block, column: str, path: str) -> list[str]:
  """Returns the texts of a look-up table's column as they are hashed: 12.0 becomes 12."""
  array = block.columns[column]
  if pa.types.is_floating(array.type):  # 1.5 is a valid text here
    array = array.cast(pa.string())
  texts = as_text(array, column)
  _, is_text = only_unicode(texts)
  for i in np.flatnonzero(~is_text)[:1].tolist():
    found = printable(texts.view(pa.binary())[i].as_py().decode(errors='backslashreplace'))
    place = f"{path}:{block.lines[i]}: column '{column}'"
    raise UserError(f"{place}: found '{found}'; wanted text in UTF-8")
  return canonical(trim(texts).fill_null('')).to_pylist()


def _boundaries(data: config.Data) -> dict[str, Json]:
  """Measures boundaries of bins on the first pass that can be read; returns {key: boundaries}."""
  slots = data.left_open()
  listed = announced(data)[0] if data.watch and not data.train else []
  listed += passes(data, data.train, 'data.train')
  error = UserError(
    f'{next(iter(slots))}: found no pass in {data.stream} that they could be measured on; '
    'wanted one, or boundaries'
  )
  for data_pass in listed:
    try:
      if is_prepared(data, data_pass.path):
        return _of_prepared(data_pass.path, slots)
      numbers = _numbers(data, data_pass.path, slots)
    except BadPass as e:
      error = e
      continue
    added = [config.bins_slot(column.name) for column in data.dense if data.dense_bins]
    for key, slot in slots.items():
      if not len(numbers[key]) and slot.name in added:
        numbers[key] = np.zeros([1])  # any one: nobody asked for bins of this blank column
    return {key: _bounds(slots[key], x, data_pass.path) for key, x in numbers.items()}
  raise error


def _of_prepared(path: str, slots: dict[str, config.Slot]) -> dict[str, Json]:
  """Returns the boundaries of bins that a prepared pass has in its meta.json, {key: boundaries}."""
  made = read_meta(path)['schema']['made']
  for slot in slots.values():
    own, wanted = made.get(slot.name, {}) | {'boundaries': None}, slot.made.model_dump()
    if own != wanted:
      raise UserError(
        f"{path}: prepared for another schema: its slot '{slot.name}' is made of {own}, the "
        f'config wants {wanted}; prepare it again'
      )
  return {key: made[slot.name]['boundaries'] for key, slot in slots.items()}


def _numbers(data: config.Data, path: str, slots: dict[str, config.Slot]) -> dict[str, np.ndarray]:
  """Returns {key of `slots`: float64 [m]}, a pass's first MOST_SAMPLES numbers, none missing."""
  parts: dict[str, list[np.ndarray]] = {key: [np.zeros([0])] for key in slots}
  wanted = {
    name: f"slot '{slot.name}'" for slot in slots.values() for name, _ in data.columns_of(slot)
  }
  samples = 0
  with contextlib.closing(blocks_of_pass(data, path, wanted)) as blocks:
    for block in blocks:
      reader = ArrowReader(data, block.columns, len(block.lines))
      for key, slot in slots.items():
        x = reader.of(slot.name).rounded(slot.made.bins)
        parts[key].append(x[~np.isnan(x)])
      samples += len(block.lines)
      if samples >= MOST_SAMPLES:
        break
  return {key: np.concatenate(numbers) for key, numbers in parts.items()}


def _bounds(slot: config.Slot, numbers: np.ndarray, path: str) -> list[float]:
  """Returns the boundaries of a slot's bins, rounded to float32, with as few digits as possible."""
  if not len(numbers):
    raise UserError(
      f"{path}: slot '{slot.name}': found no number in the column '{slot.made.bins}' that bins "
      'could be measured on; wanted some, or boundaries'
    )
  if (bins := slot.made.quantiles) is not None:
    bounds = _quantiles(numbers.astype(np.float32), bins)
  else:
    bounds = np.linspace(numbers.min(), numbers.max(), slot.made.widths + 1)[1:-1]
  return [float(str(bound)) for bound in np.unique(bounds.astype(np.float32))]


def _quantiles(numbers: np.ndarray, bins: int) -> np.ndarray:
  """Returns the boundaries of at most `bins` bins, each with about as many of the numbers.

  A value with more than an equal share of the numbers gets a bin of its own, so the others still
  have many bins if nine in ten numbers are 0.
  """
  values, counts = np.unique(numbers, return_counts=True)
  is_alone = np.zeros(len(values), bool)
  while len(rest := counts[~is_alone]):
    is_frequent = ~is_alone & (counts * (bins - is_alone.sum()) > rest.sum())
    if not is_frequent.any():
      break
    is_alone |= is_frequent
  bounds = values[1:][is_alone[1:] | is_alone[:-1]]
  if len(bounds) >= bins:
    bounds = values[1:][is_alone[1:]]
  if len(rest):
    others, left = np.repeat(values[~is_alone], rest), bins - len(bounds)
    bounds = np.append(bounds, others[np.arange(1, left) * len(others) // left])
  return bounds if len(bounds) else values
