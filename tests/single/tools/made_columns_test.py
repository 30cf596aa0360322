"""Made columns give the same prediction in a run, a live server and the SavedModel; drift."""

import json
import os
import pathlib
import tempfile

import pytest

os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
import numpy as np
import pandas as pd
import tensorflow as tf

from tests.support import commands, random_values, small
from tests.support.scorer import served
from trainer import api
from trainer.reporting.events import read_events
from trainer.serving.memory_store import MemoryStore
from trainer.serving.publisher import Publisher
from trainer.serving.service import Service
from trainer.tools import findings, report
from trainer.tools.runs import read_run

N = int(os.environ.get('N', 200))
SLOTS = [
  {'name': 'user'},
  {'name': 'tags', 'separator': '|'},
  {'name': 'price_bin', 'from': {'bins': 'price', 'quantiles': 5}},
  {'name': 'price_log', 'from': {'bins': 'price', 'log_squared': True}},
  {'name': 'price_x', 'from': {'number': 'price'}},
  {'name': 'cross', 'from': {'cross': ['user', 'tags', 'price_bin']}},
  {'name': 'hour', 'from': {'time': 'ts', 'part': 'hour', 'zone': 'Europe/Berlin'}},
  {'name': 'grams', 'from': {'text': 'user', 'ngrams': 2}},
  {'name': 'kind', 'from': {'lookup': 'user', 'table': 'users.csv', 'value': 'kind'}},
  {'name': 'both', 'from': {'overlap': ['tags', 'liked']}},
  {'name': 'any_bin', 'from': {'bins': 'any', 'boundaries': [-1, 0, 0.7, 1e6]}},
  {'name': 'any_log', 'from': {'bins': 'any', 'log_squared': True}},
  {'name': 'weekday', 'from': {'time': 'at', 'part': 'weekday', 'zone': 'Australia/Lord_Howe'}},
  {'name': 'group', 'from': {'text': 'word', 'match': r'(\w+)[/.]'}},
  {'name': 'low', 'from': {'text': 'word', 'lower': True}},
  {'name': 'first', 'from': {'text': 'word', 'prefixes': [1, 3]}},
  {'name': 'seconds', 'from': {'time': 'when', 'part': 'hour', 'unit': 'seconds'}},
  {'name': 'day_hour', 'from': {'time': 'hh', 'part': 'day', 'unit': 'yyyymmddHH'}},
  {'name': 'last', 'separator': '|', 'shares': 'user', 'sequence': {'max_length': 2}},
]
DENSE = [
  {'name': 'price', 'transform': 'log1p_standardise'},
  {'name': 'twice', 'from': {'expression': 'log(price + 1) * 2'}},
  {'name': 'clipped', 'from': {'expression': 'clip(any / 3, -2, 2) + missing(any)'}},
  {'name': 'hours', 'from': {'expression': '(tick - 1711846800) / 3600'}},
  {'name': 'since', 'from': {'time': 'ts', 'part': 'minutes_since', 'since': 'at'}},
  {'name': 'share', 'from': {'overlap': ['tags', 'liked'], 'of': 'share'}},
  {'name': 'worth', 'from': {'lookup': 'user', 'table': 'users.csv', 'value': 'worth'}},
]


def records(seed, n, price=2.0):
  """Returns samples; `any`, `at` and `word` hold all that numbers, times and texts may be."""
  rng = np.random.default_rng(seed)
  tags = ['', 'a', 'a|b', 'c|a|ü']
  prices = np.exp(rng.normal(price, 1, n)).round(2).astype(str)
  at = pd.Timestamp('2024-03-30') + pd.to_timedelta(rng.integers(0, 200_000, n), 's')
  return pd.DataFrame(
    {
      'user': rng.choice(['u1', 'u2', 'ü3', ' ', '44'], n),
      'tags': rng.choice(tags, n),
      'liked': rng.choice(tags, n),
      'price': np.where(rng.random(n) < 0.1, '', prices),
      'ts': at.strftime('%Y-%m-%dT%H:%M:%S'),
      'any': [v or '' for v in random_values.numbers(rng, n)],
      'when': at.astype('datetime64[s]').astype('int64').astype(str),
      'tick': at.astype('datetime64[s]').astype('int64').astype(str),
      'hh': at.strftime('%Y%m%d%H'),
      'last': rng.choice(['', 'u1', 'ü3|u2'], n),
      'at': [v or '' for v in random_values.iso(rng, n)],
      'word': [v or '' for v in random_values.texts(rng, n)],
      'click': rng.integers(0, 2, n),
    }
  )  # fmt: skip


class MadeColumnsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    table = {'user': ['u1', 'ü3', 44], 'kind': ['x', 'y', ''], 'worth': [1.5, '', '7']}
    pd.DataFrame(table).to_csv(self.folder / 'users.csv', index=False)
    slots = json.loads(json.dumps(SLOTS).replace('users.csv', f'{self.folder}/users.csv'))
    dense = json.loads(json.dumps(DENSE).replace('users.csv', f'{self.folder}/users.csv'))
    data = {'train': [f'{self.folder}/day_*.csv'], 'day_pattern': r'day_(\d)', 'label': 'click'}
    self.tree = small.tree(
      run_dir=str(self.folder / 'run'),
      data=data | {'slots': slots, 'dense': dense},
      sparse={'tables': {'default': {'width': 4}}},
      model={
        'interactions': ['linear', 'fm', {'dnn': {'hidden': [8]}}],
        'dense_embedding': {'piecewise_linear': {'bins': 4}},
      },
      train={'batch_size': 64},
      export={'base': True, 'saved_model': True},
    )

  def test_predicted_served_and_exported_are_one_number(self):
    self.compare()

  @pytest.mark.long
  def test_with_autodis(self):
    self.tree['model']['dense_embedding'] = {'autodis': {'bins': 4}}
    self.tree['data']['slots'] = self.tree['data']['slots'][:2]
    self.compare()

  def compare(self):
    """Compares the predictions of ctr-predict, a server and the SavedModel."""
    records(0, 300).to_csv(self.folder / 'day_1.csv', index=False)
    run = api.fit(self.tree)
    sample = records(1, N).drop(columns='click')
    sample.to_csv(self.folder / 'new.csv', index=False)
    flags = '--data', f'{self.folder}/new.csv', '--out', f'{self.folder}/scores.txt'
    out = commands.run('-m', 'trainer.cli.predict', '--run_dir', run.run_dir, *flags)
    self.assertEqual(out.returncode, 0, out.stderr)
    predicted = np.loadtxt(self.folder / 'scores.txt')
    self.assertGreater(np.std(predicted), 1e-3)

    store = MemoryStore()
    service = Service(store, Publisher(os.path.join(run.run_dir, 'exports'), store).advance)
    service.refresh()
    columns = {name: list(map(str, sample[name])) for name in sample}
    with served(service) as client:
      status, answer = client.predict({'inputs': columns})
      _, text, _ = client.ask('GET', '/v1/models/ctr/metadata')
      example = json.loads(text)['example_request']
      definition = json.loads(text)['metadata']['signature_def']['signature_def']['serving_default']
      dtypes = {name: tensor['dtype'] for name, tensor in definition['inputs'].items()}
      self.assertContainsSubset(example['instances'][0], sample)
      self.assertNotIn(None, example['instances'][0].values())
      self.assertEqual(client.predict(example)[0], 200, example)
    self.assertEqual(status, 200, answer)
    self.assertAllClose(answer['outputs'], predicted, rtol=2e-6)

    (path,) = (self.folder / 'run' / 'exports').glob('saved_model*/*/saved_model.pb')
    signature = tf.saved_model.load(str(path.parent)).signatures['serving_default']
    inputs = {}
    for name, spec in signature.structured_input_signature[1].items():
      values = columns[name]
      self.assertEqual(
        dtypes[name],
        {tf.string: 'DT_STRING', tf.float32: 'DT_FLOAT', tf.float64: 'DT_DOUBLE'}[spec.dtype],
      )
      if spec.dtype != tf.string:
        values = [float(v) if v else np.nan for v in values]
      inputs[name] = tf.constant(values, spec.dtype)
      inputs[name] = tf.reshape(inputs[name], [-1] + [1] * (len(spec.shape) - 1))
    probability = signature(**inputs)['probability']
    # TensorFlow sums in another order, and FM of a number of some hundreds cancels in float32.
    self.assertAllClose(tf.reshape(probability, [-1]), predicted, rtol=2e-6, atol=1e-5)

  def test_drift_of_bins(self):
    for day, price in enumerate((2.0, 2.0, 4.0), 1):
      records(day, 400, price).to_csv(self.folder / f'day_{day}.csv', index=False)
    del self.tree['model']['dense_embedding'], self.tree['export']
    self.tree['train']['epochs'] = 2
    with self.assertLogs(level='WARNING') as logged:
      run = api.fit(self.tree)
    drifts = read_events(run.run_dir).query("event == 'drift'")
    self.assertEqual(drifts['day'].tolist()[:2], [2, 3])
    second, third = (slots['price_bin'] for slots in drifts['slots'][:2])
    self.assertLess(second['psi'], 0.1)
    bounds = run.cfg.data.made['price_bin'].boundaries
    first, last = (pd.read_csv(self.folder / f'day_{day}.csv')['price'] for day in (1, 3))
    places = [np.where(p.isna(), 5, np.searchsorted(bounds, p, 'right')) for p in (first, last)]
    shares = [np.bincount(p, minlength=6) / 400 for p in places]
    self.assertAllClose([third['first'], third['last']], shares, atol=1e-5)
    q, p = (np.maximum(s, 0.5 / 400) for s in shares)
    self.assertAllClose(third['psi'], np.sum((p - q) * np.log(p / q)), rtol=1e-4)
    told = [
      line
      for line in logged.output
      if "bins of slot 'price_bin' have drifted" in line and 'on day 3' in line
    ]
    self.assertLen(told, 1)
    faults = [(fault.code, fault.where) for fault in findings.faults(read_run(run.run_dir))]
    self.assertIn(('drifted', 'price_bin'), faults)
    report.write([run.run_dir], str(self.folder / 'report.html'))
    self.assertIn('Bins of numbers', (self.folder / 'report.html').read_text())


if __name__ == '__main__':
  tf.test.main()
