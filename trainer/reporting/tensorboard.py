"""TensorBoard's files: tensorboard/train, tensorboard/valid and so on, a run each."""

import os
import socket
import time
from collections.abc import Mapping

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.metadata import create_summary_metadata
from tensorboard.plugins.hparams import api as hparams
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from trainer.config import Config, flatten


class TensorBoard:
  """Writes figures for TensorBoard, without TensorFlow's ops, each of which would lose some memory.

  TensorBoard shows a figure of several folders in one card, a curve for each folder.

  Args:
    folder: of the run.
  """

  def __init__(self, folder: str):
    self._folder = folder
    self._writers: dict[str, RecordWriter] = {}

  def describe(self, cfg: Config) -> None:
    """Tells TensorBoard's HParams the settings of the run, so that runs compare."""
    values = {
      key: value if isinstance(value, (bool, int, float)) else str(value)
      for key, value in flatten(cfg.model_dump()).items()
    }
    self._write('', 0, hparams.hparams_pb(values, trial_id=cfg.run_dir))

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    """Shows figures by name; `kind` is the split or the event that they are of."""
    summary = Summary()
    for name, value in values.items():
      summary.MergeFrom(scalar_pb(name, value))
    self._write(kind, step, summary)

  def histograms(self, kind: str, step: int, found: Mapping[str, np.ndarray]) -> None:
    """Shows histograms by name, float64 [n, 3]: left edge, right edge and count of each bin."""
    metadata = create_summary_metadata('', '')
    values = [
      Summary.Value(tag=name, metadata=metadata, tensor=make_tensor_proto(bins))
      for name, bins in found.items()
    ]
    self._write(kind, step, Summary(value=values))

  def _write(self, kind: str, step: int, summary: Summary) -> None:
    event = Event(wall_time=time.time(), step=step, summary=summary)
    self._writer(kind).write(event.SerializeToString())

  def _writer(self, kind: str) -> RecordWriter:
    if kind not in self._writers:
      folder = os.path.join(self._folder, kind)
      os.makedirs(folder, exist_ok=True)
      name = f'events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}'
      # Not TensorBoard's own writer, whose thread ends in a stack trace where the disk is full.
      writer = RecordWriter(open(os.path.join(folder, name), 'ab', buffering=0))
      writer.write(Event(file_version='brain.Event:2').SerializeToString())
      self._writers[kind] = writer
    return self._writers[kind]
