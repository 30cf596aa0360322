"""A process of a parameter-server job that is killed while it starts ends the job, and is named."""

import json

import pytest
import tensorflow as tf

from tests.support import commands, jobs

LOST_SECONDS = 8  # within which busy processors start all processes


@pytest.mark.long
class KilledStartsTest(tf.test.TestCase):
  def test_each_process_at_each_stage(self):
    folder = self.get_temp_dir()
    config = jobs.write_config(folder, sync={'mode': 'ps', 'lost_peer_seconds': LOST_SECONDS})
    ended = commands.run('-m', 'tests.support.killed_starts', config, f'{folder}/jobs')
    self.assertEqual(ended.returncode, 0, ended.stderr)
    cases = [json.loads(line) for line in ended.stdout.splitlines()]
    self.assertLen(cases, 9)
    for stage, killed, statuses, said in cases:
      # ps 0 is looked for at its address; who has met the job is named with its process.
      named = rf'{killed} (\(process \d+ on \S+\) was lost|was lost|at \S+|did not come)'
      with self.subTest(stage=stage, killed=killed):
        self.assertEqual(statuses.pop(killed), -9, said[killed])
        for name, status in statuses.items():
          self.assertEqual(status, 3, f'{name}: {said[name]}')
          self.assertRegex(said[name], named)
          self.assertNotIn('Traceback', said[name])


if __name__ == '__main__':
  tf.test.main()
