"""trainer.fit, and what a run answers on frames."""

import contextlib
import importlib
import inspect
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import tensorflow as tf

import trainer
from tests.support import commands, small
from trainer import api
from trainer.errors import UserError
from trainer.tools import findings
from trainer.tools.runs import read_run


def log(samples):
  rng = np.random.default_rng(0)
  ids = rng.integers(20, size=samples)
  return pd.DataFrame(
    {'click': (rng.random(samples) < 0.1 + 0.5 * (ids < 5)).astype(int), 'user': ids}
  )


def ask_to_stop():
  if callable(signal.getsignal(signal.SIGTERM)):  # a job trains
    os.kill(os.getpid(), signal.SIGTERM)


class Stopping(tf.keras.layers.Layer):
  """An interaction that asks for a stop in each step."""

  needs = ('linear',)

  def call(self, inputs, training=False):
    with tf.control_dependencies([tf.py_function(ask_to_stop, [], [])]):
      return tf.reduce_sum(inputs.linear, 1, keepdims=True)


class ApiTest(tf.test.TestCase):
  def fit(self, frame, **data):
    folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    header = data.get('columns') is None
    frame.to_csv(folder / 'log.csv', index=False, header=header, sep=data.get('delimiter', ','))
    data |= {'train': [f'{folder}/log.csv'], 'label': 'click'}
    data.setdefault('slots', [{'name': 'user'}])
    return api.fit(small.tree(data=data), run_dir=f'{folder}/run'), str(folder / 'log.csv')

  def test_a_frame_is_answered_as_its_file_is(self):
    run, path = self.fit(log(1000))
    frame = pd.read_csv(path)
    by_file = run.predict(path)
    self.assertAllEqual(run.predict(frame), by_file)
    self.assertAllEqual(run.predict(frame[['user']]), by_file)
    self.assertAllEqual(api.load(run.run_dir).predict(frame.astype(str)), by_file)
    figures = run.evaluate(frame)
    self.assertEqual(figures['auc'], run.evaluate(path)['auc'])
    shown = f'auc {figures["auc"]:.4g}  logloss {figures["logloss"]:.4g}  calibration '
    self.assertStartsWith(repr(figures), shown)
    self.assertRegex(repr(figures), r'\nalso: .*deciles.*slots$')
    of_tasks = api.Figures(
      {'auc': 0.7, 'gauc': None, 'tasks': {'buy': {'auc': 0.6, 'base_logloss': 0.3}}}
    )
    self.assertEqual(repr(of_tasks), 'auc 0.7\nbuy: auc 0.6  base_logloss 0.3\nalso: gauc, tasks')
    self.assertEqual(repr(run), f"Run(run_dir='{run.run_dir}', checkpoint='best')")
    self.assertContainsSubset({'event', 'auc', 'pass'}, run.metrics)
    self.assertNotIn('slots', run.metrics, 'what is nested is left out')
    self.assertEqual(dir(trainer), ['Callback', 'Run', 'compare', 'fit', 'load', 'tune'])
    self.assertIn('Mapping[str, Json]', str(inspect.signature(trainer.fit)))

  def test_a_regression_has_the_mean_as_its_yardstick(self):
    rng = np.random.default_rng(0)
    frame = log(500).assign(age=rng.normal(1e6, 10, 500), weight=rng.random(500))
    data = {'label': 'age', 'weight': 'weight', 'slots': [{'name': 'user'}]}
    test = frame.assign(age=frame['age'] + 100)
    with self.assertLogs('absl', 'WARNING') as logs:
      tree = small.tree(data=data, model={'loss': 'squared_error'})
      run = api.fit(tree, (), self.get_temp_dir(), train=frame, test=test)
    found = run.evaluate(test)
    mean = np.average(test['age'], weights=test['weight'])
    wanted = np.sqrt(np.average((test['age'] - mean) ** 2, weights=test['weight']))
    self.assertAllClose(found['base_rmse'], wanted, 1e-3)  # labels are float32
    self.assertRegex(
      str(logs.output), r'test: rmse .* is worse than the \d.* of predicting the mean'
    )

  @contextlib.contextmanager
  def own_tracker(self):
    """Yields the callback of examples/own_tracker, and a stand-in for the package that it uses."""
    example = pathlib.Path(__file__).parents[2] / 'examples' / 'own_tracker'
    with (
      mock.patch.dict(sys.modules, {'wandb': mock.MagicMock()}),
      mock.patch.object(sys, 'path', [str(example), *sys.path]),
    ):
      yield importlib.import_module('wandb_callback').WandbCallback, sys.modules['wandb']

  def test_frames_are_trained_as_their_files_are(self):
    run, path = self.fit(log(1000), shuffle=False)
    frame, told = pd.read_csv(path), []

    class Telling(trainer.Callback):
      def on_train_begin(self):
        told.append('begin')

      def on_pass_end(self, name, logs):
        told.append((name.partition('-')[0], logs['examples']))

      def on_epoch_end(self, epoch, logs):
        told.append((epoch, round(logs['auc'], 4)))

      def on_train_end(self, logs):
        told.append(logs['examples'])

    tree = small.tree(
      data={'label': 'click', 'slots': [{'name': 'user'}], 'shuffle': False},
      train={'epochs': 1, 'dense_optimizer': {'learning_rate': 0.001}},  # as without data.valid
    )
    for given in (frame, pa.Table.from_pandas(frame)):
      run_dir = tempfile.mkdtemp(dir=self.get_temp_dir())
      splits = {'train': given, 'valid': given, 'test': given[:99]}
      told.clear()
      own = api.fit(tree, (), run_dir, **splits, callbacks=[Telling()])
      self.assertAllEqual(own.predict(given), run.predict(frame))
      auc = own.evaluate(given)['auc']
      self.assertEqual(told, ['begin', ('train', 1000), (0, round(auc, 4)), 99])
    told.clear()
    given = {'train': frame, 'valid': frame[:99]}
    run_dir = tempfile.mkdtemp(dir=self.get_temp_dir())
    with self.own_tracker() as (callback, wandb):
      api.fit(tree, (), run_dir, **given, callbacks=[Telling(), callback(project='clicks')])
    self.assertEqual(told[-1], 99, 'without data.test, what data.valid says of the kept state')
    wandb.init.assert_called_once_with(project='clicks')
    tracked = wandb.init.return_value
    figures = {k: v for call in tracked.log.call_args_list for k, v in call.args[0].items()}
    samples = [figures[f'{split}/examples'] for split in ('train', 'valid', 'kept')]
    self.assertEqual(samples, [1000, 99, 99])
    tracked.finish.assert_called_once_with()
    two = {'train': [frame, frame[:500]], 'test': frame}
    more = api.fit(tree, ['train.epochs=2'], run_dir, **two)
    trained = more.metrics.query('event == "train"')['examples']
    self.assertEqual(trained.to_list(), [1000, 500, 1000, 500])
    with self.assertRaisesRegex(UserError, r'data.train: found a frame; .*train=frame'):
      api.fit({'data': {'train': frame}})

  def test_gauc_leaves_out_samples_without_a_group(self):
    frame = log(400).assign(who=lambda f: [f'w{i % 7}' if i % 4 else '' for i in range(len(f))])
    run, _ = self.fit(frame, group='who')
    with self.assertLogs('absl', 'WARNING') as logs:
      gauc = run.evaluate(frame)['gauc']
    told = 'GAUC leaves out 25.0 % of the samples, whose data.group, who, is blank'
    self.assertIn(told, str(logs.output))
    # In the batches of evaluate: in others, the last bit of a tie may differ.
    frame['p'] = run.predict(frame)
    total, weight = np.zeros(2), np.zeros(2)  # without the blank group, and with it
    for who, of in frame.groupby('who'):
      clicked, not_clicked = (of['p'][of['click'] == c].to_numpy() for c in (1, 0))
      above = clicked[:, None] - not_clicked
      counted = np.array([who != '', True]) * len(of)
      total += counted * ((above > 0) + 0.5 * (above == 0)).mean()
      weight += counted
    without, with_blank = total / weight
    self.assertAllClose(gauc, without, rtol=1e-6)
    self.assertNotAllClose(gauc, with_blank, rtol=1e-3)

  def test_what_a_run_knows_of_its_features(self):
    run, path = self.fit(log(1000).assign(user=lambda f: 'u' + f['user'].astype(str)))
    frame, table = pd.read_csv(path), run.features('user')
    counts = frame.groupby('user')['click'].agg(['size', 'sum'])
    self.assertAllClose(table.set_index('text')['show'], counts['size'].loc[table['text']])
    self.assertAllClose(table.set_index('text')['click'], counts['sum'].loc[table['text']])
    self.assertEmpty(run.embeddings('user'), 'the model has no factors')
    with self.assertRaisesRegex(UserError, "slot 'user' has no factors; wanted a model with fm"):
      run.neighbours('user', 'u7')
    self.assertGreater(run.importance(path)['auc_worse_by']['user'], 0.1)
    self.assertIn('<iframe', run.report()._repr_html_())
    with self.assertRaisesRegex(
      UserError, "'usr' is no slot of this model; the nearest valid name is 'user'"
    ):
      run.features('usr')
    tree = {'model.interactions': ['linear', 'fm'], 'lifecycle.admission': 'none'}
    factors = api.fit(
      f'{run.run_dir}/config.yaml',
      [f'{key}={value}' for key, value in tree.items()],
      f'{run.run_dir}_fm',
    ).embeddings('user')
    self.assertEqual(set(factors['text']), set(frame['user']))
    self.assertTrue(np.isfinite(factors.drop(columns=['text', 'key'])).all().all())

  def test_a_stop_is_no_result(self):
    folder = pathlib.Path(self.get_temp_dir())
    log(300).to_csv(folder / 'stopped.csv', index=False)
    tree = small.tree(
      run_dir=f'{folder}/stopped',
      data={'train': [f'{folder}/stopped.csv'], 'label': 'click', 'slots': [{'name': 'user'}]},
      model={'interactions': [f'{__name__}.Stopping']},
      train={'batch_size': 10},
    )
    before = signal.getsignal(signal.SIGTERM)
    with self.assertRaisesRegex(KeyboardInterrupt, 'stopped, its state is saved'):
      api.fit(tree)
    self.assertEqual(signal.getsignal(signal.SIGTERM), before)
    events = api.load(f'{folder}/stopped').metrics['status'].tolist()
    self.assertEqual(events[-1], 'stopped')

  def test_a_run_on_frames_reads_every_file_by_its_suffix(self):
    folder, frame = pathlib.Path(self.get_temp_dir()), log(300)
    frame.to_csv(folder / 'new.csv', index=False)
    frame.to_csv(folder / 'new.tsv', index=False, sep='\t')
    frame.to_parquet(folder / 'new.parquet')
    frame.to_json(folder / 'new.json', orient='records', lines=True)
    for form in (None, 'csv', 'jsonl'):
      data = {'label': 'click', 'slots': [{'name': 'user'}], 'format': form}
      tree = small.tree(data=data)
      run_dir = tempfile.mkdtemp(dir=folder)
      run = api.fit(tree, (), run_dir, train=frame, valid=frame)
      self.assertIsNone(run.cfg.data.format)
      wanted = run.predict(frame)
      for suffix in ('csv', 'tsv', 'parquet', 'json'):
        self.assertAllEqual(run.predict(f'{folder}/new.{suffix}'), wanted)
    said = commands.run(
      *('-m', 'trainer.cli.evaluate', '--run_dir', run_dir, '--data', folder / 'new.tsv', '--json')
    )
    self.assertEqual(json.loads(said.stdout)['auc'], run.evaluate(frame)['auc'], said.stderr)
    # A format that the user gave stays.
    shutil.copy(folder / 'new.parquet', folder / 'new')
    run = api.fit(tree, ['data.format=parquet'], tempfile.mkdtemp(dir=folder), train=frame)
    self.assertLen(run.predict(f'{folder}/new'), 300)
    with self.assertRaisesRegex(UserError, "^the frame: no column 'user'"):
      run.predict(frame[['click']])

  def test_a_frame_is_read_as_the_files_of_the_log(self):
    folder = pathlib.Path(self.get_temp_dir())
    slots = [{'name': 'user'}, {'name': 'tags'}]
    data = {'label': 'click', 'slots': slots}
    frame = log(300).assign(
      click=log(300)['click'] == 1, tags=[['a', 'b'][: i % 3] for i in range(300)]
    )
    for day in '12':
      (folder / f'dt={day}').mkdir()
      frame.to_parquet(folder / f'dt={day}' / 'part-0.parquet')
    data['train'] = [f'{folder}/dt=[12]']
    yaml_file, prepared = small.write(folder / 'c.yaml', data=data), folder / 'prepared'
    said = commands.run('-m', 'trainer.cli.prepare', '--config', yaml_file, '--out', prepared)
    self.assertEqual(said.returncode, 0, said.stderr)
    given, runs = {'train': [f'{prepared}/train/*']}, {}
    for name, more in (('log', {}), ('prepared', given), ('told', given | {'format': 'prepared'})):
      runs[name] = api.fit(small.tree(data=data | more), (), f'{folder}/run_{name}')
    paths = [f'{folder}/dt=1', *[f'{prepared}/train/dt=1'] * 2]
    wanted = {name: run.predict(path) for (name, run), path in zip(runs.items(), paths)}
    self.assertGreater(len(set(wanted['log'].ravel().tolist())), 20)

    def check(name):
      run = api.load(f'{folder}/run_{name}')
      for given in (frame, frame.astype({'click': 'boolean'}), pa.Table.from_pandas(frame)):
        self.assertAllEqual(run.predict(given), wanted[name])
      self.assertEqual(run.evaluate(frame)['examples'], 300)
      self.assertLen(run.importance(frame), 2)

    for name in runs:
      check(name)
    for name in ('dt=1', 'dt=2', 'prepared'):
      shutil.rmtree(folder / name)
    for name in runs:  # the run itself knows
      check(name)

  def test_a_frame_and_a_log_whose_format_the_config_gives(self):
    folder, frame = pathlib.Path(self.get_temp_dir()), log(300)
    frame.to_json(folder / 'lines.log', orient='records', lines=True)
    data = {'label': 'click', 'slots': [{'name': 'user'}], 'format': 'jsonl'}
    run = api.fit(small.tree(data=data | {'train': [f'{folder}/lines.log']}), (), f'{folder}/run')
    self.assertAllEqual(run.predict(frame), run.predict(f'{folder}/lines.log'))

  def test_columns_that_are_blank_in_every_sample_are_told(self):
    frame = log(300).assign(none='', gone=None, age=np.nan, price=1.5)
    slots = [{'name': name} for name in ('user', 'none', 'gone')]
    data = {'label': 'click', 'slots': slots, 'dense': [{'name': 'age'}, {'name': 'price'}]}
    run_dir = self.get_temp_dir()
    api.fit(small.tree(data=data), (), run_dir, train=frame)
    wanted = ('never_filled', '', {'slots': ['none', 'gone'], 'dense': ['age']})
    self.assertIn(wanted, findings.faults(read_run(run_dir)))

  def test_nothing_is_made_up_for_a_frame(self):
    run, _ = self.fit(log(300))
    with self.assertRaisesRegex(UserError, "^the frame: no column 'click'"):
      run.evaluate(log(10)[['user']])
    with self.assertRaisesRegex(UserError, "^the frame: no column 'user'"):
      run.predict(log(10)[['click']])
    with self.assertRaisesRegex(UserError, "'user': found 1.5; .* dtype=str"):
      run.predict(pd.DataFrame({'user': [1.5, None]}))
    with self.assertRaisesRegex(UserError, 'nor data.test'):
      run.evaluate()

  def test_a_frame_without_its_label_is_refused_before_anything_is_written(self):
    run_dir = os.path.join(self.get_temp_dir(), 'new', 'run')
    data = {'label': 'click', 'slots': [{'name': 'user'}]}
    lacking = log(10)[['user']]
    for frames, name in (
      ({'train': lacking}, 'train'),
      ({'train': log(300), 'valid': lacking}, 'valid'),
      ({'train': [log(300), lacking]}, r'train\[1\]'),
    ):
      wanted = f"^the frame {name}: no column 'click' \\(data.label\\) among 1 column; "
      with self.assertRaisesRegex(UserError, wanted):
        api.fit({'data': data, 'model': {'interactions': ['linear']}}, (), run_dir, **frames)
      self.assertFalse(os.path.exists(os.path.dirname(run_dir)))

  def test_lists_in_a_frame_are_texts_of_a_csv_log(self):
    ids = log(300)['user']
    lists = [[int(i), int(i) + 1] for i in ids]
    frame = log(300).assign(user=[f'{a}|{b}' for a, b in lists])
    run, path = self.fit(frame, slots=[{'name': 'user', 'separator': '|'}])
    by_file = run.predict(path)
    self.assertGreater(len(set(by_file.ravel().tolist())), 2)
    self.assertAllEqual(run.predict(frame.assign(user=lists)), by_file)
    self.assertAllEqual(
      run.predict(pa.table({'user': [list(map(str, i)) for i in lists]})), by_file
    )
    self.assertAllEqual(
      run.predict(pd.DataFrame({'user': [[], None]})), run.predict(pd.DataFrame({'user': ['', '']}))
    )

  def test_arguments_that_are_wrong(self):
    class Telling(trainer.Callback):
      pass

    frame, data = log(300), {'label': 'click', 'slots': [{'name': 'user'}]}
    tree = small.tree(data=data)
    for config, given, wrong in (
      (
        tree,
        {'train': 'a.csv'},
        "train: found 'a.csv'; wanted a frame .*; files are given by",
      ),
      (tree, {'train': [frame, 'a.csv']}, "train: found 'a.csv'; wanted a frame"),
      (tree, {'train': frame, 'valid': 3}, 'valid: found 3; wanted a frame'),
      (
        tree,
        {'train': pd.concat([frame] * 2, axis=1)},
        "train: column 'click' .* is there 2 times",
      ),
      (3, {}, 'config: found 3; wanted the path of a YAML file'),
      (3, {'train': frame}, 'config: found 3; wanted the path of a YAML file'),
      (tree, {'callbacks': [print]}, 'callbacks: found <built-in function print>; wanted a list'),
      (tree, {'callbacks': [Telling]}, 'callbacks: found .*Telling.*; wanted a list of objects'),
      (tree, {'callbacks': Telling()}, 'callbacks: found .*; wanted a list'),
      (tree, {'train': frame['user']}, 'train: found a Series; wanted a frame'),
      (tree, {'train': frame, 'overrides': 'seed=1'}, "overrides: found 'seed=1'; wanted a list"),
      (tree, {'run_dir': 3}, 'run_dir: found 3; wanted the path of a directory'),
      (tree | {'seed': {1}}, {}, 'config: found a set; wanted texts, numbers'),
      ({'data': 3}, {}, "key 'data': found 3; wanted"),
    ):
      with self.assertRaisesRegex(UserError, wrong):
        given = {'run_dir': tempfile.mkdtemp(dir=self.get_temp_dir())} | given
        trainer.fit(config, **given)

  def test_what_is_given_to_a_run(self):
    folder, frame = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir())), log(300)
    tree = {
      'data': {'label': 'click', 'slots': [{'name': 'user'}]},
      'model': {'interactions': ('linear',)},
      'train': {'epochs': np.int64(1), 'batch_size': np.array([64])[0]},
    }
    trainer.fit(tree, ['seed=3'], folder / 'run', train=pa.table(frame).to_batches()[0])
    frame.to_csv(folder / 'log.csv', index=False)
    run = trainer.load(folder / 'run')
    wanted = run.predict(frame)
    for given in (folder / 'log.csv', [folder / 'log.csv'], (str(folder / 'log.csv'),)):
      self.assertAllEqual(run.predict(given), wanted)
    for given, found in (
      (frame['user'], 'a Series'),
      ([frame, frame], 'a DataFrame in a list'),
      ({'user': ['1']}, 'a dict'),
      (frame.to_numpy(), 'a ndarray'),
      ([], 'a list'),
      (3, '3'),
    ):
      for answer in (run.predict, run.evaluate, run.importance):
        with self.assertRaisesRegex(UserError, f'^data: found {found}; wanted one frame .*files$'):
          answer(given)
    with self.assertRaisesRegex(UserError, "checkpoint: found 'first'; wanted 'best' or 'last'"):
      trainer.load(folder / 'run', 'first')

  def test_labels_of_one_class(self):
    clicks = np.where(np.arange(300) % 3, 'no', 'yes')
    misread = (
      "log.csv: every label in the column 'click' is 0, which holds 200 × 'no', 100 × 'yes'; "
      "data.label_positive is 'Yes'; 'yes' is likely meant; wanted both 0 and 1, or, where such "
      'passes are meant, the text of a 0 as data.label_negative'
    )
    neither = "found 'yes'; wanted a text that data.label_positive or label_negative matches"
    for column, keys, wrong in (
      (clicks, {'label_positive': 'Yes'}, misread),
      (clicks, {'label_positive': 'yess'}, "'yes' is likely meant"),
      (clicks, {'label_positive': 'clicked'}, "label_positive is 'clicked'; wanted both"),
      (clicks, {'label_positive': '.*'}, 'every label .* is 1'),
      (clicks, {'label_positive': 'Yes', 'label_negative': 'no'}, neither),
      ('no', {'label_positive': 'yes'}, "which holds 300 × 'no'; data.label_positive is"),
      ('no', {'label_positive': 'yes', 'label_negative': 'no'}, None),
      (0, {}, "every label .* is 0, which holds 300 × '0'; wanted both"),
      (1, {}, 'every label .* is 1'),
      (0, {'label_negative': '0'}, None),
      (0, {'label_negative': 0}, None),
    ):
      with self.subTest(keys):
        if wrong is None:
          self.fit(log(300).assign(click=column), **keys)
        else:
          with self.assertRaisesRegex(UserError, wrong):
            self.fit(log(300).assign(click=column), **keys)

  def test_a_log_without_header(self):
    run, path = self.fit(log(300), columns=['click', 'user'], delimiter=';')
    self.assertAllEqual(run.predict(log(300)[['user']]), run.predict(path))
    with self.assertRaisesRegex(UserError, "no column 'click' .data.label"):
      run.evaluate(log(10)[['user']])


if __name__ == '__main__':
  tf.test.main()
