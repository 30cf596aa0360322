"""Withholds exports while the model predicts new passes worse than it used to.

The gate judges each pass by predictions that are made before the model trains on the pass
(progressive validation). The model trains on the pass in any case. If the pass fails the check,
nothing is exported until a later pass succeeds; the next delta then has the changes of all passes.
"""

import collections
import math
from collections.abc import Mapping

from trainer import config
from trainer.data.prepared import PreparedPass
from trainer.training.run_state import Progress

# The weight of a new pass in the reference, an exponential moving average over passes. So a lasting
# change of the log becomes normal after some passes, and exports go on.
_RATE = 0.1
# A slot counts as blank if the share of samples that have it falls below this part of its usual
# share.
_BLANK = 0.1


def judge(
  gate: config.Gate,
  progress: Progress,
  values: Mapping[str, float | int | None],
  present: Mapping[str, float],
) -> None:
  """Checks a pass. Sets `progress.withheld` to what is wrong with it; to None if nothing is wrong.

  If the metric is finite and no slot is blank, `progress.gate_reference` moves towards the figures.

  Args:
    values: the metrics of the pass before the model trained on it.
    present: the result of `presence` for the pass.
  """
  value = values[gate.metric]
  if value is None or not math.isfinite(value):
    progress.withheld = f'{gate.metric} is {value}; wanted a finite one'
    return
  usual = progress.gate_reference or {'metric': value, 'present': present}
  for name, share in present.items():
    if share < _BLANK * usual['present'].get(name, 0):
      found = f"slot '{name}' is blank: {share:.2%} of the samples have it"
      progress.withheld = f'{found}; wanted about {usual["present"][name]:.2%}'
      return
  wanted = usual['metric']
  worse = (wanted - value) * config.direction(gate.metric)
  progress.withheld = None
  if worse > gate.tolerance:
    allowed = f'worse by {gate.tolerance:g} at most'
    progress.withheld = f'{gate.metric} is {value:.4f}; wanted {wanted:.4f}, or {allowed}'

  def moved(before: float, now: float) -> float:
    return before + _RATE * (now - before)

  shares = {name: moved(usual['present'].get(name, now), now) for name, now in present.items()}
  progress.gate_reference = {'metric': moved(wanted, value), 'present': shares}


def presence(
  cfg: config.Config, prepared: PreparedPass, most_chunks: int | None = None
) -> dict[str, float]:
  """Returns {slot: share of a pass's samples that have a feature in the slot}.

  It reads at most `most_chunks` chunks of samples, from the first on.
  """
  present, samples = collections.Counter(), 0
  for chunk in range(prepared.num_chunks)[:most_chunks]:
    for i, slot in enumerate(cfg.ordered_slots):
      of_fields, features, _ = prepared.fields(chunk, i)
      present[slot.name] += int(of_fields[features > 0].sum())
    samples += int(of_fields.sum())
  return {slot.name: present[slot.name] / max(samples, 1) for slot in cfg.ordered_slots}
