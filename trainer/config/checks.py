"""The checks that span several keys."""

import math
import re
from collections.abc import Callable
from typing import NoReturn

from trainer.config.data import MAX_SLOTS
from trainer.config.model import INTERACTIONS, SHARED
from trainer.config.retrieval_checks import check_retrieval
from trainer.config.schema import Config
from trainer.config.sparse import MAX_FACTORS
from trainer.config.train import CLIPPING, OPTIMIZER_ARGS, Schedule, of_other_kinds
from trainer.errors import ConfigError, nearest, short


def check(cfg: Config, where: str) -> None:
  """Checks that span several keys."""

  def fail(key: str, text: str) -> NoReturn:
    raise ConfigError(f"{where}: key '{key}': {text}")

  data, names = cfg.data, [s.name for s in cfg.data.slots]
  if not names:
    fail('data.slots', 'found []; wanted at least one slot')
  if len(names) > MAX_SLOTS:
    fail('data.slots', f'found {len(names)} slots; wanted at most {MAX_SLOTS}')
  for what, found in (('data.slots', names), ('data.dense', [d.name for d in data.dense])):
    twice = {n for n in found if found.count(n) > 1}
    if twice:
      fail(what, f"the name '{min(twice)}' is there twice; wanted distinct names")
  for key, columns in (
    ('data.slots', [s.column or s.name for s in data.slots]),
    ('data.dense', [d.name for d in data.dense]),
    ('data.weight', [data.weight]),
    ('data.group', [data.group]),
  ):
    for label in [one.column or one.name for one in data.labels] or [data.label]:
      if label is not None and label in columns:
        fail(key, f"found '{label}', which is a label: the model would read what it predicts")
  by_name = {s.name: s for s in data.slots}
  for i, s in enumerate(data.slots):
    if s.table not in cfg.sparse.tables:
      fail(
        f'data.slots.{i}.table',
        f"found '{s.table}'; wanted a table of sparse.tables" + nearest(s.table, cfg.sparse.tables),
      )
    if s.shares is not None:
      if s.shares not in by_name or s.shares == s.name:
        fail(
          f'data.slots.{i}.shares',
          f"found '{s.shares}'; wanted another slot" + nearest(s.shares, set(names) - {s.name}),
        )
      if by_name[s.shares].shares:
        fail(
          f'data.slots.{i}.shares',
          f"'{s.shares}' itself shares '{by_name[s.shares].shares}'; wanted a slot with features "
          'of its own',
        )
      if by_name[s.shares].table != s.table:
        fail(
          f'data.slots.{i}.table',
          f"found '{s.table}'; wanted '{by_name[s.shares].table}', the table of '{s.shares}', "
          'which it shares',
        )
    if s.sequence and s.shares is None:
      fail(f'data.slots.{i}.shares', "found null; a sequence wants its candidate's slot")
    if s.sequence and s.value_separator:
      fail(f'data.slots.{i}.value_separator', 'a sequence has no values; wanted null')
    if s.value_separator and not s.separator and s.value_separator == data.delimiter:
      fail(
        f'data.slots.{i}.value_separator',
        f'found {s.value_separator!r}, which is data.delimiter; wanted another character',
      )
  for name in cfg.sparse.tables:
    if not any(s.table == name for s in data.slots):
      fail(
        f'sparse.tables.{name}', 'no slot uses this table; wanted it named by a slot or left out'
      )
  for name, table in cfg.sparse.tables.items():
    if cfg.sparse.store == 'tfra' and 'catch_up' in (table.linear.l2_mode, table.factors.l2_mode):
      fail(
        f'sparse.tables.{name}',
        "l2_mode 'catch_up' wants sparse.store 'rows'; found 'tfra', which takes no step on rows "
        'outside the batch',
      )
    if table.dtype == 'bfloat16' and cfg.sparse.store == 'tfra':
      fail(
        f'sparse.tables.{name}.dtype',
        "found 'bfloat16', which wants sparse.store 'rows', not 'tfra'",
      )
  if not data.train and not data.watch:
    fail('data.train', 'found []; wanted files, or data.watch set to a directory')
  if data.watch:
    if cfg.train.epochs != 1:
      fail('train.epochs', f'found {cfg.train.epochs}; with data.watch each pass is trained once')
    if cfg.train.plateau:
      fail('train.plateau', 'with data.watch there are no epochs to compare; wanted it left out')
  if data.close_day_after_hours is not None and data.day_pattern is None:
    fail('data.close_day_after_hours', 'needs data.day_pattern, which says what a day is')
  if data.max_days_ahead is not None and data.day_pattern is None:
    fail('data.max_days_ahead', 'needs data.day_pattern, which says what a day is')
  if data.late != 'train' and data.day_pattern is None:
    fail('data.late', f"found '{data.late}'; it needs data.day_pattern, which says what is late")
  if data.day_pattern is not None:
    try:
      groups = re.compile(data.day_pattern).groups
    except re.error as e:
      fail('data.day_pattern', f'found {data.day_pattern!r}; wanted a regular expression ({e})')
    if groups < 1:
      fail(
        'data.day_pattern',
        f'found {data.day_pattern!r}; wanted a group in parentheses that holds the day',
      )
  _check_tasks(cfg, fail)
  interactions = cfg.model.all_interactions()
  shared = interactions.pop('model.shared', None)
  kinds = [t.kind for t in interactions.values()]
  if cfg.model.retrieval is not None:
    check_retrieval(cfg, fail)
  elif data.label is None:
    fail('data.label', 'found null, which is for model.retrieval; wanted the column of the label')
  elif not kinds:
    fail('model.interactions', 'found []; wanted at least one interaction')
  for key, kind in [(key, t.kind) for key, t in interactions.items()]:
    if kind not in INTERACTIONS and '.' not in kind:
      fail(
        key,
        f"unknown interaction '{kind}'"
        + nearest(kind, INTERACTIONS)
        + ', or give the dotted path of a Keras layer',
      )
    if kind == 'din' and not any(s.sequence for s in data.slots):
      fail(key, "found 'din', which reads histories; wanted a slot with `sequence`")
    if kind == 'tower' and shared is None:
      fail(key, "found 'tower', which reads model.shared; wanted that set, or 'dnn'")
  if shared is not None and shared.kind not in SHARED and '.' not in shared.kind:
    fail(
      'model.shared',
      f"unknown layer '{shared.kind}'"
      + nearest(shared.kind, SHARED)
      + ', or give the dotted path of a Keras layer',
    )
  widths = {s.name: cfg.sparse.tables[s.table].width for s in data.slots}
  for kind in ('fm', 'fwfm', 'ffm', 'dlrm'):
    if kind in kinds and len(set(widths.values())) > 1:
      fail(
        'model.interactions',
        f"'{kind}' needs one width for all slots; found widths {sorted(set(widths.values()))}",
      )
  factors = len(data.slots) if 'ffm' in kinds else 1
  for name, table in cfg.sparse.tables.items():
    if table.width * factors > MAX_FACTORS:
      of_slots = f', times {factors} slots of ffm,' if factors > 1 else ''
      fail(
        f'sparse.tables.{name}.width',
        f'found {table.width}{of_slots} of factors a row; wanted at most {MAX_FACTORS:,}',
      )
  if 'ffm' in kinds and len(cfg.sparse.tables) > 1:
    fail('model.interactions', f"'ffm' needs one table; found {sorted(cfg.sparse.tables)}")
  gate = cfg.export.gate
  if gate and not cfg.train.progressive_validation:
    fail('export.gate', 'needs train.progressive_validation true; found false')
  if gate and gate.metric == 'gauc' and not data.group:
    fail('export.gate.metric', "found 'gauc'; it needs data.group, the column of the user")
  loss = cfg.labels[0].loss
  if gate and (gate.metric == 'rmse') != (loss == 'squared_error'):
    fail(
      'export.gate.metric',
      f"found '{gate.metric}'; the loss '{loss}' has "
      + ('rmse' if loss == 'squared_error' else 'auc, gauc and logloss'),
    )
  _check_schedule(cfg, fail)
  if cfg.train.plateau and not data.valid:
    fail('train.plateau', 'needs data.valid; found no validation files')
  if cfg.train.plateau and cfg.train.plateau.task is not None:
    names = [label.name for label in data.labels]
    if cfg.train.plateau.task not in names:
      fail(
        'train.plateau.task',
        f"found '{cfg.train.plateau.task}'; wanted a name of data.labels"
        + nearest(cfg.train.plateau.task, names),
      )
  loss = cfg.deciding_label.loss
  metrics, of = (
    ['rmse'] if loss == 'squared_error' else ['auc', 'gauc', 'logloss'],
    f"loss '{loss}'",
  )
  if cfg.model.retrieval is not None:
    metrics, of = cfg.model.retrieval.metrics(), 'model.retrieval.eval_at'
  if cfg.deciding_metric not in metrics:
    fail(
      'train.plateau.metric',
      f"found '{cfg.deciding_metric}'; the {of} has {', '.join(map(repr, metrics))}",
    )
  if cfg.deciding_metric == 'gauc' and not data.group:
    fail('train.plateau.metric', "found 'gauc'; it needs data.group, the column of the user")
  if cfg.sync.dense_allreduce == 'connections' and cfg.sync.row_exchange == 'horovod':
    fail(
      'sync.row_exchange',
      "found 'horovod' with sync.dense_allreduce 'connections'; wanted 'connections' for rows too, "
      "or 'horovod' for both",
    )
  if cfg.sync.ports and cfg.sync.ports[0] > cfg.sync.ports[1]:
    fail('sync.ports', f'found {list(cfg.sync.ports)}; wanted [first, last] with first <= last')
  optimizer = cfg.train.dense_optimizer
  valid = (*OPTIMIZER_ARGS[optimizer.kind], *CLIPPING)
  for name, value in optimizer.args.items():
    key = f'train.dense_optimizer.args.{name}'
    if name not in valid:
      raise ConfigError(
        f"{where}: unknown key '{key}'{of_other_kinds(name, optimizer.kind, valid)}"
      )
    if not isinstance(value, (int, float)) or not abs(value) < math.inf:
      fail(key, f'found {short(value)}; wanted a finite number')
    if name in ('beta_1', 'beta_2', 'momentum', 'rho') and not 0 <= value < 1:
      fail(key, f'found {short(value)}; wanted a number >= 0 and < 1')
    if value < 0 and name != 'learning_rate_power':
      fail(key, f'found {short(value)}; wanted a number >= 0')
    if value > 0 and name == 'learning_rate_power':
      fail(key, f'found {short(value)}; wanted a number <= 0')


