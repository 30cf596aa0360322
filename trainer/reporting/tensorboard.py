"""Writes TensorBoard's files, into a folder for each kind: train, valid and so on."""

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

from trainer.plain_data import JsonObject
from trainer.reporting.listener import Listener


class TensorBoard(Listener):
  """Writes metrics for TensorBoard without TensorFlow ops, because calls of them leak memory.

  TensorBoard draws a metric that is in several folders as one card, with a curve for each folder.
  """

  what = 'tensorboard/'

  def __init__(self, run_dir: str, settings: JsonObject):
    self._run_dir, self._settings = run_dir, settings
    self._folder = os.path.join(run_dir, 'tensorboard')
    self._writers: dict[str, RecordWriter] = {}

  def begin(self) -> None:
    """Writes the settings of the run for the HParams tab, which compares runs."""
    settings = self._settings.items()
    values = {k: v if isinstance(v, (bool, int, float)) else str(v) for k, v in settings}
    self._write('', 0, hparams.hparams_pb(values, trial_id=self._run_dir))

  def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
    summary = Summary()
    for name, value in values.items():
      summary.MergeFrom(scalar_pb(name, value))
    self._write(kind, step, summary)

  def histograms(self, kind: str, step: int, histograms: Mapping[str, np.ndarray]) -> None:
    metadata = create_summary_metadata('', '')
    summary = Summary()
    for name, bins in histograms.items():
      summary.value.add(tag=name, metadata=metadata, tensor=make_tensor_proto(bins))
    self._write(kind, step, summary)

  def _write(self, kind: str, step: int, summary: Summary) -> None:
    event = Event(wall_time=time.time(), step=step, summary=summary)
    self._writer(kind).write(event.SerializeToString())

  def _writer(self, kind: str) -> RecordWriter:
    if kind not in self._writers:
      folder = os.path.join(self._folder, kind)
      os.makedirs(folder, exist_ok=True)
      name = f'events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}'
      # TensorBoard's own writer has a thread that ends in a stack trace if the disk is full.
      writer = RecordWriter(open(os.path.join(folder, name), 'ab', buffering=0))
      writer.write(Event(file_version='brain.Event:2').SerializeToString())
      self._writers[kind] = writer
    return self._writers[kind]
