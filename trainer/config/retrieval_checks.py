"""Checks of model.retrieval, and of keys that it excludes or requires."""

from trainer.config.column_checks import Mistakes
from trainer.config.schema import Config
from trainer.errors import nearest


def retrieval(cfg: Config) -> Mistakes:
  model, data, of_items = cfg.model, cfg.data, cfg.model.retrieval
  if of_items is None:
    if data.items is not None:
      yield 'data.items', f"found '{data.items}'; model.retrieval alone reads it"
    return
  if model.interactions:
    yield 'model.retrieval', 'found beside model.interactions; wanted either'
  if data.labels or model.tasks or model.shared:
    yield 'model.retrieval', 'found beside several tasks; wanted either'
  if model.dense_embedding:
    yield 'model.dense_embedding', 'found with model.retrieval, which does not read it'
  for key in ('loss', 'label_smoothing', 'negative_sampling_rate'):
    if getattr(model, key) != type(model).model_fields[key].default:
      wanted = 'wanted model.retrieval.loss, or this left out'
      yield f'model.{key}', f'is of models of clicks; {wanted}'
  if data.group is None:
    yield 'data.group', 'found null; model.retrieval wants the column of the user'
  yield from _towers(cfg)
  if len(set(of_items.eval_at)) < max(1, len(of_items.eval_at)):
    yield 'model.retrieval.eval_at', f'found {of_items.eval_at}; wanted distinct numbers'
  if of_items.logq != 'none' and of_items.loss == 'bpr':
    yield 'model.retrieval.logq', f"found '{of_items.logq}'; the loss bpr has no sum to correct"
  if of_items.logq == 'none' and of_items.logq_positive:
    yield 'model.retrieval.logq_positive', "found true with logq 'none'; wanted uniform or shows"
  for key, value, wanted in (
    ('sync.mode', cfg.sync.mode, 'allreduce'),
    ('train.dense_dtype', cfg.train.dense_dtype, 'float32'),
  ):
    if value != wanted:
      yield key, f"found '{value}'; model.retrieval wants '{wanted}'"
  for key, value in (
    ('train.progressive_validation', cfg.train.progressive_validation),
    ('export.saved_model', cfg.export.saved_model),
  ):
    if value:
      yield key, f'found {value}; a model with model.retrieval has none yet; wanted it left out'
  item = of_items.item.slots[0]
  exports = cfg.export.base or cfg.export.delta_every_passes
  if exports and item not in data.keep_texts and data.items is None:
    wanted = f'exports while a run trains name its items: wanted [{item}], or data.items'
    yield 'data.keep_texts', f'found {data.keep_texts}; {wanted}'


def _towers(cfg: Config) -> Mistakes:
  slots, retrieval = {s.name: s for s in cfg.data.slots}, cfg.model.retrieval
  towers = {'query': retrieval.query, 'item': retrieval.item}
  for side, tower in towers.items():
    place = f'model.retrieval.{side}'
    if not tower.slots:
      yield f'{place}.slots', 'found []; wanted at least one slot'
    for key, known in (('slots', list(slots)), ('dense', [c.name for c in cfg.data.dense])):
      for i, name in enumerate(getattr(tower, key)):
        if name not in known:
          wanted = f'wanted one of data.{key}{nearest(name, known)}'
          yield f'{place}.{key}.{i}', f"found '{name}'; {wanted}"
        if getattr(tower, key).count(name) > 1:
          yield f'{place}.{key}', f"the name '{name}' is there twice; wanted distinct names"
  for key in ('slots', 'dense'):
    read = {name for tower in towers.values() for name in getattr(tower, key)}
    for i, column in enumerate(getattr(cfg.data, key)):
      if column.name not in read:
        yield f'data.{key}.{i}', f"no tower reads '{column.name}'; wanted it in one, or left out"
  item = retrieval.item.slots[0]
  if slots[item].separator or slots[item].value_separator or slots[item].shares:
    wanted = 'wanted a slot of its own with one feature a line'
    yield 'model.retrieval.item.slots.0', f"found '{item}', the item's id; {wanted}"
  if (len(retrieval.item.slots) > 1 or retrieval.item.dense) and cfg.data.items is None:
    found = f"reads more than the id '{item}'"
    yield 'model.retrieval.item', f'{found}; wanted data.items, the table of its columns'
  for key in ('slots', 'dense'):
    for name in getattr(retrieval.query, key):
      if name in getattr(retrieval.item, key):
        found = f"found '{name}', which is of the item that the query is to find"
        yield f'model.retrieval.query.{key}', f'{found}; wanted it in one tower'
  histories = [name for name in retrieval.query.slots if slots[name].sequence]
  if retrieval.query.encoder is not None:
    if len(histories) != 1:
      found = f'found {len(histories)} slots with `sequence` in query.slots'
      yield 'model.retrieval.query.encoder', f'reads one history; {found}'
    width = cfg.sparse.tables[slots[histories[0]].table].width
    heads = retrieval.query.encoder.sasrec.heads
    if width % heads:
      wanted = f'wanted a divisor of {width}, the width of the table of {histories[0]}'
      yield 'model.retrieval.query.encoder.sasrec.heads', f'found {heads}; {wanted}'
  widths = {}
  for side, tower in towers.items():
    place = f'model.retrieval.{side}'
    of_slots = {cfg.sparse.tables[slots[name].table].width for name in tower.slots}
    if tower.dense and not tower.hidden:
      yield f'{place}.dense', 'wants layers; found hidden []'
    if len(of_slots) > 1 and not tower.hidden:
      adds = 'which adds vectors of one width'
      yield f'{place}.hidden', f'found [], {adds}; its slots have {sorted(of_slots)}'
    widths[side] = tower.hidden[-1] if tower.hidden else of_slots.pop()
  if widths['query'] != widths['item']:
    yield 'model.retrieval', f'its towers give vectors of the widths {widths}; wanted one width'
