"""The kit of tests/gpu, as far as it needs no GPU: its parts, and what check.py would run."""

import pathlib
import struct
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.gpu import check, parts

PTX, CUBIN = 1, 2


def fatbin(*entries):
  """The bytes of a fatbin of (kind, architecture, payload) entries."""
  packed = b''.join(
    struct.pack('<HHIQ', kind, 0x101, 64, len(payload)).ljust(28, b'\0')
    + struct.pack('<I', architecture).ljust(36, b'\0')
    + payload
    for kind, architecture, payload in entries
  )
  return struct.pack('<IHHQ', 0xBA55ED50, 1, 16, len(packed)) + packed


class GpuKitTest(tf.test.TestCase):
  def packed(self):
    """A file and a folder with its parts, one for each chunk."""
    root = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    source = root / 'kit.tar'
    source.write_bytes(np.random.default_rng(0).bytes(2500))
    with mock.patch.multiple(parts, CHUNK=1000, LIMIT=1200):
      parts.split(str(source), str(root / 'parts'))
    return source.read_bytes(), root / 'parts'

  def test_parts_join_to_what_was_split(self):
    data, folder = self.packed()
    self.assertLen(list(folder.glob('part-*')), 3)
    self.assertEqual(b''.join(parts.join(str(folder))), data)

  def test_join_names_the_parts_that_are_missing_or_damaged(self):
    _, folder = self.packed()
    (folder / 'part-00').unlink()
    (folder / 'part-02').write_bytes(b'cut short')
    with self.assertRaisesRegex(SystemExit, r'2 of 3 .*part-00 \(missing\), part-02 \(damaged\)'):
      next(parts.join(str(folder)))

  def test_thin_keeps_what_the_architecture_runs(self):
    path = f'{self.get_temp_dir()}/library.so'
    compiled = fatbin((CUBIN, 80, b'other'), (CUBIN, 90, b'own'), (PTX, 90, b'needless'))
    to_compile = fatbin((PTX, 80, b'older'), (PTX, 100, b'newer'), (CUBIN, 80, b'other'))
    pathlib.Path(path).write_bytes(b'ELF' + compiled + b'between' + to_compile)
    parts.thin(path)
    data = pathlib.Path(path).read_bytes()
    self.assertLen(data, 10 + len(compiled) + len(to_compile))
    for kept in (b'own', b'older', b'between'):
      self.assertIn(kept, data)
    for gone in (b'other', b'needless', b'newer'):
      self.assertNotIn(gone, data)

  def test_the_plan_keeps_the_order_of_stages(self):
    self.assertEqual([list(stage) for stage in check.STAGES], check.plan(''))
    self.assertEqual(check.plan('speed,demo'), [['demo'], ['speed']])
    with self.assertRaisesRegex(SystemExit, '--only: found tea; wanted some of devices'):
      check.plan('tea')


if __name__ == '__main__':
  tf.test.main()