def _check_tasks(cfg: Config, fail: Callable[[str, str], NoReturn]) -> None:
  """Checks the labels and model.tasks; `fail(key, text)` raises."""
  data, model = cfg.data, cfg.model
  for i, label in enumerate(cfg.labels):
    place = f'data.labels.{i}.' if data.labels else 'data.label_'
    for key, pattern in (('positive', label.positive), ('negative', label.negative)):
      if pattern is None:
        continue
      if label.loss == 'squared_error':
        fail(f'{place}{key}', 'makes labels of 0 and 1; wanted a loss for them with it')
      try:
        re.compile(pattern)
      except re.error as e:
        fail(f'{place}{key}', f'found {pattern!r}; wanted a regular expression ({e})')
  names = [label.name for label in data.labels]
  if not names:
    for key in ('shared', 'tasks'):
      if getattr(model, key):
        fail(f'model.{key}', 'is for several tasks; wanted data.labels, or this left out')
    return
  if len(names) < 2:
    fail('data.labels', f'found {names}; wanted at least two, or the one as data.label')
  of_one = (data.label, data.label_positive, data.label_negative)
  if of_one != ('label', None, None):
    fail('data.labels', 'found beside the keys of data.label; wanted either')
  for name in names:
    if not re.fullmatch(r'[A-Za-z]\w*', name, re.ASCII):
      fail('data.labels', f"found the name '{name}'; wanted letters, digits and underscores alone")
    if names.count(name) > 1:
      fail('data.labels', f"the name '{name}' is there twice; wanted distinct names")
  for name in model.tasks:
    if name not in names:
      fail(f'model.tasks.{name}', 'is no name of data.labels' + nearest(name, names))
  for name in names:
    if name not in model.tasks:
      fail('model.tasks', f"has no '{name}', a name of data.labels; wanted an entry for each")
    if not (model.tasks[name].interactions or model.interactions):
      fail(f'model.tasks.{name}', 'has no interactions; wanted at least one')
  shares = [label.click or 0.0 for label in data.labels]
  if sum(shares) > 1 + 1e-6:
    fail('data.labels', f'found click {shares}; wanted shares that sum to at most 1')
  losses = {label.name: label.loss for label in data.labels}
  for name, task in model.tasks.items():
    seen = [name]
    while (given := model.tasks[seen[-1]].given) is not None:
      key = f'model.tasks.{seen[-1]}.given'
      if given not in names:
        fail(key, f"found '{given}'; wanted another task" + nearest(given, set(names) - set(seen)))
      if given in seen:
        cycle = ' → '.join([*seen[seen.index(given) :], given])
        fail(key, f'found a cycle, {cycle}; wanted one of these tasks without `given`')
      seen.append(given)
    if task.given is not None and 'squared_error' in (losses[name], losses[task.given]):
      fail(f'model.tasks.{name}.given', "wants probabilities; found loss 'squared_error'")
  if model.loss != 'log_loss':
    fail('model.loss', f"found '{model.loss}'; with data.labels the loss is a key of each label")
  if model.negative_sampling_rate != 1:
    fail(
      'model.negative_sampling_rate',
      f'found {model.negative_sampling_rate}; with data.labels it is not known of which label; '
      'wanted 1',
    )


def _check_schedule(cfg: Config, fail: Callable[[str, str], NoReturn]) -> None:
  """Checks of train.schedule; `fail(key, text)` raises."""
  schedule = cfg.train.schedule
  if schedule is None:
    return
  if schedule.kind != 'constant' and schedule.period is None:
    fail(
      'train.schedule.period',
      f"found null with kind '{schedule.kind}'; wanted the steps of a fall (trainer.run --dry_run "
      'tells how many an epoch has)',
    )
  for name, kinds in (
    ('period', ('cosine', 'step')),
    ('factor', ('step',)),
    ('floor', ('cosine',)),
  ):
    default = Schedule.model_fields[name].default
    if getattr(schedule, name) != default and schedule.kind not in kinds:
      fail(
        f'train.schedule.{name}', f"does nothing with kind '{schedule.kind}'; wanted it left out"
      )
  if cfg.sync.mode == 'ps_geo':
    fail(
      'train.schedule',
      "found with sync.mode 'ps_geo', whose workers each count their own steps; wanted it left "
      "out, or mode 'ps' or 'ps_async'",
    )
