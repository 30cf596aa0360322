"""What the core asks of the tools.

Each method imports its own tool, so that a mistake in a config is told before TensorFlow loads.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import pandas as pd

  from trainer.config import Config
  from trainer.data.prepared import PreparedPass
  from trainer.evaluation.finished_run import FinishedRun
  from trainer.tools.paired import Scored


class Tools:
  """Judges and explains what the core has trained, or would train; it is `wing('tools')`."""

  def check_mlflow(self) -> None:
    """Raises UserError if MLflow cannot take a run's figures."""
    from trainer.tools import trackers

    trackers.check_mlflow()

  def dry_run(self, cfg: 'Config') -> Iterator[str]:
    """Yields lines that say what a job would read and train."""
    from trainer.tools import dry_run

    return dry_run.tell(cfg)

  def scored(self, run: 'FinishedRun', prepared: Sequence['PreparedPass']) -> 'Scored':
    """Returns a run's predictions as `differences` takes them."""
    from trainer.tools import paired

    return paired.scored(run, prepared)

  def differences(self, first: 'Scored', other: 'Scored') -> 'pd.DataFrame':
    """Returns the result of `Run.compare`."""
    from trainer.tools import paired

    return paired.differences(first, other)

  def importance(self, run: 'FinishedRun', prepared: Sequence['PreparedPass']) -> 'pd.DataFrame':
    """Returns the result of `Run.importance`."""
    from trainer.tools.importance import importance_table

    return importance_table(run.inputs, prepared)

  def write_report(self, run_dir: str, path: str) -> None:
    """Writes the page of a run."""
    from trainer.tools import report

    report.write([run_dir], path)


TOOLS = Tools()
