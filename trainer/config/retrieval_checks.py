"""The checks of model.retrieval."""

from collections.abc import Callable
from typing import NoReturn

from trainer.config.retrieval import ItemTower
from trainer.config.schema import Config
from trainer.errors import nearest

Fail = Callable[[str, str], NoReturn]


def check_retrieval(cfg: Config, fail: Fail) -> None:
  """Checks a config that has model.retrieval; `fail(key, text)` raises."""
  model, data, retrieval = cfg.model, cfg.data, cfg.model.retrieval
  if model.interactions:
    fail('model.retrieval', 'found beside model.interactions; wanted either')
  if data.labels or model.tasks or model.shared:
    fail('model.retrieval', 'found beside several tasks; wanted either')
  if model.dense_embedding:
    fail('model.dense_embedding', 'found with model.retrieval, which does not read it; wanted null')
  for key in ('loss', 'label_smoothing', 'negative_sampling_rate'):
    if getattr(model, key) != type(model).model_fields[key].default:
      fail(f'model.{key}', 'is of models of clicks; wanted model.retrieval.loss, or this left out')
  if data.group is None:
    fail('data.group', 'found null; model.retrieval wants the column of the user')
  _check_towers(cfg, fail)
  if len(set(retrieval.eval_at)) < max(1, len(retrieval.eval_at)):
    fail('model.retrieval.eval_at', f'found {retrieval.eval_at}; wanted distinct numbers')
  if retrieval.logq != 'none' and retrieval.loss == 'bpr':
    fail('model.retrieval.logq', f"found '{retrieval.logq}'; the loss bpr has no sum to correct")
  if retrieval.logq == 'none' and retrieval.logq_positive:
    fail('model.retrieval.logq_positive', "found true with logq 'none'; wanted logq uniform, shows")
  if cfg.sync.mode != 'allreduce':
    fail('sync.mode', f"found '{cfg.sync.mode}'; model.retrieval wants 'allreduce'")
  if cfg.train.dense_dtype != 'float32':
    fail('train.dense_dtype', f"found '{cfg.train.dense_dtype}'; model.retrieval wants 'float32'")
  for key, value in (
    ('train.progressive_validation', cfg.train.progressive_validation),
    ('export.saved_model', cfg.export.saved_model),
  ):
    if value:
      fail(key, f'found {value}; a model with model.retrieval has none yet; wanted it left out')
  item = retrieval.item.slots[0]
  exports = cfg.export.base or cfg.export.delta_every_passes
  if exports and item not in data.keep_texts:
    fail(
      'data.keep_texts',
      f'found {data.keep_texts}; exports while a run trains name its items: wanted [{item}]',
    )


def _check_towers(cfg: Config, fail: Fail) -> None:
  slots, retrieval = {s.name: s for s in cfg.data.slots}, cfg.model.retrieval
  towers = {'query': retrieval.query, 'item': retrieval.item}
  for side, tower in towers.items():
    place = f'model.retrieval.{side}'
    if not tower.slots:
      fail(f'{place}.slots', 'found []; wanted at least one slot')
    for key, known in (('slots', list(slots)), ('dense', [c.name for c in cfg.data.dense])):
      for i, name in enumerate(getattr(tower, key)):
        if name not in known:
          fail(
            f'{place}.{key}.{i}', f"found '{name}'; wanted one of data.{key}{nearest(name, known)}"
          )
        if getattr(tower, key).count(name) > 1:
          fail(f'{place}.{key}', f"the name '{name}' is there twice; wanted distinct names")
  for key in ('slots', 'dense'):
    read = {name for tower in towers.values() for name in getattr(tower, key)}
    for i, column in enumerate(getattr(cfg.data, key)):
      if column.name not in read:
        fail(f'data.{key}.{i}', f"no tower reads '{column.name}'; wanted it in one, or left out")
  item = retrieval.item.slots[0]
  if slots[item].separator or slots[item].value_separator or slots[item].shares:
    fail(
      'model.retrieval.item.slots.0',
      f"found '{item}', the item's id; wanted a slot of its own with one feature a line",
    )
  if item in retrieval.query.slots:
    fail('model.retrieval.query.slots', f"found '{item}', which the query is to find")
  if len(retrieval.item.slots) > 1 or retrieval.item.dense:
    fail(
      'model.retrieval.item', 'reads more than the id, which it cannot yet; wanted its slot alone'
    )
  histories = [name for name in retrieval.query.slots if slots[name].sequence]
  if retrieval.query.encoder is not None:
    if len(histories) != 1:
      fail(
        'model.retrieval.query.encoder',
        f'reads one history; found {len(histories)} slots with `sequence` in query.slots',
      )
    width = cfg.sparse.tables[slots[histories[0]].table].width
    heads = retrieval.query.encoder.sasrec.heads
    if width % heads:
      fail(
        'model.retrieval.query.encoder.sasrec.heads',
        f'found {heads}; wanted a divisor of {width}, the width of the table of {histories[0]}',
      )
  widths = {name: _width(cfg, tower, name, fail) for name, tower in towers.items()}
  if widths['query'] != widths['item']:
    fail('model.retrieval', f'its towers give vectors of the widths {widths}; wanted one width')


def _width(cfg: Config, tower: ItemTower, name: str, fail: Fail) -> int:
  """Returns the width of a tower's vectors."""
  if tower.hidden:
    return tower.hidden[-1]
  if tower.dense:
    fail(f'model.retrieval.{name}.dense', 'wants layers; found hidden []')
  tables = {s.name: s.table for s in cfg.data.slots}
  widths = {cfg.sparse.tables[tables[slot]].width for slot in tower.slots}
  if len(widths) > 1:
    fail(
      f'model.retrieval.{name}.hidden',
      f'found [], which adds vectors of one width; its slots have {sorted(widths)}',
    )
  return widths.pop()
