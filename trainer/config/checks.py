"""Checks that involve several sections of the config; a section's class does the other checks."""

from collections.abc import Sequence

from trainer.config.column_checks import Mistakes, made_columns
from trainer.config.export import same_inputs
from trainer.config.layers import BUILT_IN, BuiltIn
from trainer.config.messages import place_of
from trainer.config.metrics import METRICS
from trainer.config.retrieval_checks import retrieval
from trainer.config.schema import Config
from trainer.config.sparse import MAX_FACTORS
from trainer.errors import ConfigError, nearest, short


def check(cfg: Config, where: str, overrides: Sequence[str]) -> None:
  """Checks the values of each section against those of other sections.

  Args:
    where: the file that the config comes from, for messages.
    overrides: strings `a.b=value` of --set, for messages.
  Raises:
    ConfigError: if a check fails; the message describes the first mistake.
  """
  for mistakes in (
    made_columns,
    _tables,
    retrieval,
    _widths,
    _stream,
    _tasks,
    _dense_embedding,
    _histories,
    _metrics,
    _gate,
    _saved_model,
    _counts,
    _modes,
  ):
    for key, text in mistakes(cfg):
      raise ConfigError(f"{place_of(key, where, overrides)}: key '{key}': {text}")


def _tables(cfg: Config) -> Mistakes:
  tables = cfg.sparse.tables
  for i, slot in enumerate(cfg.data.slots):
    if slot.table not in tables:
      wanted = f'wanted a table of sparse.tables{nearest(slot.table, tables)}'
      yield f'data.slots.{i}.table', f"found '{slot.table}'; {wanted}"
  for name in set(tables).difference(slot.table for slot in cfg.data.slots):
    wanted = 'wanted it named by a slot or left out'
    yield f'sparse.tables.{name}', f'no slot uses this table; {wanted}'


def _widths(cfg: Config) -> Mistakes:
  tables, key = cfg.sparse.tables, 'model.interactions'
  widths, fields, of_slots = sorted({table.width for table in tables.values()}), 1, ''
  for kind, layer in _built_in(cfg).values():
    if layer.one_width and len(widths) > 1:
      yield key, f"'{kind}' needs one width for all slots; found widths {widths}"
    if 'field_factors' in layer.needs:
      if len(tables) > 1:
        yield key, f"'{kind}' needs one table; found {sorted(tables)}"
      fields = len(cfg.data.slots)
      of_slots = f', times {fields} slots of {kind},'
  for name, table in tables.items():
    if table.width * fields > MAX_FACTORS:
      found = f'found {table.width}{of_slots} of factors a row'
      yield f'sparse.tables.{name}.width', f'{found}; wanted at most {MAX_FACTORS:,}'


def _built_in(cfg: Config) -> dict[str, tuple[str, BuiltIn]]:
  """Returns {config key: (kind, what its class says)} of the model's built-in layers."""
  layers = cfg.model.all_interactions().items()
  return {key: (i.kind, BUILT_IN[i.kind]) for key, i in layers if i.kind in BUILT_IN}


def _stream(cfg: Config) -> Mistakes:
  if not cfg.data.watch:
    if not cfg.data.train:
      yield 'data.train', 'found []; wanted files, or data.watch set to a directory'
    return
  if cfg.train.epochs != 1:
    yield 'train.epochs', f'found {cfg.train.epochs}; data.watch trains on each pass once'
  if cfg.train.plateau:
    yield 'train.plateau', 'with data.watch there are no epochs to compare; wanted it left out'


def _tasks(cfg: Config) -> Mistakes:
  data, model = cfg.data, cfg.model
  losses = {label.name: label.loss for label in data.labels}
  if model.retrieval is not None:
    return
  if not losses:
    if data.label is None:
      yield 'data.label', 'found null, which is for model.retrieval; wanted the column of the label'
    for key in ('shared', 'tasks'):
      if getattr(model, key):
        yield f'model.{key}', 'is for several tasks; wanted data.labels, or this left out'
    for key in ('label_positive', 'label_negative'):
      if getattr(data, key) is not None and model.loss == 'squared_error':
        yield f'data.{key}', 'makes labels of 0 and 1; wanted a loss for them with it'
    return
  for name in model.tasks:
    if name not in losses:
      yield f'model.tasks.{name}', f'is no name of data.labels{nearest(name, losses)}'
  for name in losses:
    if name not in model.tasks:
      yield 'model.tasks', f"has no '{name}', a name of data.labels; wanted an entry for each"
    if not (model.tasks[name].interactions or model.interactions):
      yield f'model.tasks.{name}', 'has no interactions; wanted at least one'
  for name, task in model.tasks.items():
    if task.given is not None and 'squared_error' in (losses[name], losses[task.given]):
      yield f'model.tasks.{name}.given', "needs probabilities; found loss 'squared_error'"
  if model.loss != 'log_loss':
    yield 'model.loss', f"found '{model.loss}'; wanted the key loss of each of data.labels"
  if (rate := model.negative_sampling_rate) != 1:
    yield 'model.negative_sampling_rate', f'found {rate}; data.labels has several; wanted 1'


