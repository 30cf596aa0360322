"""What code of a user may do while `trainer.fit` trains."""

from trainer.plain_data import JsonObject


class Callback:
  """Is called at four moments, as a Keras callback; a subclass defines those that it wants.

  `logs` holds the metrics of the moment by name, as an event of metrics.jsonl does.
  """

  def on_train_begin(self) -> None:
    """The run_dir is open, and the last checkpoint is restored."""

  def on_pass_end(self, name: str, logs: JsonObject) -> None:
    """A pass was trained on; `logs` has the metrics on its samples as they were trained."""

  def on_epoch_end(self, epoch: int, logs: JsonObject) -> None:
    """An epoch, counted from 0, is over; `logs` has the metrics on data.valid, if any."""

  def on_train_end(self, logs: JsonObject) -> None:
    """All epochs are trained; `logs` has the metrics on data.test, if any."""
