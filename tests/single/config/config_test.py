"""The config:

every mistake is one line that says what, where, what was found and what is wanted.
"""

import glob
import os
import re
import tempfile

import pytest
import tensorflow as tf
import yaml

from trainer import config, errors
from trainer.config import schema_text

GOOD = {
  'data': {
    'train': ['x.csv'],
    'slots': [{'name': 'user'}, {'name': 'item'}, {'name': 'last_item', 'shares': 'item'}],
    'dense': [{'name': 'price'}],
  },
  'model': {'interactions': ['linear', 'fm', {'dnn': {'hidden': [8]}}]},
}


def changed(a, b):
  """The keys at which two configs differ."""
  one, other = (config.flatten(cfg.model_dump()) for cfg in (a, b))
  return {key for key in one.keys() | other.keys() if one.get(key, ...) != other.get(key, ...)}


def every_key(tree, path=''):
  """The keys of a config, of its sections too, each with its value.

  --set names an entry of a list only where the list is written, as those of sections are here.
  """
  if isinstance(tree, list) and not isinstance(tree[0] if tree else None, dict):
    return
  for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
    yield f'{path}{key}', value
    if isinstance(value, (dict, list)):
      yield from every_key(value, f'{path}{key}.')


def keys_of_schema(section, path=''):
  """Yields the key of every value that a section may hold, with * for places of lists and names."""
  for key in schema_text.keys(section):
    yield f'{path}{key.name}'
    if key.section:
      inner = {list: '.*.', dict: '.*.', None: '.'}[key.container]
      yield from keys_of_schema(key.section, f'{path}{key.name}{inner}')


