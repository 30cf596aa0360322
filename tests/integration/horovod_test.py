"""A job of ranks sums its dense gradients by Horovod, once a step, as Horovod itself records it."""

import collections
import json
import pathlib
import tempfile

import tensorflow as tf

from tests.support import jobs


class HorovodTest(tf.test.TestCase):
  def test_the_steps_of_a_default_job_are_in_its_timeline(self):
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    config = jobs.write_config(folder, samples=640, train={'batch_size': 64, 'epochs': 2})
    timeline = pathlib.Path(folder, 'timeline.json')
    with jobs.Ranks(2, ['--config', config, '--run_dir', f'{folder}/run']) as ranks:
      for rank in range(2):
        ranks.start(rank, env={'HOROVOD_TIMELINE': str(timeline)})
      self.assertEqual([ranks.wait(r) for r in range(2)], [0, 0], ranks.output(0))
    tensors, counts = {}, collections.Counter()
    for event in json.loads(timeline.read_text().rstrip().rstrip(',]') + ']'):
      if event.get('name') == 'process_name':
        tensors[event['pid']] = event['args'].get('name', '')
      elif event['ph'] == 'B' and tensors[event['pid']].startswith('sum'):  # of the step's graph
        counts[tensors[event['pid']], event['name']] += 1
    # The bias's gradient, and the loss with its weight and flags: one group, fused.
    self.assertLen({tensor for tensor, _ in counts}, 2)
    for what in 'ALLREDUCE', 'GLOO_ALLREDUCE', 'MEMCPY_IN_FUSION_BUFFER':
      found = [count for (_, name), count in counts.items() if name == what]
      self.assertEqual(found, [20, 20], what)  # two epochs of 10 steps


if __name__ == '__main__':
  tf.test.main()
