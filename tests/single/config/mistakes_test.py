"""Typed mistakes: each ends in one line that names the place and what to do."""

import os
import pathlib
import re

import tensorflow as tf

from trainer import api, config, errors

GOOD = """
data:
  train: [logs/day_*.csv]
  valid: [logs/valid.csv]
  label: click
  group: user
  slots: [{name: user}, {name: item}, {name: tags, separator: '|'}]
  dense: [{name: price}]
model: {interactions: [linear, fm, {dnn: {hidden: [8]}}]}
"""
# What was typed after --set, and what the line must say.
MISTAKES = [
  # misspelt keys
  ('daat.train=[x.csv]', "unknown key 'daat'.*'data'"),
  ('data.trian=[x.csv]', "'data.trian'.*'train'"),
  ('data.lable=click', "'data.lable'.*'label'"),
  ('data.slot=[]', "'data.slot'.*'slots'"),
  ('data.slots.0.colum=uid', "'data.slots.0.colum'.*'column'"),
  ('data.dense.0.transfrom=log1p', "'data.dense.0.transfrom'.*'transform'"),
  ('sparse.tabels={}', "'sparse.tabels'.*'tables'"),
  ('sparse.tables.default.with=8', "'sparse.tables.default.with'.*'width'"),
  ('sparse.tables.default.factors.learning_rat=1', "'learning_rate'"),
  ('model.interaction=[fm]', "'model.interaction'.*'interactions'"),
  ('train.batchsize=64', "'train.batchsize'.*'batch_size'"),
  ('train.epoch=3', "'train.epoch'.*'epochs'"),
  ('train.plateau={patiance: 2}', "'train.plateau.patiance'.*'patience'"),
  ('checkpoint.every_step=5', "'checkpoint.every_step'.*'every_steps'"),
  ('export.bases=true', "'export.bases'.*'base'"),
  ('sync.modes=ps', "'sync.modes'.*'mode'"),
  (
    'train.dense_optimizer.args={momentm: 0.9}',
    "momentm': unknown; 'momentum' is of sgd and rmsprop; adam takes beta_1",
  ),
  ('train.dense_optimizer.args={wd: 1}', "args.wd': unknown; the valid names are amsgrad, beta_1"),
  ('lifecycle.admision=score', "'lifecycle.admision'.*'admission'"),
  ('seeds=1', "unknown key 'seeds'.*'seed'"),
  # keys of another section
  ('train.learning_rate=0.1', 'here that is train.dense_optimizer.learning_rate of the layers'),
  ('sparse.width=8', "'width' is a key of sparse.tables.default$"),
  ('epochs=3', "'epochs' is a key of train$"),
  ('model.widht=3', "'model.widht'; the nearest valid name is sparse.tables.default.width$"),
  ('train.seed=3', "'seed' is a key of the top level$"),
  # values that are no such thing
  ('data.train=logs/day_1.csv', "'data.train': found 'logs/day_1.csv'.*list"),
  ('data.format=cvs', "'data.format': found 'cvs'.*'csv'"),
  ('data.shuffle=perhaps', "'data.shuffle': found 'perhaps'"),
  ('data.max_bad_share=5', "'data.max_bad_share': found 5"),
  ('data.slots.0.pooling=max', "'data.slots.0.pooling': found 'max'.*'sum'"),
  ('data.dense.0.transform=log', "'data.dense.0.transform': found 'log'.*'log1p'"),
  ('sparse.tables.default.width=0', "'sparse.tables.default.width': found 0.*> 0"),
  ('sparse.tables.default.width=8.5', "'sparse.tables.default.width': found 8.5"),
  ('sparse.tables.default.linear.kind=adagard', "found 'adagard'.*'adagrad'"),
  ('sparse.tables.default.linear.learning_rate=-1', 'found -1.*>= 0'),
  ('sparse.gradient_scale=mean', "'sparse.gradient_scale': found 'mean'.*'feature'"),
  ('sparse.store=redis', "'sparse.store': found 'redis'.*'rows'"),
  ('sparse.memory_limit=1e9', 'wanted sparse.cold_dir too, a directory'),
  ('sparse.memory_limit=0', "'sparse.memory_limit': found 0.*> 0"),
  ('model.loss=logloss', "'model.loss': found 'logloss'.*'log_loss'"),
  ('model.negative_sampling_rate=0', "'model.negative_sampling_rate': found 0"),
  ('model.interactions=fm', "'model.interactions': found 'fm'.*list"),
  ('train.epochs=0', "'train.epochs': found 0"),
  ('train.batch_size=1e3', "'train.batch_size': found"),
  ('train.dense_optimizer.kind=adamw', "found 'adamw'.*'adam'"),
  ('train.schedule={kind: cosine}', "'train.schedule.period': found null.*dry_run"),
  ('train.schedule={kind: linear, period: 9}', "'train.schedule.kind': found 'linear'.*'cosine'"),
  ('train.schedule={warmup_steps: 3, period: 9}', "period': does nothing with"),
  ('train.plateau={metric: acc}', "'train.plateau.metric': found 'acc'.*'auc'"),
  ('sync.mode=parameter_server', "'sync.mode': found 'parameter_server'.*'ps'"),
  ('sync.ports=[5, 3]', r"'sync.ports': found \[5, 3\]"),
  ('sparse.tables.default.width=99999999', "'sparse.tables.default.width': found 99999999"),
  ('train.dense_optimizer.args={clipnorm: -1}', "args.clipnorm': found -1; wanted a number >= 0"),
  ('train.dense_optimizer.args={beta_1: 2}', "args.beta_1': found 2; wanted a number >= 0 and < 1"),
  ('seed=0x' + 'f' * 5000, "'seed': found a number of 20000 bits"),
  ('lifecycle.decay=98', "'lifecycle.decay': found 98"),
  ('lifecycle.admission=shows', "'lifecycle.admission': found 'shows'.*'score'"),
  ('data.slots=[user, item]', "'data.slots.0': found 'user'; .* as in {name: user}$"),
  ('data.dense=[price]', "'data.dense.0': found 'price'; .* as in {name: price}$"),
  ('data.missing_values=n/a', r"found 'n/a'; wanted a list, as in \['n/a'\]$"),
  ('data.slots=u', r"found 'u'; wanted a list, as in \[\{name: u\}\]$"),
  ('model.loss=bce', "found 'bce'; wanted 'log_loss', .*; here that is log_loss$"),
  ('sparse.tables.default.factors=adam', "found 'adam'; .* as in {kind: adam}$"),
  ('train.dense_optimizer=adam', "found 'adam'; .* as in {kind: adam}$"),
  ('train.plateau=false', "'train.plateau': found false; .*, or null for off$"),
  ('lifecycle=none', "'lifecycle': found 'none'; wanted keys with values$"),
  ('data.delimiter=[]', r"'data.delimiter': found \[\]"),
  ('data.group=[user]', r"'data.group': found \['user'\]"),
  ('data.format=tsv', "'data.format': found 'tsv'.*'csv'"),
  ('sync.mode=horovod', "'sync.mode': found 'horovod'.*'allreduce'"),
  # words of other systems, and keys in the wrong place
  ('train.early_stopping=3', 'here that is train.plateau'),
  ('sparse.vocab_size=9', 'here that is no key, because tables grow'),
  ('sync.dense_allreduce=horovod', 'here that is no key, because Horovod sums dense gradients'),
  (
    'report.to=[wandb]',
    "found 'wandb'; .*; here that is a trainer.Callback, as in examples/own_tr",
  ),
  ('train.lr=1e-3', "'train.lr'; here that is train.dense_optimizer.learning_rate of"),
  ('data.target=click', 'here that is data.label'),
  ('model.hidden=[8]', 'it is an argument of a layer, as in model.interactions'),
  ('data.slots.0.bins=price', r'wanted it below from, as in from: {bins: …}$'),
  ('data.slots.0.form=x', "the nearest valid name is 'from'"),
  ('model.interactions=[dcn]', "here that is 'cross' beside 'dnn'"),
  # what does not go together
  ('model.interactions=[linear, deep]', "unknown interaction 'deep'"),
  ('model.interactions=[]', 'wanted at least one interaction'),
  ('data.slots.1.name=user', "the name 'user' is there twice"),
  ('data.slots.1.shares=usr', "found 'usr'.*'user'"),
  ('data.slots.1.table=large', "found 'large'.*'default'"),
  ('data.day_pattern=day_', 'wanted the day in parentheses'),
  ('data.day_pattern=day_(', 'wanted a regular expression'),
  ('data.label_positive=(', 'wanted a regular expression'),
  ('data.label_negative=(', 'wanted a regular expression'),
  # how --set is written
  ('train.batch_size', 'wanted KEY=VALUE'),
  ("data.slots.2.separator=''", "separator': found ''; wanted a text of at least one"),
  ("data.slots.2.value_separator=''", "value_separator': found ''; wanted a text of at least one"),
  ('data.label_negative=0.5', "label_negative': found 0.5; wanted a text; quote a number"),
  ('data.label_positive=yes', "label_positive': found true; wanted a text; quote yes"),
  ('data.slots.9.name=x', 'the list has 3 entries'),
  ('train.batch_size.size=3', '.'),
  ('data.slots=[{name: a]', 'not YAML'),
  ('data.delimiter=||', """not YAML: .* quotes of its own, as in --set 'data.delimiter="|"'$"""),
  ('data.delimiter=|', 'found no text after |; a text with such a sign wants quotes of its own'),
  ('data.delimiter=#', 'found no text after #; a text with such a sign wants quotes of its own'),
  # a key that is like none, and one that is like none of its section
  ('train.foo=1', "unknown key 'train.foo'; the valid names are batch_size, "),
  ('odd.key=1', "^--set odd.key=1: unknown key 'odd'"),
]
# What was typed in a file in place of a required key, and what the line must say.
IN_PLACE = [
  ('slots:', 'slot:', "data.slot'; the nearest valid name is 'slots'$"),
  ('slots:', 'Slots:', "data.Slots'; the nearest valid name is 'slots'$"),
  ('slots:', 'features:', "data.features'; here that is data.slots$"),
  ('{name: item}', '{nmae: item}', "data.slots.1.nmae'; the nearest valid name is 'name'$"),
  ('{name: price}', '{Name: price}', "data.dense.0.Name'; the nearest valid name is 'name'$"),
  ('data:', 'dat:', "dat'; the nearest valid name is 'data'$"),
  ('model:', 'modle:', "modle'; the nearest valid name is 'model'$"),
]


