"""The section `model.retrieval`: two towers whose vectors find items."""

from typing import Literal

from trainer.config.section import DropoutRate, Positive, PositiveInt, Section
from trainer.errors import ConfigError

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


class QueryTower(ItemTower):
  """The tower that makes the vector of a query: a user, or what is known about a user."""

  slots: list[str]
  """Slots that it reads. A history that `shares` the item's slot reads the items' own rows."""
  encoder: Encoder | None = None
  """What makes a vector of the history among `slots`; null: the slot's `pooling`, by default mean.
  """
  dropout: DropoutRate = 0.0
  """The share of the numbers of the query's vector that a training step sets to 0."""


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
  """Lowers the logit of each negative by the log of how often it is expected among the negatives.
  uniform: as if all items were equally frequent; shows: in proportion to an item's impressions, in
  its row and the pass or, with sampling frequency, to the weight that it is drawn with."""
  logq_positive: bool = False
  """Whether the positive's logit is lowered too, as in earlier work. The positive is not drawn, so
  false is right (arXiv 2507.09331)."""
  leave_out: Literal['positives', 'seen'] = 'positives'
  """What `ctr-predict --k` does not recommend to a user: the items of the user's positives in
  data.train and data.valid, or the items of all its samples there. Evaluation leaves out positives.
  """
  eval_at: list[PositiveInt] = [20]
  """Each K at which data.valid and data.test are judged: recall@K, ndcg@K, hitrate@K, mrr@K."""

  def only_of_items(self) -> set[str]:
    """Returns the names of the slots and dense columns that only the item tower reads."""
    query, item = self.query, self.item
    return {*item.slots, *item.dense} - {*query.slots, *query.dense}

  def metrics(self) -> list[str]:
    """Returns the names of all ranking metrics, such as recall@20."""
    return [f'{name}@{k}' for k in self.eval_at for name in RANKING_METRICS]


def refuse_retrieval(retrieval: Retrieval | None, where: str) -> None:
  """Raises ConfigError if `retrieval` is set, because the command needs a model of clicks.

  Args:
    where: the flag or the run_dir, for the message.
  """
  if retrieval is not None:
    raise ConfigError(f'{where}: found a run with model.retrieval; wanted one of interactions')
