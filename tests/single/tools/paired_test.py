"""Two runs compared on the same samples, against a bootstrap of pairs."""

import pathlib
import tempfile

import numpy as np
import pandas as pd
import scipy.stats
import tensorflow as tf
from sklearn.metrics import log_loss, roc_auc_score

from tests.support import commands, small
from trainer import api
from trainer.errors import UserError
from trainer.tools.paired import differences


def rmse(y, p, sample_weight):
  return np.sqrt(np.average(np.square(y - p), weights=sample_weight))


class DifferencesTest(tf.test.TestCase):
  def pair(self, n=600, numbers=False):
    """Labels, predictions and weights of two models that agree for the most part."""
    rng = np.random.default_rng(5)
    shared = rng.normal(size=n)
    y, w = rng.random(n) < 1 / (1 + np.exp(1.5 - shared)), rng.integers(0, 3, n)
    noisy = [shared + scale * rng.normal(size=n) for scale in (0.2, 0.6)]
    if numbers:
      return [np.array([shared, p, w], float) for p in noisy]
    return [np.array([y, 1 / (1 + np.exp(1.5 - p)), w], float) for p in noisy]

  def test_intervals_are_those_of_a_bootstrap_of_pairs(self):
    rng = np.random.default_rng(0)
    for numbers, measures in ((False, (roc_auc_score, log_loss)), (True, (rmse,))):
      first, other = self.pair(numbers=numbers)
      table = differences([{('t', numbers): first}], [{('t', numbers): other}])
      self.assertLen(table, len(measures))
      for (_, row), measure in zip(table.iterrows(), measures):
        values = [measure(y, p, sample_weight=w) for y, p, w in (first, other)]
        self.assertAllClose(row[['first', 'other']].astype(float), values)
        draws = []
        for _ in range(400):
          some = rng.integers(0, first.shape[1], first.shape[1])
          one, two = (
            measure(y[some], p[some], sample_weight=w[some]) for y, p, w in (first, other)
          )
          draws.append(two - one)
        ends = [row['low'] - row['difference'], row['high'] - row['difference']]
        self.assertAllClose(ends, 1.96 * np.std(draws) * np.array([-1, 1]), rtol=0.15)
        self.assertAllClose(row['difference'], values[1] - values[0])

  def seeds(self, rng, pairs, samples=200, noise=0.5):
    """Two models of numbers, by pairs of runs; a seed moves the first by some `noise`."""
    y = rng.normal(size=samples)
    sides = []
    for scale in (1, 0):
      errors = rng.normal(size=samples) + scale * noise * rng.normal(size=[pairs, 1])
      sides.append([{('', True): np.stack([y, y + e, np.ones(samples)])} for e in errors])
    return sides

  def test_several_seeds_give_the_interval_of_t_over_samples_and_seeds(self):
    first, other = self.seeds(np.random.default_rng(1), 4)
    ((_, row),) = differences(first, other).iterrows()
    values, influences = [], []
    for side in (first, other):
      errors = np.stack([run['', True][1] - run['', True][0] for run in side])
      roots = np.sqrt(np.mean(errors**2, 1))
      values.append(roots)
      influences.append((errors**2 - roots[:, None] ** 2) / (2 * roots[:, None] * errors.shape[1]))
    gains = values[1] - values[0]
    of_samples = np.sum((influences[1] - influences[0]).mean(0) ** 2)
    of_seeds = gains.var(ddof=1) / 4
    freedom = (of_samples + of_seeds) ** 2 / (of_seeds**2 / 3)
    half = scipy.stats.t.ppf(0.975, freedom) * np.sqrt(of_samples + of_seeds)
    found = row[['first', 'other', 'difference', 'low', 'high']].astype(float)
    gain = gains.mean()
    self.assertAllClose(found, [values[0].mean(), values[1].mean(), gain, gain - half, gain + half])

  def test_the_interval_of_several_seeds_holds_for_the_settings_that_of_one_for_two_states(self):
    truth = -np.mean(np.sqrt(1 + (0.5 * np.random.default_rng(9).normal(size=10**6)) ** 2)) + 1
    rng, covered = np.random.default_rng(2), {1: 0, 4: 0}
    for _ in range(150):
      for pairs in covered:
        ((_, row),) = differences(*self.seeds(rng, pairs)).iterrows()
        covered[pairs] += row['low'] < truth < row['high']
    self.assertGreater(covered[4] / 150, 0.9)
    self.assertLess(covered[1] / 150, 0.8)

  def test_other_samples_are_refused(self):
    first, other = self.pair()
    for wrong in (other[:, 1:], np.roll(other, 1, axis=1)):
      with self.assertRaisesRegex(UserError, 'wanted the same samples'):
        differences([{('t', False): first}], [{('t', False): wrong}])
    with self.assertRaisesRegex(UserError, 'no label that both runs predict'):
      differences([{('t', False): first}], [{('other', False): other}])