# The mistakes that these make are found at a key that holds theirs.
FOUND_ABOVE = ('daat.train=', 'data.slots.1.name=', 'train.batch_size.size=')


class MistakesTest(tf.test.TestCase):
  def test_a_required_key_that_is_misspelt_is_told_before_it_is_missed(self):
    for right, typed, wanted in IN_PLACE:
      with (
        self.subTest(typed),
        self.assertRaisesRegex(errors.UserError, "^my.yaml: unknown key '" + wanted),
      ):
        config.parse(GOOD.replace(right, typed, 1), 'my.yaml')
    with self.assertRaisesRegex(errors.UserError, "^my.yaml: key 'data.slots' is missing"):
      config.parse('data: {trian: [x.csv]}', 'my.yaml')
    with self.assertRaisesRegex(errors.UserError, "^my.yaml: unknown key 'odd'"):
      config.parse(GOOD + 'odd: {a: 1}', 'my.yaml', ['odd.b=1'])

  def test_each_ends_in_one_line(self):
    self.assertGreaterEqual(len(MISTAKES), 50)
    config.parse(GOOD, 'my.yaml')
    for typed, wanted in MISTAKES:
      with self.subTest(typed):
        with self.assertRaisesRegex(errors.UserError, wanted) as caught:
          config.parse(GOOD, 'my.yaml', [typed])
        self.assertNotIn('\n', str(caught.exception))
        if '=' in typed and not typed.startswith(FOUND_ABOVE):
          self.assertRegex(str(caught.exception), f"^--set '?{re.escape(typed[:80])}")

  def test_a_log_that_set_names_and_that_is_not_there(self):
    path = os.path.join(self.get_temp_dir(), 'my.yaml')
    pathlib.Path(path).write_text(GOOD)
    with self.assertRaisesRegex(errors.UserError, r'^--set data.train=\[/no.csv\]: .*') as caught:
      _ = api.Source(path, ['data.train=[/no.csv]']).cfg
    self.assertNotIn(path, str(caught.exception))


if __name__ == '__main__':
  tf.test.main()
