"""The base class of callbacks, which `trainer.fit` calls while it trains."""

from trainer.plain_data import JsonObject


class Callback:
  """A subclass overrides the methods that it needs, as with Keras.

  `logs` is {name of a metric: value}, like an event of metrics.jsonl.
  """

  def on_train_begin(self) -> None:
    """Called when the run_dir is open and the last checkpoint is restored."""

  def on_pass_end(self, name: str, logs: JsonObject) -> None:
    """Called after each pass; `logs` has the metrics of its samples while they were trained."""

  def on_epoch_end(self, epoch: int, logs: JsonObject) -> None:
    """Called after each epoch, counted from 0; `logs` has the metrics of data.valid, if any."""

  def on_train_end(self, logs: JsonObject) -> None:
    """Called after the last epoch; `logs` has the metrics of data.test, if any."""
