"""Reads text of libsvm and libffm: a record is a line `label [field:]index:value …`.

In libffm, the column `3` holds the indices of field 3. In libsvm, the column `features` holds all
indices, `qid` the id of the query, and the column `17` the value at index 17, which is 0 where a
record lacks it. The label is the column that `data.label` names. The character # begins a comment.
"""

import functools
import re
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from absl import logging

from trainer import config
from trainer.data.arrays import offsets_of, texts_from
from trainer.data.block import BadRecord, Block
from trainer.data.file_system import WHOLE, Part
from trainer.data.text_blocks import text_blocks
from trainer.errors import UserError

FEATURES, QUERY = 'features', 'qid'


def _lines(raw: bytes) -> pa.Array:
  """Returns the lines of `raw`, which all end in LF, as a string array that need not be UTF-8."""
  ends = np.flatnonzero(np.frombuffer(raw, np.uint8) == ord('\n')) + 1
  return texts_from(raw, np.append([0], ends).astype(np.int32))


def _block(raw: bytes, first_line: int, label: str, wanted: list[str], parts: int) -> Block:
  """Parses lines; a token has 2 `parts` in libsvm (index:value), 3 in libffm."""
  clean = re.sub(rb'#[^\n]*', b'', raw) if b'#' in raw else raw
  words = pc.ascii_split_whitespace(pc.ascii_trim_whitespace(_lines(clean)))
  labels, tokens = pc.list_element(words, 0), pc.list_slice(words, 1)
  line_of = pc.list_parent_indices(tokens).to_numpy()  # of each token
  tokens = tokens.flatten()
  fields = pc.split_pattern(tokens, ':')
  is_wrong = pc.list_value_length(fields).to_numpy() != parts
  good = pc.binary_length(labels).to_numpy() > 0
  good[line_of[is_wrong]] = False
  shape = 'field:index:value' if parts == 3 else 'index:value'

  def text(line: int) -> str:
    return raw.split(b'\n', line + 1)[line].removesuffix(b'\r').decode(errors='replace')

  malformed = []
  lines, firsts = np.unique(line_of[is_wrong], return_index=True)
  for line, token in zip(lines.tolist(), tokens.filter(pa.array(is_wrong)).take(firsts)):
    shown = repr(token.as_buffer().to_pybytes().decode(errors='replace'))
    malformed.append(BadRecord(first_line + line, shown, f'label {shape} …', text(line)))
  keep = good[line_of]
  rows, owner = np.flatnonzero(good), (np.cumsum(good) - 1)[line_of[keep]]
  fields = fields if keep.all() else fields.filter(pa.array(keep))
  # A token belongs to the column of its index in libsvm, of its field in libffm.
  names = pc.list_element(fields, 0).dictionary_encode()
  index, value = pc.list_element(fields, parts - 2), pc.list_element(fields, parts - 1)
  columns = {label: labels.filter(pa.array(good))}
  code_of = {n: i for i, n in enumerate(names.dictionary.view(pa.binary()).to_pylist())}
  codes = names.indices.to_numpy()
  for column in wanted:
    if column in columns:
      continue
    mine = codes == code_of.get(column.encode(), -1)
    if parts == 2 and column == FEATURES:
      mine = codes != code_of.get(QUERY.encode(), -1)
    if parts == 3 or column == FEATURES:
      select = pa.array(mine)
      offsets = offsets_of(np.bincount(owner[mine], minlength=len(rows)))
      columns[column] = pa.MapArray.from_arrays(
        pa.array(offsets), index.filter(select), value.filter(select)
      )
    else:
      at = np.full(len(rows), len(value))
      at[owner[mine]] = np.flatnonzero(mine)
      absent = pa.array([None if column == QUERY else '0'], value.type)
      columns[column] = pa.concat_arrays([value, absent]).take(pa.array(at))
  return Block(columns, first_line + rows, lambda i: text(rows[i]), malformed)


def blocks_of(
  parts: int, path: str, data: config.Data, wanted: dict[str, str], part: Part = WHOLE
) -> Iterator[Callable[[], Block]]:
  """Reads a file in blocks, as `csv_format.blocks` does.

  A token has 2 `parts` in libsvm, index:value, and 3 in libffm, field:index:value.
  """
  known = [data.label, *([FEATURES, QUERY] if parts == 2 else [])]
  for column, key in wanted.items():
    if column not in known and not column.isdigit():
      are = (
        'libffm are the numbers of its fields'
        if parts == 3
        else f"libsvm are '{FEATURES}', '{QUERY}' and the numbers of its indices"
      )
      raise UserError(
        f"{path}: no column '{column}' ({key}): the columns of {are}; wanted one of these as the "
        'column'
      )
  unseen = {column for column in wanted if parts == 2 and column not in known}
  for lines, raw in text_blocks(path, part):
    unseen = {column for column in unseen if not re.search(rf'\s{column}:'.encode(), raw)}
    yield functools.partial(_block, raw, lines.start, data.label, list(wanted), parts)
  if unseen and part == WHOLE:
    told = '%s: no record has the index %s, so it is 0 in all'
    logging.warning(told, path, ', '.join(sorted(unseen)))


blocks = functools.partial(blocks_of, 2)