class RunsTest(tf.test.TestCase):
  def test_two_runs_compared_in_python_and_in_a_page(self):
    rng, n = np.random.default_rng(0), 900
    frame = pd.DataFrame({'user': rng.integers(0, 9, n), 'item': rng.integers(0, 9, n)})
    frame['click'] = (rng.random(n) < (frame['user'] + 1) / 20).astype(int)
    folder = tempfile.mkdtemp(dir=self.get_temp_dir())
    frame.to_csv(f'{folder}/new.csv', index=False)
    found = []
    for name in ('user', 'item'):
      data = {'label': 'click', 'slots': [{'name': name}]}
      found.append(api.fit(small.tree(data=data), run_dir=f'{folder}/{name}', train=frame))
    table = found[0].compare(found[1], frame)
    y, p, q = frame['click'], *(run.predict(frame) for run in found)
    self.assertEqual(table['metric'].tolist(), ['auc', 'logloss'])
    for measure, (_, row) in zip((roc_auc_score, log_loss), table.iterrows()):
      self.assertAllClose([row['first'], row['other']], [measure(y, p), measure(y, q)])
    self.assertLess(table['high'][0], 0, 'users tell more than items do')
    out, run_dirs = f'{folder}/page.html', [run.run_dir for run in found]
    data = ['--data', f'{folder}/new.csv']
    done = commands.run('-m', 'trainer.cli.report', *run_dirs, *data, '--out', out)
    self.assertEqual(done.returncode, 0, done.stderr)
    page = pathlib.Path(out).read_text(encoding='utf-8').partition('>On the same samples</h2>')[2]
    self.assertIn(f'<td>{table["difference"][0]:.4g}</td>', page)
    done = commands.run('-m', 'trainer.cli.report', run_dirs[0], *data)
    self.assertEqual(done.returncode, 2, done.stderr)
    self.assertIn('error: --data: found one RUN_DIR', done.stderr)
    with self.assertRaisesRegex(UserError, 'compare: found 2 and 1 runs; wanted as many on both'):
      api.compare(found, found[:1], frame)
    twice = api.compare(found[:1] * 2, found[1:] * 2, frame)
    self.assertAllClose(twice[['low', 'high']], table[['low', 'high']])  # the seeds agree
    seeds = '--seeds', '2', '--out', out
    done = commands.run(
      '-m', 'trainer.cli.report', *[d for d in run_dirs for _ in '12'], *data, *seeds
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    page = pathlib.Path(out).read_text(encoding='utf-8').partition('>On the same samples</h2>')[2]
    self.assertIn(f'<td>{table["low"][0]:.4g}</td>', page)
    done = commands.run('-m', 'trainer.cli.report', *run_dirs, *data, *seeds)
    self.assertIn('error: --seeds 2: wanted --data, and so many RUN_DIR of each', done.stderr)


if __name__ == '__main__':
  tf.test.main()
