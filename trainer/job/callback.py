"""The base class of callbacks, which `trainer.fit` calls while it trains."""

from trainer.plain_data import JsonObject


class Callback:
  """Base class of callbacks. As in Keras, a subclass overrides the methods that it needs.

  The argument `logs` of a method holds the fields of an event of metrics.jsonl, {name: value}.
  """

  def on_train_begin(self) -> None:
    """Called once the run_dir is open and the last checkpoint, if any, is restored."""

  def on_pass_end(self, name: str, logs: JsonObject) -> None:
    """Called after each pass; `logs` has its training metrics."""

  def on_epoch_end(self, epoch: int, logs: JsonObject) -> None:
    """Called after each epoch, counted from 0.

    `logs` has the metrics of data.valid; it is empty if data.valid was not evaluated.
    """

  def on_train_end(self, logs: JsonObject) -> None:
    """Called after the last epoch.

    `logs` has the metrics of data.test for the state that the run keeps or, if the config has no
    data.test, those of data.valid. It is empty if the config has neither, or if an earlier start of
    the run had evaluated data.valid.
    """
