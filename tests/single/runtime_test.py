"""Which GPU a rank takes; no GPU is needed to know."""

import tensorflow as tf

from trainer import runtime
from trainer.errors import UserError


class RuntimeTest(tf.test.TestCase):
  def test_visible_gpu(self):
    self.assertIsNone(runtime.visible_gpu(3, []))
    self.assertEqual([runtime.visible_gpu(r, ['gpu0', 'gpu1']) for r in range(2)], ['gpu0', 'gpu1'])
    with self.assertRaisesRegex(UserError, 'local rank 2 has no GPU: this host has 2'):
      runtime.visible_gpu(2, ['gpu0', 'gpu1'])


if __name__ == '__main__':
  tf.test.main()
