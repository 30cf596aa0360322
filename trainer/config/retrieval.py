"""The section `model.retrieval`: two towers whose vectors find items."""

from typing import Any, Literal

from trainer.config.section import DropoutRate, Positive, PositiveInt, Rules, Section, distinct
from trainer.errors import nearest

# The metrics of a ranking of the whole catalogue; each is computed at every K of eval_at.
RANKING_METRICS = ('recall', 'ndcg', 'hitrate', 'mrr')


class SelfAttention(Section):
  """Encodes a history by causal self-attention, as SASRec does (docs/retrieval.md)."""

  layers: PositiveInt = 1
  """Blocks of attention and a perceptron."""
  heads: PositiveInt = 1
  """Heads of each attention; they divide the width of the history's table."""
  dropout: DropoutRate = 0.2
  """The share of the numbers that a training step sets to 0: of the history's vectors, and of what
  each attention and each perceptron adds."""


class Encoder(Section):
  """How the vectors of a history become one vector."""

  sasrec: SelfAttention
  """Causal self-attention; without an encoder a history is the mean of its vectors."""


class ItemTower(Section):
  """The tower that makes the vector of an item."""

  slots: list[str]
  """Slots that it reads; the first is the item's id, which has one feature a line."""
  dense: list[str] = []
  """Dense columns that it reads."""
  hidden: list[PositiveInt] = []
  """Widths of its perceptron's layers; the last layer is linear, and makes the vector. []: the
  vector is the sum of the slots' vectors, which with one slot is matrix factorisation."""

  def mistakes(self, cfg: Any) -> Rules:
    if not self.slots:
      yield 'slots', 'found []; wanted at least one slot'
    for key in ('slots', 'dense'):
      known = [column.name for column in getattr(cfg.data, key)]
      for i, name in enumerate(getattr(self, key)):
        if name not in known:
          wanted = f'wanted one of data.{key}{nearest(name, known)}'
          yield f'{key}.{i}', f"found '{name}'; {wanted}"
      yield from distinct(key, getattr(self, key))
    if self.dense and not self.hidden:
      yield 'dense', 'wants layers; found hidden []'
    widths = sorted(self.widths(cfg))
    if len(widths) > 1 and not self.hidden:
      yield 'hidden', f'found [], which adds vectors of one width; its slots have {widths}'

  def widths(self, cfg: Any) -> set[int]:
    """Returns the widths of the tables of its slots."""
    tables = {slot.name: slot.table for slot in cfg.data.slots}
    return {cfg.sparse.tables[tables[name]].width for name in self.slots}


class QueryTower(ItemTower):
  """The tower that makes the vector of a query: a user, or what is known about a user."""

  slots: list[str]
  """Slots that it reads. A history that `shares` the item's slot reads the items' own rows."""
  encoder: Encoder | None = None
  """What makes a vector of the history among `slots`; null: the slot's `pooling`, by default mean.
  """
  dropout: DropoutRate = 0.0
  """The share of the numbers of the query's vector that a training step sets to 0."""

  def mistakes(self, cfg: Any) -> Rules:
    yield from super().mistakes(cfg)
    if self.encoder is None:
      return
    histories = [slot for slot in cfg.data.slots if slot.sequence and slot.name in self.slots]
    if len(histories) != 1:
      found = f'found {len(histories)} slots with `sequence` in query.slots'
      yield 'encoder', f'reads one history; {found}'
    (history,), heads = histories, self.encoder.sasrec.heads
    width = cfg.sparse.tables[history.table].width
    if width % heads:
      wanted = f'wanted a divisor of {width}, the width of the table of {history.name}'
      yield 'encoder.sasrec.heads', f'found {heads}; {wanted}'


