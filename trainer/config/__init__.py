"""The configuration: a strict schema, read once from YAML.

`load(path, overrides)` reads a file, `parse` a text. A mistake raises `ConfigError`, whose text is
one line: what is wrong, where (file and key), the value found and the value wanted. Nothing here
imports TensorFlow, so that a mistake is reported before anything slow starts. Each section of the
schema has a file with its keys and their rules; the string under a key is its description.
"""

from ops.row_kinds import row_defaults
from trainer.config.columns import (
  MADE,
  Bins,
  Expression,
  Lookup,
  Made,
  Number,
  Overlap,
  SlotCross,
  Text,
  Time,
  bins_slot,
  column_of,
  cross_slot,
)
from trainer.config.data import DAY_GROUPS, MAX_SLOTS, Data
from trainer.config.defaults import BINS
from trainer.config.export import Export, Gate
from trainer.config.layers import BUILT_IN
from trainer.config.lifecycle import LIFECYCLE_MODES, Lifecycle
from trainer.config.loading import (
  CHECKPOINT_FORMAT,
  GIVEN,
  check_format,
  columns_wanted,
  dump,
  load,
  load_of_run,
  measured_of_run,
  parse,
  refuse_format,
  write_of_run,
)
from trainer.config.messages import place_of, settings_named
from trainer.config.metrics import METRICS, direction
from trainer.config.model import Interaction, Model
from trainer.config.resolve import is_default, resolve, with_given
from trainer.config.retrieval import RANKING_METRICS
from trainer.config.schema import Config
from trainer.config.slots import DenseColumn, Label, Slot
from trainer.config.sparse import WIDTH, RowOptimizer
from trainer.config.sync import Sync
from trainer.config.topic import Topic
from trainer.config.train import BATCH_SIZE, STATIC_EPOCHS, DenseOptimizer, Plateau, Schedule
from trainer.config.yaml_text import flatten
