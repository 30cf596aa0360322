"""The loop over the steps of a pass."""

from collections.abc import Callable, Iterator

import numpy as np

from trainer.training.inputs import Inputs
from trainer.training.run_state import RunState
from trainer.training.save_policy import SavePolicy
from trainer.training.step import Staged, StepFlags


def train_in_lockstep(
  inputs: Inputs,
  state: RunState,
  batches: Iterator[Staged],
  *,
  saves: SavePolicy,
  save: Callable[[], None],
  stop_requested: Callable[[], bool],
  on_step: Callable[[], None],
) -> bool:
  """Trains on this rank's batches of a pass until no rank has any left.

  Ranks may have different numbers of batches, and do not agree on a number of steps beforehand. A
  rank without further batches takes part in a step with an empty batch. Each step counts the ranks
  that have another batch. When no rank has one, all ranks stop together. `save` is called at the
  same step on every rank.

  Returns:
    True if all batches were trained on; False if a rank was asked to stop.
  Raises:
    BadPass: on every rank, if the loss or a gradient is not finite.
  """
  communicator, step = inputs.communicator, inputs.step
  current = next(batches, None)
  has_batch = {'first': np.array(current is not None, np.int64)}
  if not communicator.sum_arrays(has_batch)['first']:
    return True
  current = current or step.no_samples
  routed, number = step.route(current), step.steps
  while True:
    following = next(batches, None) if current is not step.no_samples else None
    flags = StepFlags(following is not None, stop_requested(), saves.asks())
    current, last = following or step.no_samples, current
    counts, routed = step.train(last, routed, current, flags)
    state.progress.batch += 1
    number += 1
    on_step()
    if not counts.has_next:
      return True
    if counts.stop:
      return False
    if saves.step_ended(number, is_asked=bool(counts.save)):
      save()
