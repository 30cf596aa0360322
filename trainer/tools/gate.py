"""Withholds exports while the model predicts new passes worse than it used to.

The gate judges each pass by predictions that are made before the model trains on the pass
(progressive validation). The model trains on the pass in any case. If the pass fails the check,
nothing is exported until a later pass succeeds; the next delta then has the changes of all passes.
"""

import math
from collections.abc import Mapping, Sequence

from trainer import config
from trainer.data.prepared import PreparedPass
from trainer.job.pass_meter import presence
from trainer.plain_data import Json
from trainer.reporting.listener import Listener
from trainer.tools.sentences import Finding, found
from trainer.training.run_state import Progress, RunState

# The weight of a new pass in the reference, an exponential moving average over passes. So a lasting
# change of the log becomes normal after some passes, and exports go on.
_RATE = 0.1
# A slot counts as blank if the share of samples that have it falls below this part of its usual
# share.
_BLANK = 0.1


class ExportGate(Listener):
  """Judges each pass by export.gate."""

  def __init__(self, rule: config.Gate, slots: Sequence[config.Slot], state: RunState):
    self._rule, self._slots, self._state = rule, slots, state

  def predicted(self, prepared: PreparedPass, values: Mapping[str, Json]) -> str | None:
    finding = judge(self._rule, self._state.progress, values, presence(self._slots, prepared))
    return finding and finding.sentence


def judge(
  gate: config.Gate,
  progress: Progress,
  values: Mapping[str, Json],
  present: Mapping[str, float],
) -> Finding | None:
  """Checks a pass; returns what is wrong with it, or None.

  `values` are its metrics before the model trained on it, `present` its `presence`. If the metric
  is finite and no slot is blank, `progress.gate_reference` moves towards the figures.
  """
  value = values[gate.metric]
  if value is None or not math.isfinite(value):
    return found('not_finite', gate.metric, value=value)
  usual = progress.gate_reference or {'metric': value, 'present': present}
  for name, share in present.items():
    if share < _BLANK * usual['present'].get(name, 0):
      return found('blank', name, share=share, usual=usual['present'][name])
  wanted = usual['metric']
  worse = (wanted - value) * config.direction(gate.metric)

  def moved(before: float, now: float) -> float:
    return before + _RATE * (now - before)

  shares = {name: moved(usual['present'].get(name, now), now) for name, now in present.items()}
  progress.gate_reference = {'metric': moved(wanted, value), 'present': shares}
  if worse > gate.tolerance:
    return found('fell', gate.metric, value=value, usual=wanted, tolerance=gate.tolerance)
  return None
