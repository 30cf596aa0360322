"""The listeners (trainer.reporting.listener) that judge and explain a run while it trains."""

from trainer.config import Config
from trainer.evaluation.task import task_of
from trainer.reporting.listener import Listener
from trainer.tools.advice import Advice
from trainer.tools.closing import Closing
from trainer.tools.drift import Drift
from trainer.tools.gate import ExportGate
from trainer.tools.importance import Importance
from trainer.tools.trackers import Mlflow
from trainer.training.inputs import Inputs
from trainer.training.run_log import RunLog
from trainer.training.run_state import RunState


def listeners(
  cfg: Config, inputs: Inputs, state: RunState, log: RunLog, shown: str
) -> list[Listener]:
  """Returns the listeners that the config asks for; `shown` is the run_dir as the user gave it."""
  return [
    *([ExportGate(cfg.export.gate, cfg.ordered_slots, state)] if cfg.export.gate else ()),
    Advice(cfg, state),
    Drift(cfg, inputs, state, log),
    *([Importance(cfg, inputs, log)] if task_of(cfg).scores_samples else ()),
    Closing(cfg.run_dir, cfg.data.stream, log, shown),
    # uploads what Closing writes
    *([Mlflow(cfg.run_dir, cfg.settings(), log)] if 'mlflow' in cfg.report.to else ()),
  ]