class Retrieval(Section):
  """A model that finds items: the towers that make vectors of queries and items, and the loss."""

  query: QueryTower
  """Makes the vector of a query."""
  item: ItemTower
  """Makes the vector of an item."""
  similarity: Literal['dot', 'cosine'] = 'cosine'
  """The score of a query and an item, before it is divided by the temperature."""
  temperature: Positive = 0.1
  """τ, what scores are divided by; with dot mostly 1."""
  loss: Literal['sampled_softmax', 'in_batch_softmax', 'bpr', 'nce'] = 'sampled_softmax'
  """What a positive is compared with: in_batch_softmax with the items of the step's other samples,
  the others with items that are drawn from the catalogue."""
  negatives: PositiveInt = 800
  """Items that a step draws from the catalogue, with replacement, one set for all its samples. All
  losses but in_batch_softmax read it."""
  sampling: Literal['uniform', 'frequency'] = 'uniform'
  """How these negatives are drawn: each item alike, or in proportion to 1 + its impressions."""
  own_positives: Literal['step', 'pass'] = 'step'
  """Which items that were right for a user are left out of this user's negatives: those of the
  step on all ranks, or those of the whole pass, which take 8 bytes of memory each on every rank."""
  logq: Literal['none', 'uniform', 'shows'] = 'none'
  """What is subtracted from a negative's logit: the log of how often its item is expected among the
  negatives. Without it, items that come often are pushed too far down. none: nothing; uniform: as
  if each item came equally often; shows: in proportion to an item's impressions, those of its row
  and of the pass, or to 1 + these with sampling frequency."""
  logq_positive: bool = False
  """Whether the positive's logit is lowered too, as in earlier work. The positive is not drawn, so
  false is right (arXiv 2507.09331)."""
  leave_out: Literal['positives', 'seen'] = 'positives'
  """What `ctr-predict --k` does not recommend to a user: the items of the user's positives in
  data.train and data.valid, or the items of all its samples there. Evaluation leaves out positives.
  """
  eval_at: list[PositiveInt] = [20]
  """Each K at which data.valid and data.test are judged: recall@K, ndcg@K, hitrate@K, mrr@K."""

  def mistakes(self, cfg: Any) -> Rules:
    query, item, id_slot = self.query, self.item, cfg.item_slot
    for key in ('slots', 'dense'):
      of_query, of_item = getattr(query, key), getattr(item, key)
      for i, column in enumerate(getattr(cfg.data, key)):
        if column.name not in (*of_query, *of_item):
          wanted = 'wanted it in one, or left out'
          yield f'/data.{key}.{i}', f"no tower reads '{column.name}'; {wanted}"
      for name in of_query:
        if name in of_item:
          found = f"found '{name}', which is of the item that the query is to find"
          yield f'query.{key}', f'{found}; wanted it in one tower'
    if id_slot.separator or id_slot.value_separator or id_slot.shares:
      wanted = 'wanted a slot of its own with one feature a line'
      yield 'item.slots.0', f"found '{id_slot.name}', the item's id; {wanted}"
    if (len(item.slots) > 1 or item.dense) and cfg.data.items is None:
      found = f"reads more than the id '{id_slot.name}'"
      yield 'item', f'{found}; wanted data.items, the table of its columns'
    widths = {
      side: tower.hidden[-1] if tower.hidden else tower.widths(cfg).pop()
      for side, tower in (('query', query), ('item', item))
    }
    if widths['query'] != widths['item']:
      yield '', f'its towers give vectors of the widths {widths}; wanted one width'
    if len(set(self.eval_at)) < max(1, len(self.eval_at)):
      yield 'eval_at', f'found {self.eval_at}; wanted distinct numbers'
    if self.logq != 'none' and self.loss == 'bpr':
      yield 'logq', f"found '{self.logq}'; the loss bpr has no sum to correct"
    if self.logq == 'none' and self.logq_positive:
      yield 'logq_positive', "found true with logq 'none'; wanted uniform or shows"

  def idle(self, cfg: Any) -> Rules:
    if self.loss == 'in_batch_softmax':
      for key in ('negatives', 'sampling', 'own_positives'):
        yield key, 'on in_batch_softmax, which draws nothing'

  def metrics(self) -> list[str]:
    """Returns the names of all ranking metrics, such as recall@20."""
    return [f'{name}@{k}' for k in self.eval_at for name in RANKING_METRICS]
