"""Trains click models on logs that never end, whose features never stop coming.

A log comes in *passes*, an hour or a day each. A column of it is a *slot* (or field), one value in
a slot a *feature*, found by its *key*. A feature has *shows* and *clicks*, the impressions and
clicks that it was seen with, and a *row*: its linear weight, and after *admission* its *factors*
(the embedding). The process that keeps a row is its *owner*; each owns some of the 256 *logical
shards* of keys.

trainer/run.py starts a job, training/job.py leads it through passes and days, training/step.py is
one step of it; embedding/exchange.py brings rows, model/builder.py the layers.

`trainer.fit`, `trainer.load` and `trainer.Run` are those of trainer.api, `trainer.tune` is that of
trainer.tuning; they are imported when they are asked for.
"""

from typing import Any


def __getattr__(name: str) -> Any:
  if name not in ('fit', 'load', 'Run', 'tune'):
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  if name == 'tune':
    from trainer import tuning

    return tuning.tune
  from trainer import api

  return getattr(api, name)