def _dense_embedding(cfg: Config) -> Mistakes:
  embedding, interactions = cfg.model.dense_embedding, cfg.model.all_interactions()
  if embedding is None:
    return
  if not cfg.dense_inputs():
    yield 'model.dense_embedding', f"found '{embedding.kind}' without data.dense; wanted columns"
  readers = [kind for kind, layer in BUILT_IN.items() if layer.reads_slot_vectors]
  if not any(i.kind in readers or '.' in i.kind for i in interactions.values()):
    yield 'model.dense_embedding', f'no interaction reads it; wanted one of {", ".join(readers)}'


def _histories(cfg: Config) -> Mistakes:
  for key, (kind, layer) in _built_in(cfg).items():
    if 'histories' in layer.needs and not any(slot.sequence for slot in cfg.data.slots):
      yield key, f"found '{kind}', which reads histories; wanted a slot with `sequence`"


def _metrics(cfg: Config) -> Mistakes:
  """Finds mistakes in train.plateau and in the metric by which the best epoch is chosen."""
  plateau, names = cfg.train.plateau, [label.name for label in cfg.data.labels]
  if plateau and not cfg.data.valid:
    yield 'train.plateau', 'needs data.valid; found no validation files'
  if plateau and plateau.task is not None and plateau.task not in names:
    missing = '' if names else ', which the config lacks'
    wanted = f'wanted a name of data.labels{missing}{nearest(plateau.task, names)}'
    yield 'train.plateau.task', f"found '{plateau.task}'; {wanted}"
  key, metric, retrieval = 'train.plateau.metric', cfg.deciding_metric, cfg.model.retrieval
  if retrieval is None:
    yield from _metric(cfg, key, metric, cfg.deciding_label.loss)
  elif metric not in retrieval.metrics():
    names = ', '.join(map(repr, retrieval.metrics()))
    yield key, f"found '{metric}'; model.retrieval.eval_at has {names}"


def _gate(cfg: Config) -> Mistakes:
  gate = cfg.export.gate
  if gate:
    if not cfg.train.progressive_validation:
      yield 'export.gate', 'needs train.progressive_validation true; found false'
    yield from _metric(cfg, 'export.gate.metric', gate.metric, cfg.labels[0].loss)


def _saved_model(cfg: Config) -> Mistakes:
  if cfg.export.saved_model and (why := same_inputs(cfg.data.log_columns())):
    yield 'export.saved_model', f'found true; {why}'


def _metric(cfg: Config, key: str, metric: str, loss: str) -> Mistakes:
  """Yields a mistake at `key` if `metric` cannot be computed for a label with the loss `loss`."""
  names = [name for name, m in METRICS.items() if m.of_numbers == (loss == 'squared_error')]
  if metric not in names:
    yield key, f"found '{metric}'; the loss '{loss}' has {', '.join(map(repr, names))}"
  elif METRICS[metric].needs_group and not cfg.data.group:
    yield key, f"found '{metric}'; it needs data.group, the column of the user"


def _counts(cfg: Config) -> Mistakes:
  lifecycle = cfg.lifecycle
  by_counts = 'lifecycle.eviction: score' if lifecycle.eviction == 'score' else ''
  if lifecycle.capacity is not None and lifecycle.capacity_by != 'recency':
    by_counts = by_counts or f'lifecycle.capacity_by: {lifecycle.capacity_by}'
  for i, slot in enumerate(cfg.data.slots):
    key = f'data.slots.{i}.counts'
    if not slot.counts:
      continue
    if cfg.model.retrieval is not None:
      yield key, 'found true with model.retrieval, whose towers read no counts; wanted false'
    if cfg.labels[0].loss == 'squared_error':
      yield key, "found true with loss 'squared_error', which has no clicks; wanted false"
    if cfg.train.epochs > 1 and by_counts:
      found = f'found true with {by_counts} and {cfg.train.epochs} epochs'
      why = 'counts begin anew with each epoch, whose first day end would delete what is rare then'
      yield key, f'{found}: {why}; wanted false, one epoch, or another eviction'


def _modes(cfg: Config) -> Mistakes:
  """Finds settings that sync.mode does not support; docs/runbook.md has a table of all modes."""
  schedule, exact = cfg.train.schedule, ('allreduce', 'ps')
  by_steps = *exact, 'ps_async'
  refused = [
    ('data.keep_texts', cfg.data.keep_texts, exact, 'whose workers may leave with their texts'),
    ('train.schedule', schedule and schedule.kind, by_steps, 'whose workers count their own steps'),
  ]
  for i, slot in enumerate(cfg.data.slots):
    why = 'whose workers keep copies of rows without counts'
    refused.append((f'data.slots.{i}.counts', slot.counts, by_steps, why))
  for key, interaction in cfg.model.all_interactions().items():
    if interaction.args.get('batch_norm') == 'sync':
      why = 'where no two workers share a step'
      refused.append((f'{key}.batch_norm', 'sync', exact, why))
  for key, value, modes, why in refused:
    if value and cfg.sync.mode not in modes:
      others = ' or '.join(map(repr, modes))
      found = f"found {short(value)} with sync.mode '{cfg.sync.mode}', {why}"
      yield key, f'{found}; wanted it left out, or mode {others}'
