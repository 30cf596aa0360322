"""What the core knows by name alone: a wing is imported where a config or a command asks for it.

The core has the interface of each, and imports none of them.
"""

import importlib
from typing import Any

_PLACES: dict[str, str] = {
  # What judges and explains a run while it trains: trainer.reporting.listener.Listener.
  'listeners': 'trainer.tools.listeners:listeners',
  # Runs this process's part of a job on parameter servers.
  'servers': 'trainer.parameter_server.start:train',
  # Of a config with model.retrieval: its model (trainer.model.builder.build), and its task
  # (trainer.evaluation.task.Task). In serving: what finds items, and what answers for them.
  'retrieval.model': 'trainer.retrieval.model:build_retrieval',
  'retrieval.task': 'trainer.retrieval.task:RetrievalTask',
  'retrieval.search': 'trainer.retrieval.item_search:search_after',
  'retrieval.recommender': 'trainer.retrieval.recommend:Recommender',
  'topic_parts': 'trainer.topics.topic:parts',
  'topic_passes': 'trainer.topics.topic_passes:TopicPasses',
  'topic_store': 'trainer.topics.topic_store:TopicStore',
  # What judges and explains a run that the core has trained, or would train.
  'tools.check_mlflow': 'trainer.tools.trackers:check_mlflow',
  'tools.differences': 'trainer.tools.paired:differences',
  'tools.dry_run': 'trainer.tools.dry_run:tell',
  'tools.importance': 'trainer.tools.importance:importance_table',
  'tools.report': 'trainer.tools.report:write',
  'tools.scored': 'trainer.tools.paired:scored',
}


def wing(name: str) -> Any:
  """Returns the object of a name in `_PLACES`."""
  module, _, attribute = _PLACES[name].partition(':')
  return getattr(importlib.import_module(module), attribute)