# Overrides of CONFIG, and what the one line about them says.
MISTAKES = [
  (
    ['train.batch_sise=10'],
    r"unknown key 'train.batch_sise'; the nearest valid name is 'batch_size'",
  ),
  (['data.slots.0.nam=x'], r"unknown key 'data.slots.0.nam'; the nearest valid name is 'name'"),
  (
    ['sparse.tables.default.wdth=3'],
    r"unknown key 'sparse.tables.default.wdth'; the nearest valid name is 'width'",
  ),
  (['sparse.tables.default.linear.knd=sgd'], r"'kind'"),
  (['lifecycle.decai=1'], r"unknown key 'lifecycle.decai'; the nearest valid name is 'decay'"),
  (
    ['export.saved_model=true', "data.slots.1.column='a b'", 'data.slots.0.column=a_b'],
    "'export.saved_model': found true; .* has the same input a_b for the columns 'a b', 'a_b'",
  ),
  (['train.batch_size=0'], r"key 'train.batch_size': found 0; .*> 0"),
  (['train.batch_size=abc'], r"key 'train.batch_size': found 'abc'; .*whole number"),
  (['train.batch_size=1.5'], r"key 'train.batch_size': found 1.5"),
  (
    ['train.batch_size=200000000', 'sparse.tables.default.factors.kind=sgd'],
    r"factors.learning_rate': found 2.7\d*e\+06, which follows from train.batch_size; .* 1e\+06",
  ),
  (
    ['lifecycle.decay=3'],
    r"lifecycle.decay': found 3; wanted a number <= 1",
  ),
  (
    ['data.slots.0.lifecycle={deacy: 1}'],
    r"unknown key 'data.slots.0.lifecycle.deacy'; the nearest valid name is 'decay'",
  ),
  (['model.interactions=[fmm]'], r"unknown interaction 'fmm'; the nearest valid name is 'fm'"),
  (['model.interactions=[]'], r'wanted at least one interaction'),
  (
    ['data.slots.2.shares=itm'],
    r"found 'itm'; wanted another slot; the nearest valid name is 'item'",
  ),
  (
    ['data.slots.0.table=big'],
    r"found 'big'; wanted a table of sparse.tables; the nearest valid name is 'default'",
  ),
  (['data.slots.1.name=user'], r"the name 'user' is there twice"),
  (['data.slots=[]'], r'wanted at least one slot'),
  (['data.train=[]'], r'wanted files, or data.watch'),
  (['data.day_pattern=day'], r'wanted the day in parentheses'),
  (
    [r'data.day_pattern=(?P<day>\d+)\.(?P<month>\d+)\.(\d+)'],
    "found '.*', with groups named day, month; wanted the names year, month and day, or none",
  ),
  (
    [r'data.day_pattern=(?P<tag>\d+)(?P<year>\d+)(?P<month>\d+)(?P<day>\d+)'],
    'with groups named tag, year, month, day; wanted',
  ),
  (['train.plateau={}'], r'needs data.valid'),
  (
    ['model.loss=squared_error', 'train.plateau={metric: auc}', 'data.valid=[y]'],
    r"'train.plateau.metric': found 'auc'; the loss 'squared_error' has 'rmse'",
  ),
  (
    ['train.plateau={metric: rmse}', 'data.valid=[y]'],
    r"found 'rmse'; the loss 'log_loss' has 'auc', 'gauc', 'logloss'",
  ),
  (
    ['train.schedule={kind: step, period: 9}', 'sync.mode=ps_geo'],
    r"with sync.mode 'ps_geo', whose workers count their own",
  ),
  (
    ['data.watch=x', 'train.epochs=2'],
    r"'train.epochs': found 2; data.watch trains on each pass",
  ),
  (['data.watch=x', 'train.plateau={}', 'data.valid=[y]'], r'with a stream there are no ep'),
  (['data.close_day_after_hours=3'], r'needs data.day_pattern'),
  (['data.late=skip'], r"found 'skip'; it needs data.day_pattern"),
  (
    ['data.topic={brokers: b, topic: t, pass: {records: 9}}', 'data.late=skip'],
    r"found 'skip'; it needs data.topic.days",
  ),
  (['data.label=user'], r"key 'data.slots': found 'user', which is a label"),
  (['data.label=price'], r"key 'data.dense': found 'price', which is a label"),
  (['data.weight=label'], r"key 'data.weight': found 'label', which is a label"),
  (['data.group=label'], r"key 'data.group': found 'label', which is a label"),
  (['Train.batch_size=3'], r"unknown key 'Train'; the nearest valid name is 'train'"),
  (['train.BATCH=3'], r"unknown key 'train.BATCH'; the nearest valid name is 'batch_size'"),
  ([f'seed={2**63}'], r"key 'seed': found 9223372036854775808"),
  (['sparse.tables.default.init_scale=.inf'], r'init_scale.: found inf'),
  (['sparse.tables.default.init_scale=.nan'], r'init_scale.: found nan'),
  (['sparse.tables.default.linear.learning_rate=1e30'], r"learning_rate': found '1e30'"),
  (['train.dense_optimizer.learning_rate=1.0e+30'], r"learning_rate': found 1e\+30"),
  (
    ['train.dense_optimizer={kind: sgd, args: {momentm: .9}}'],
    r"'train.dense_optimizer.args.momentm': unknown; the nearest valid name is 'momentum'",
  ),
  (['train.dense_optimizer.args={beta_1: x}'], r"beta_1': found 'x'; wanted a finite number"),
  (['lifecycle={admission_count: 3, admission_threshold: 2}'], r'which are of several modes'),
  (['data.slots.².name=x'], r"'data.slots.²' is not there|the list has 3 entries"),
  (['train.batch_size=2024-13-45'], r"batch_size': found '2024-13-45'"),
  (['train.batch_size=!!int ""'], r'not YAML'),
  (['model.interactions=' + '[' * 3000], r'nested too deep|not YAML'),
  (['data.label=' + 'x' * 5000 + ': y'], r'.'),
  (['data.late=skp'], r"key 'data.late': found 'skp'"),
  (['train.batch_size'], r'wanted KEY=VALUE'),
  (['data.label_is=real'], r"unknown key 'data.label_is'; here that is model.loss"),
  (['sparse.tables.default.factors.beta=1'], r'factors.beta.* initial_accumulator, with'),
  (['train.batch_size.x=1'], r'.'),
  (['data.slots.7.name=x'], r'the list has 3 entries'),
]


