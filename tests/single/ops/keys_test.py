"""Keys of columns against TensorFlow's hash, and codes of fields against plain Python."""

import os

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import tensorflow as tf

from ops import keys
from trainer.data.features import hash_keys


def packed(texts):
  """The texts' bytes and offsets."""
  lengths = [len(t) for t in texts]
  return (
    np.frombuffer(b''.join(texts), np.uint8),
    np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
  )


class ColumnKeysTest(tf.test.TestCase):
  def test_texts_of_every_length(self):
    rng = np.random.default_rng(0)
    texts = [bytes(rng.integers(0, 256, n, np.uint8)) for n in range(300) for _ in range(3)]
    texts += [b' a b\t', b'\r\n\v\fx ', 'größe'.encode(), b'x\0y', b'\0']
    want = hash_keys(texts, 2047).numpy()
    want[[not t.strip(b' \t\n\r\v\f') for t in texts]] = keys.NO_FEATURE
    self.assertAllEqual(keys.text_keys(*packed(texts), 2047), want)

  def test_blank_and_none(self):
    self.assertAllEqual(keys.text_keys(*packed([b'', b' \t', b'a']), 1)[:2], [-1, -1])
    self.assertEqual(keys.text_keys(*packed([]), 1).shape, (0,))
    self.assertEqual(keys.integer_keys(np.zeros([0], np.int64), 1).shape, (0,))

  def test_integers(self):
    values = np.array([0, 5, -17, 2**63 - 1, -(2**63)], np.int64)
    self.assertAllEqual(keys.integer_keys(values, 3), hash_keys([str(v) for v in values], 3))

  def test_refuses_offsets_outside(self):
    for offsets in ([], [0, 4], [-1, 2], [2, 1, 3], [0, 2**31 - 1]):
      with self.assertRaisesRegex(ValueError, 'offsets: '):
        keys.text_keys(np.zeros([3], np.uint8), np.array(offsets, np.int32), 1)
    with self.assertRaisesRegex(ValueError, 'slot_id: found 2048'):
      keys.integer_keys(np.zeros([3], np.int64), 2048)


class EncodeFieldsTest(tf.test.TestCase):
  def fields(self, of_keys, values, counts, n):
    """Fields, slot by slot, [F][n], as tuples of (key, value), in plain Python."""
    ends = np.cumsum(counts)
    values = np.ones(len(of_keys), np.float32) if values is None else values
    flat = [
      tuple(zip(of_keys[e - c : e].tolist(), values[e - c : e].tolist()))
      for c, e in zip(counts, ends)
    ]
    return [flat[i : i + n] for i in range(0, len(flat), n)] if n else []

  def check(self, of_keys, values, counts, slots):
    of_slots = None if counts is None else counts.reshape(slots, -1)
    found = keys.encode_fields(of_keys, values, of_slots, slots)
    ones = np.ones(len(of_keys), np.int64) if counts is None else counts
    want = self.fields(of_keys, values, ones, len(ones) // slots)
    distinct = self.fields(
      found.keys, None if values is None else found.values, found.counts, 1
    )  # one a row
    first = np.cumsum(found.fields_of) - found.fields_of
    for f, of_slot in enumerate(want):
      codes = found.codes[:, f].tolist()
      self.assertEqual([distinct[first[f] + code][0] for code in codes], of_slot)
      in_order = list(dict.fromkeys(of_slot))
      self.assertEqual([d[0] for d in distinct[first[f] : first[f] + found.fields_of[f]]], in_order)

  def test_against_plain_python(self):
    rng = np.random.default_rng(0)
    for n in (0, 1, 700):
      self.check(rng.integers(0, 50, n * 3), None, None, 3)
      counts = rng.integers(0, 4, n * 3).astype(np.int32)
      of_keys = rng.integers(0, 5, counts.sum())
      self.check(of_keys, None, counts, 3)
      self.check(of_keys, rng.integers(0, 3, counts.sum()).astype(np.float32), counts, 3)

  def test_without_counts_a_negative_key_is_an_empty_field(self):
    rng = np.random.default_rng(0)
    of_keys = rng.integers(0, 50, 300 * 3)
    of_keys[rng.random(len(of_keys)) < 0.3] = keys.NO_FEATURE
    present = of_keys != keys.NO_FEATURE
    found = keys.encode_fields(of_keys, None, None, 3)
    counts = present.reshape(3, -1).astype(np.int32)
    want = keys.encode_fields(of_keys[present], None, counts, 3)
    for one, other in zip(found, want):
      self.assertAllEqual(one, other)

  def test_tables_of_the_block_before_leave_no_trace(self):
    rng = np.random.default_rng(0)
    for size in (5000, 3, 700):
      self.check(rng.integers(0, size, size * 3), None, None, 3)

  def test_as_many_as_codes_go(self):
    found = keys.encode_fields(np.arange(65536), None, None, 1)
    self.assertAllEqual(found.codes[:, 0], np.arange(65536))

  def test_wrong_arguments_are_refused(self):
    one = np.zeros([1], np.int64)
    for arguments, message in (
      ((np.zeros([65537], np.int64), None, None, 1), 'at most 65536 samples'),
      ((one, np.zeros([1], np.float32), None, 1), 'values: found shape'),
      ((one, np.zeros([2], np.float32), np.array([[1]]), 1), 'values: found shape'),
      ((one, None, np.array([[2]]), 1), 'counts: wanted them >= 0 and their sum 1'),
      ((one, None, np.array([[-1], [2]]), 2), 'counts: wanted'),
    ):
      with self.assertRaisesRegex(tf.errors.InvalidArgumentError, message):
        keys.encode_fields(*arguments)


if __name__ == '__main__':
  tf.test.main()
