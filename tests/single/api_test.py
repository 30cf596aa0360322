"""trainer.fit, and what a run answers on frames."""

import os
import pathlib
import signal
import tempfile

import numpy as np
import pandas as pd
import tensorflow as tf

from trainer import api
from trainer.errors import UserError


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
    data |= {'train': [f'{folder}/log.csv'], 'label': 'click', 'slots': [{'name': 'user'}]}
    tree = {'run_dir': f'{folder}/run', 'data': data, 'model': {'interactions': ['linear']}}
    return api.fit(tree), str(folder / 'log.csv')

  def test_a_frame_is_answered_as_its_file_is(self):
    run, path = self.fit(log(1000))
    frame = pd.read_csv(path)
    by_file = run.predict(path)
    self.assertAllEqual(run.predict(frame), by_file)
    self.assertAllEqual(run.predict(frame[['user']]), by_file)
    self.assertAllEqual(api.load(run.run_dir).predict(frame.astype(str)), by_file)
    self.assertEqual(run.evaluate(frame)['auc'], run.evaluate(path)['auc'])

  def test_a_stop_is_no_result(self):
    folder = pathlib.Path(self.get_temp_dir())
    log(300).to_csv(folder / 'stopped.csv', index=False)
    tree = {
      'run_dir': f'{folder}/stopped',
      'data': {'train': [f'{folder}/stopped.csv'], 'label': 'click', 'slots': [{'name': 'user'}]},
      'model': {'interactions': [f'{__name__}.Stopping']},
      'train': {'batch_size': 10},
    }
    before = signal.getsignal(signal.SIGTERM)
    with self.assertRaisesRegex(KeyboardInterrupt, 'stopped, its state is saved'):
      api.fit(tree)
    self.assertEqual(signal.getsignal(signal.SIGTERM), before)
    events = api.load(f'{folder}/stopped').metrics['status'].tolist()
    self.assertEqual(events[-1], 'stopped')

  def test_nothing_is_made_up_for_a_frame(self):
    run, _ = self.fit(log(300))
    with self.assertRaisesRegex(UserError, "no column 'click'"):
      run.evaluate(log(10)[['user']])
    with self.assertRaisesRegex(UserError, "no column 'user'"):
      run.predict(log(10)[['click']])
    with self.assertRaisesRegex(UserError, "'user': found 1.5; .* dtype=str"):
      run.predict(pd.DataFrame({'user': [1.5, None]}))
    with self.assertRaisesRegex(UserError, 'no data.test'):
      run.evaluate()

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