class ConfigTest(tf.test.TestCase):
  def load(self, tree=None, overrides=(), measured=None):
    path = os.path.join(self.get_temp_dir(), 'config.yaml')
    with open(path, 'w', encoding='utf-8') as f:
      yaml.safe_dump(tree if tree is not None else GOOD, f)
    return config.resolve(config.load(path, overrides), measured or {})

  def test_dump_reads_back(self):
    cfg = self.load(
      overrides=[
        'lifecycle={admission: score, decay: 0.9}',
        'data.slots.0.lifecycle={admission_threshold: 3}',
      ]
    )
    path = os.path.join(self.get_temp_dir(), 'dumped.yaml')
    with open(path, 'w', encoding='utf-8') as f:
      f.write(config.dump(cfg))
    self.assertEqual(config.load(path), cfg)
    self.assertEqual(cfg.policy().for_slot(1).admission_threshold, 3)

  def test_flatten_names_every_value(self):
    self.assertEqual(
      config.flatten({'a': {'b': [1, {'c': 2}]}, 'd': []}), {'a.b.0': 1, 'a.b.1.c': 2, 'd': []}
    )

  def test_row_optimizers_have_defaults_of_their_kind(self):
    for kind in ('sgd', 'adagrad', 'adagrad_row', 'adam', 'ftrl', 'rmsprop'):
      cfg = self.load(overrides=[f'sparse.tables.default.factors.kind={kind}'])
      wanted = config.row_defaults(kind, width=config.WIDTH)
      found = cfg.sparse.tables['default'].factors.model_dump()
      self.assertEqual({key: found[key] for key in wanted}, wanted)
      self.assertEqual(cfg.sparse.gradient_scale, 'batch')
    self.assertEqual(self.load().sparse, self.load(overrides=['sparse={}']).sparse)

  def test_more_factors_of_sgd_move_no_further(self):
    for width, rate in ((4, 80), (8, 80), (32, 40)):
      given = [f'sparse.tables.default={{width: {width}, factors: {{kind: sgd}}}}']
      table = self.load(overrides=given).sparse.tables['default']
      self.assertEqual(table.factors.learning_rate, rate)
    with self.assertRaisesRegex(errors.ConfigError, "width': found 0; wanted a number > 0"):
      self.load(overrides=['sparse.tables.default.width=0'])

  def test_rows_of_many_slots_take_smaller_steps(self):
    for count, rate in ((3, 0.2), (10, 0.2), (40, 0.025)):
      slots = [{'name': f's{i}'} for i in range(count)]
      for kind, share in (('adagrad', rate / 0.2), ('adam', rate / 0.2), ('sgd', 1)):
        given = [f'data.slots={slots}', f'sparse.tables.default.linear.kind={kind}']
        linear = self.load(overrides=given).sparse.tables['default'].linear
        usual = config.row_defaults(kind)['learning_rate']
        self.assertAllClose(linear.learning_rate, usual * share)
      given = [f'data.slots={slots}', 'sparse.tables.default.linear={kind: adagrad, preset: keras}']
      self.assertEqual(
        self.load(overrides=given).sparse.tables['default'].linear.learning_rate, 0.001
      )

  def test_they_move_a_row_as_far_whatever_the_batch(self):
    """A feature that is seen once in a batch, whose gradient is therefore 1 / its size."""
    of_size = {}
    for size in (64, 4096):
      for kind in ('adagrad', 'adagrad_row', 'adam', 'rmsprop', 'sgd'):
        given = [f'train.batch_size={size}', f'sparse.tables.default.linear.kind={kind}']
        rule = self.load(overrides=given).sparse.tables['default'].linear
        gradient = min(1 / size, rule.clip or 1)
        of_size.setdefault(kind, []).append(
          {
            'sgd': rule.learning_rate * gradient,
            'adagrad': rule.learning_rate * gradient / (gradient + rule.initial_accumulator**0.5),
            'adagrad_row': rule.learning_rate * gradient,
            'adam': rule.learning_rate * gradient / (gradient + rule.epsilon),
            'rmsprop': rule.learning_rate * gradient / (gradient + rule.epsilon),
          }[kind]
        )
    for kind, (small, large) in of_size.items():
      self.assertAllClose(small, large, msg=kind)

  def test_a_learning_rate_of_ones_own_changes_no_other_key(self):
    for kind in ('sgd', 'adagrad', 'adagrad_row', 'adam', 'ftrl', 'rmsprop'):
      path = 'sparse.tables.default.linear'
      given = [f'{path}.kind={kind}']
      self.assertEqual(
        changed(
          self.load(overrides=given), self.load(overrides=[*given, f'{path}.learning_rate=3'])
        ),
        {f'{path}.learning_rate'},
      )

  def test_a_preset_has_its_published_defaults(self):
    for preset, kind, wanted in (
      ('keras', 'adagrad', {'learning_rate': 0.001, 'initial_accumulator': 0.1, 'epsilon': 1e-7}),
      ('keras', 'adam', {'learning_rate': 0.001, 'epsilon': 1e-7, 'clip': None}),
      ('keras', 'rmsprop', {'learning_rate': 0.001, 'beta2': 0.9}),
      ('paddle', 'adagrad_row', {'learning_rate': 0.05, 'initial_accumulator': 3, 'clip': None}),
    ):
      path = 'sparse.tables.default.linear'
      sparse = self.load(overrides=[f'{path}={{kind: {kind}, preset: {preset}}}']).sparse
      linear = sparse.tables['default'].linear.model_dump()
      self.assertEqual({key: linear[key] for key in wanted}, wanted)
      self.assertEqual(sparse.gradient_scale, 'feature' if preset == 'paddle' else 'batch')
    with self.assertRaisesRegex(errors.ConfigError, "linear.preset': found 'paddle'; kind 'adam'"):
      self.load(overrides=[f'{path}={{kind: adam, preset: paddle}}'])

  def test_writing_a_key_with_the_value_that_it_has_changes_nothing(self):
    """Of every key, and of every section and list as a whole, once with each value."""
    seen = set()

    def is_new(key, value):
      before = len(seen)
      seen.add((key, repr(value)))
      return len(seen) > before

    self.check_keys(is_new)

  @pytest.mark.long
  def test_writing_it_in_every_base_changes_nothing(self):
    self.check_keys(lambda key, value: True)

  def check_keys(self, is_tried):
    rule = 'sparse.tables.default'
    kinds = ('sgd', 'adagrad', 'adagrad_row', 'adam', 'ftrl', 'rmsprop')
    pairs = [(kind, 'tuned') for kind in kinds] + [(k, 'keras') for k in ('adam', 'adagrad')]
    labels = 'data.labels=[{name: click, click: 1}, {name: buy, positive: yes}]'
    tasks = (
      'model.tasks={click: {interactions: [tower]}, buy: {interactions: [tower], given: click}}'
    )
    bases = [
      [],
      [labels.replace('yes', "'yes'"), tasks, 'model.shared={mmoe: {experts: 2}}'],
      [
        'data.slots.2.sequence={max_length: 3}',
        'train.schedule={kind: step, period: 9}',
        'train.progressive_validation=true',
        'export.gate={}',
      ],
      ['data.watch=in', r'data.day_pattern=(\d+)'],
      ['data.train=[]', 'data.topic={brokers: kafka, topic: clicks, days: true}'],
      [
        'data.group=user',
        'data.dense=[]',
        'data.slots.2.sequence={max_length: 3}',
        'model.interactions=[]',
        'model.retrieval={query: {slots: [user, last_item], encoder: {sasrec: {heads: 2}}}, '
        'item: {slots: [item]}, eval_at: [20]}',
      ],
      ['data.valid=[y.csv]'],
      ['data.valid=[y.csv]', 'train.plateau=null', 'model.dense_embedding=autodis'],
      ['data.valid=[y.csv]', 'train.epochs=3', 'model.loss=squared_error'],
      ['data.valid=[y.csv]', r'data.day_pattern=(\d+)', 'lifecycle.eviction=score'],
      ['lifecycle.admission_count=3', 'data.slots.0.lifecycle={decay: 0.5}'],
      ['lifecycle={admission: none, admission_threshold: 3, admission_count: 2}'],
      ['lifecycle.delete_after_unseen_days=3'],
      ['data.slots.1.lifecycle={admission_threshold: 3, min_age_days: 2}'],
      [f'{rule}={{width: 32, linear: {{kind: sgd, preset: paddle}}}}'],
      *[
        ['train.batch_size=256', f'{rule}.factors={{kind: {kind}, preset: {preset}}}']
        for kind, preset in pairs
      ],
    ]
    left = set(keys_of_schema(config.Config))
    for base in bases:
      cfg = self.load(overrides=base)
      for key, value in every_key(cfg.model_dump()):
        left -= {
          key,
          re.sub(r'\.\d+(?=\.|$)', '.*', re.sub(r'(\.t(?:able|ask)s)\.\w+', r'\1.*', key)),
        }
        is_added = re.match(r'data\.slots\.(\d+)', key)
        if is_added and int(is_added[1]) >= len(cfg.given['data']['slots']):
          continue  # bins of a dense column, which --set cannot name
        if is_tried(key, value):
          again = self.load(overrides=[*base, f'{key}={yaml.safe_dump(value)}'])
          self.assertEqual(changed(cfg, again), set(), (base, key))
    self.assertEqual(left, set(), 'keys that no base has')

  def test_set_reaches_into_the_short_form_of_an_interaction(self):
    for given in ('model.interactions.2.dnn.hidden=[64]', 'model.interactions.2.args.hidden=[64]'):
      self.assertEqual(self.load(overrides=[given]).model.interactions[2].args, {'hidden': [64]})
    cfg = self.load(overrides=['model.interactions.1.fm={}', 'model.interactions.2.kind=cross'])
    self.assertEqual([i.kind for i in cfg.model.interactions], ['linear', 'fm', 'cross'])

  def test_a_config_is_explained(self):
    cfg = self.load(overrides=['sparse.tables.default.linear.kind=adam', 'data.valid=[y.csv]'])
    text = schema_text.explained(cfg, {})
    self.assertEqual(config.parse(text, 'explained'), cfg)
    for line in (
      'valid: [y.csv]  # given',
      'kind: adam  # given',
      'epsilon: 1.0e-05  # from linear.kind, preset, width, train.batch_size and '
      'sparse.features_per_sample',
      'epochs: 20  # from train.plateau',
      'every_passes: 1  # default',
    ):
      self.assertIn(f'  {line}\n', text)

  def test_a_static_log_with_validation_has_epochs_and_early_stopping(self):
    for loss, metric in (('log_loss', 'logloss'), ('squared_error', 'rmse')):
      cfg = self.load(overrides=['data.valid=[y.csv]', f'model.loss={loss}'])
      found = (cfg.train.epochs, cfg.train.plateau, cfg.deciding_metric)
      wanted = config.Plateau(min_delta=0.0005 if metric == 'logloss' else 0)
      self.assertEqual(found, (config.STATIC_EPOCHS, wanted, metric))
    train = self.load(overrides=['data.valid=[y.csv]', 'train.epochs=3']).train
    self.assertEqual((train.epochs, train.plateau), (3, config.Plateau(min_delta=0.0005)))
    for overrides in (
      [],
      ['data.valid=[y.csv]', 'train.plateau=null', 'model.dense_embedding=autodis'],
      ['data.valid=[y.csv]', 'data.day_pattern=(\\d+)'],
    ):
      train = self.load(overrides=overrides).train
      self.assertEqual((train.epochs, train.plateau), (1, None), overrides)

  def test_a_static_log_with_validation_has_bins_counts_and_an_ensemble(self):
    static, columns = 'data.valid=[y.csv]', 'data.dense=[{name: x}, {name: y}]'
    slots = (
      'data.slots=[{name: u}, {name: v, counts: false}, {name: b, from: {bins: y, widths: 3}}]'
    )
    model = 'model.interactions=[linear, fm, dnn]'
    cfg = self.load(overrides=[static, columns, slots, model])
    found = [(slot.name, slot.counts) for slot in cfg.data.slots]
    self.assertEqual(found, [('u', True), ('v', False), ('b', True), ('x bins', True)])
    self.assertEqual(cfg.data.slots[3].made, config.Bins(bins='x', quantiles=32))
    ensemble = {'hidden': [128, 128], 'dropout': 0.1, 'members': 8}
    self.assertEqual(cfg.model.interactions[2].args, ensemble)
    table = cfg.sparse.tables['default']
    rates = table.linear.learning_rate, table.factors.learning_rate
    self.assertEqual((*rates, cfg.train.plateau.patience), (0.2, 0.04, 4))
    self.assertEqual(len(cfg.given['data']['slots']), 3)
    self.assertEqual(config.parse(config.dump(cfg), 'x'), cfg)
    measured = {'data.slots.2.from.boundaries': [1.0], 'data.slots.3.from.boundaries': [2.0, 3.0]}
    cfg = self.load(overrides=[static, columns, slots, model], measured=measured)
    self.assertEqual(cfg.data.slots[3].made.boundaries, [2.0, 3.0])
    self.assertEqual(len(cfg.given['data']['slots']), 3)
    for other, bins, counts in (
      (['data.dense_bins=null'], 0, True),
      (['data.counts=false'], 2, False),
      (['model.loss=squared_error'], 2, False),
      (['lifecycle.delete_threshold=0.5'], 2, False),
      (['model.interactions=[linear, fm]'], 0, False),
      (['model.interactions=[linear, fm]', 'data.dense_bins=5', 'data.counts=true'], 2, True),
      ([r'data.day_pattern=(\d+)'], 0, False),
    ):
      slots = 'data.slots=[{name: u}]'
      slots = self.load(overrides=[static, columns, slots, model, *other]).data.slots
      found = sum(slot.name.endswith(' bins') for slot in slots)
      self.assertEqual((found, slots[0].counts), (bins, counts), other)
    args = 'model.interactions=[linear, {dnn: {hidden: [8]}}]'
    cfg = self.load(overrides=[static, args])
    self.assertEqual(cfg.model.interactions[1].args, {'hidden': [8]})
    self.assertEqual((cfg.train.plateau.patience, cfg.model.recipe), (1, None))

  def test_of_the_recipe_plain(self):
    given = ['data.valid=[y.csv]', 'data.dense=[{name: x}]', 'data.slots=[{name: u}]']
    given += ['model.interactions=[linear, fm, dnn]', 'train.batch_size=2048']
    measured = {'model.recipe': 'plain', 'data.slots.1.from.boundaries': [2.0]}
    for cfg in (
      self.load(overrides=[*given, 'model.recipe=plain']),
      self.load(overrides=given, measured=measured),
    ):
      self.assertEqual(cfg.model.interactions[2].args, {'hidden': [64, 32]})
      self.assertEqual([slot.counts for slot in cfg.data.slots], [True, True])
      self.assertEqual((cfg.train.epochs, cfg.train.plateau.patience), (60, 1))
      table = cfg.sparse.tables['default']
      self.assertEqual((table.linear.l2, table.linear.learning_rate), (0, 0.2))
      self.assertAllClose((table.factors.l2, table.factors.learning_rate), (0.4 / 2048, 0.2))
      self.assertEqual(config.parse(config.dump(cfg), 'x'), cfg)
    self.assertEqual((cfg.origin('model.recipe'), 'model' in cfg.given), ('measured', True))
    self.assertEqual(cfg.data.slots[1].made.boundaries, [2.0])
    for batch, l2 in ((64, 0.4 / 1024), (1024, 0.4 / 1024), (4096, 0.4 / 4096)):
      cfg = self.load(overrides=[*given, 'model.recipe=plain', f'train.batch_size={batch}'])
      self.assertAllClose(cfg.sparse.tables['default'].factors.l2, l2)
    own = ['model.interactions.2.args.dropout=0.2', 'sparse.tables.default.factors.l2=0']
    cfg = self.load(overrides=[*given, *own], measured=measured)
    self.assertEqual(cfg.model.interactions[2].args, {'hidden': [64, 32], 'dropout': 0.2})
    self.assertEqual(cfg.sparse.tables['default'].factors.l2, 0)

  def test_crosses_are_slots(self):
    given = ['data.slots=[{name: u}, {name: v}, {name: uv, from: {cross: [u, v]}}]']
    given += ['data.counts=true', 'data.crosses=[[u, v], [v, w], [v, w]]']
    cfg = self.load(overrides=given)
    added = cfg.data.slots[3:]
    self.assertEqual(
      [(s.name, s.made.cross, s.counts) for s in added], [('v x w', ['v', 'w'], True)]
    )
    self.assertEqual(cfg.origin('data.slots.3.name'), 'from data.crosses')
    table = ['data.slots=[{name: u, table: t}]', 'sparse.tables={t: {}}', 'data.dense=[]']
    for crosses in ('[[u, w]]', '[[w, x]]'):
      other = self.load(overrides=[*table, f'data.crosses={crosses}'])
      self.assertEqual(other.data.slots[1].table, 't')
    self.assertEqual(config.parse(config.dump(cfg), 'x'), cfg)
    for crosses in ('[[u]]', '[[u, u]]'):
      wanted = 'data.crosses.0.*wanted two to eight distinct columns'
      with self.assertRaisesRegex(errors.ConfigError, wanted):
        self.load(overrides=[f'data.crosses={crosses}'])

  def test_an_ensemble_on_many_slots_learns_slowly_and_without_counts(self):
    model = ['data.valid=[y.csv]', 'model.interactions=[linear, fm, dnn]', 'data.dense=[]']
    for slots, batch, linear, factors, counts in (
      (1, 1024, 0.05, 0.01, True),
      (40, 1024, 0.05, 0.01, True),
      (40, 4096, 0.05, 0.04, True),
      (51, 1024, 0.4 * (10 / 51) ** 1.5, 0.01, False),
      (500, 4096, 0.4 * (10 / 500) ** 1.5, 0.4 * (10 / 500) ** 1.5, False),
    ):
      names = ', '.join(f'{{name: s{i}}}' for i in range(slots))
      cfg = self.load(overrides=[*model, f'data.slots=[{names}]', f'train.batch_size={batch}'])
      table = cfg.sparse.tables['default']
      rates = table.linear.learning_rate, table.factors.learning_rate
      self.assertAllClose(rates, (linear, factors), msg=str(slots))
      self.assertEqual(cfg.data.slots[0].counts, counts, slots)

  def test_a_damaged_config_of_a_run_is_refused(self):
    run_dir = tempfile.mkdtemp(dir=self.get_temp_dir())
    home = self.load(overrides=['run_dir=~/x']).run_dir
    self.assertEqual(home, os.path.expanduser('~/x'))
    cfg = self.load(overrides=[f'run_dir={run_dir}'])
    config.write_of_run(cfg)
    self.assertEqual(config.load_of_run(run_dir), cfg)
    with open(f'{run_dir}/config.yaml', 'rb') as f:
      text = f.read()
    first_line, _, rest = text.partition(b'\n')
    changed = text.replace(b'item', b'itum')
    for damaged in (changed, text[:-20], text + b' ', text + b'\xff', rest, first_line, b''):
      with open(f'{run_dir}/config.yaml', 'wb') as f:
        f.write(damaged)
      with self.assertRaisesRegex(errors.ConfigError, f'^{run_dir}/config.yaml: '):
        config.load_of_run(run_dir)

  def test_the_default_run_dir_follows_from_the_name_of_the_file(self):
    path = os.path.join(self.get_temp_dir(), 'my.clicks.yaml')
    with open(path, 'w', encoding='utf-8') as f:
      f.write('data: {train: [x], slots: [{name: user}]}\nmodel: {interactions: [linear]}\n')
    self.assertEqual(config.load(path).run_dir, 'runs/my.clicks')
    self.assertEqual(config.load(path, ['run_dir=a']).run_dir, 'a')
    self.assertEqual(config.load(path, ['run_dir=a'], 'b').run_dir, 'b')

  def test_slots_share_ids_and_tables_order_them(self):
    cfg = self.load(
      overrides=[
        'sparse.tables={small: {width: 2}, default: {width: 8}}',
        'data.slots.0.table=small',
        'model.interactions=[linear, dnn]',
      ]
    )
    self.assertEqual(cfg.slot_ids(), {'user': 1, 'item': 2, 'last_item': 2})
    cfg = self.load(
      overrides=[
        'sparse.tables={default: {}, small: {width: 2}}',
        'data.slots.0.table=small',
        'model.interactions=[linear, dnn]',
      ]
    )
    self.assertEqual([s.name for s in cfg.ordered_slots], ['item', 'last_item', 'user'])

  def test_mistakes(self):
    for overrides, wanted in MISTAKES:
      with self.assertRaisesRegex(errors.ConfigError, wanted, msg=overrides) as caught:
        self.load(overrides=overrides)
      self.assertNotIn('\n', str(caught.exception))

  def test_what_is_not_given_of_the_lifecycle_stays_off(self):
    for given, admission, eviction in (
      ({}, 'none', 'none'),
      ({'eviction': 'none'}, 'none', 'none'),
      ({'eviction': 'score'}, 'none', 'score'),
      ({'admission_threshold': 2}, 'score', 'none'),
      ({'admission_count': 2}, 'count', 'none'),
      ({'admission_probability': 0.5}, 'probability', 'none'),
      ({'admission': 'none', 'admission_count': 2}, 'none', 'none'),
      ({'delete_threshold': 0.1, 'delete_after_unseen_days': 3}, 'none', 'score'),
      ({'delete_after_unseen_days': 3}, 'none', 'unseen'),
    ):
      policy = self.load(GOOD | {'lifecycle': given}).policy()
      self.assertEqual((policy.admission, policy.eviction), (admission, eviction), given)
    cfg = self.load(overrides=['data.slots.0.lifecycle={admission_threshold: 3}'])
    self.assertEqual(cfg.policy().admission, 'score', 'a threshold of a slot')

  def test_texts_that_are_no_config(self):
    for text, wanted in (
      ('a: 1\na: 2', r"x:2: not YAML: the key 'a' is there twice"),
      ('a: {b: 1, b: 2}', r"x:1: not YAML: the key 'b' is there twice"),
      (
        '\na: [b[1-6].csv]',
        r"x:2: not YAML: expected .*, but got '\['; a text that holds .* quotes",
      ),
      ('a: !!int ""', r'x: not YAML: '),
      ('a: !!float "z"', r'x: not YAML: '),
      ('a: !!timestamp "no"', r'x: not YAML: '),
      ('a: ' + '9' * 5000, r'x: not YAML: '),
      ('a: ' + '[' * 5000, r'x: values are nested too deep|x.*: not YAML'),
      ('a: ' + '[' * 60 + ']' * 60, r'x: found over 40 levels'),
      ('a: &a [*a]', r'x: found over 40 levels'),
      ('a: 2024-13-45', r"x: unknown key 'a'|key 'data' is missing"),
      ('- 1', r'x: found \[1\]; wanted keys'),
      ('a: \x01', r'x: not YAML: '),
    ):
      with self.assertRaisesRegex(errors.ConfigError, wanted, msg=text[:20]) as caught:
        config.parse(text, 'x')
      self.assertNotIn('\n', str(caught.exception))
      self.assertLess(len(str(caught.exception)), 500)
    laughs = 'a0: &a0 [1]\n' + ''.join(
      f'a{i}: &a{i} [{", ".join([f"*a{i - 1}"] * 9)}]\n' for i in range(1, 20)
    )
    with self.assertRaisesRegex(errors.ConfigError, 'found over 40 levels, or over'):
      config.parse(laughs, 'x')

  def test_files_that_are_no_config_are_refused(self):
    with self.assertRaisesRegex(errors.ConfigError, '^/nowhere.yaml: no such file'):
      config.load('/nowhere.yaml')
    path = os.path.join(self.get_temp_dir(), 'bad.yaml')
    os.mkfifo(path)
    for special in (path, '/dev/zero'):
      with self.assertRaisesRegex(errors.UserError, f'^{special}: is a device, a pipe or a socket'):
        config.load(special)
    os.remove(path)
    os.symlink(path, path)
    with self.assertRaisesRegex(
      errors.ConfigError, f'^{path}: Too many levels of .*; wanted a YAML'
    ):
      config.load(path)
    os.remove(path)
    with open(path, 'wb') as f:
      f.truncate(1 << 30)
    with self.assertRaisesRegex(errors.UserError, 'has more than 16,777,216 bytes; wanted a small'):
      config.load(path)
    with open(path, 'w', encoding='utf-8') as f:
      f.write('a: [1\nb: 2')
    with self.assertRaisesRegex(errors.ConfigError, r'bad.yaml:2: not YAML'):
      config.load(path)

  def test_every_committed_config_loads(self):
    pattern = os.path.join(os.path.dirname(config.__file__), '..', '..', 'configs', '*.yaml')
    paths = glob.glob(pattern)
    self.assertNotEmpty(paths, pattern)
    for path in paths:
      config.load(path)


if __name__ == '__main__':
  tf.test.main()
