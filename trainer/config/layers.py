"""What the built-in layers say of themselves, read from their files: TensorFlow is not imported.

A layer is built in if its class in trainer/model/layers has the attribute `kind`, by which a config
asks for it. The attributes of `BuiltIn` stand beside it, as literals.
"""

import ast
import pathlib
from typing import NamedTuple

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / 'model' / 'layers'


class BuiltIn(NamedTuple):
  """What the class of a built-in layer says of itself."""

  path: str
  """The dotted path of the class."""
  needs: set[str]
  """What it reads of a batch: names of trainer.embedding.layer_inputs.NEEDS."""
  part: str = 'interactions'
  """Where it may stand: in interactions (of tasks, too), shared or dense_embedding."""
  reads_dense: bool = True
  """Whether it reads dense columns."""
  one_width: bool = False
  """Whether all slots must have one width."""

  @property
  def reads_slot_vectors(self) -> bool:
    """Whether it reads slot vectors, and so those of model.dense_embedding."""
    return bool(self.needs & {'factors', 'totals'})


def _built_in() -> dict[str, BuiltIn]:
  found = {}
  for file in sorted(_FOLDER.glob('*.py')):
    for node in ast.parse(file.read_text(encoding='utf-8')).body:
      lines = node.body if isinstance(node, ast.ClassDef) else ()
      given = {line.targets[0].id: line.value for line in lines if isinstance(line, ast.Assign)}
      if 'kind' in given:
        said = {k: ast.literal_eval(given[k]) for k in BuiltIn._fields if k in given}
        path = f'trainer.model.layers.{file.stem}.{node.name}'
        found[ast.literal_eval(given['kind'])] = BuiltIn(path, **said)
  return found


BUILT_IN = _built_in()
