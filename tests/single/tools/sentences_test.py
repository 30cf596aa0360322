"""The sentences of findings. Other tests compare codes and figures."""

import tensorflow as tf

from trainer.tools.sentences import SENTENCES, found

_LOST = 'rank 1 was lost: it hung up'
_FIRST = {'logloss': 1.04, 'base': 0.46}
_WORSE = {'metric': 'logloss', 'value': 0.0362, 'constant': 0.0334, 'task': ''}
_RARE = found('rare_values', settings={'user': 'data.slots.0.counts=true'})
_TRY = {'may_go': ['user'], 'command': 'ctr-tune --config a.yaml --columns'}
_GAIN = (
  "The model may be better without 'user': ctr-tune --config a.yaml --columns trains without and "
  'says what is gained.'
)
_RATES = {'a.linear.learning_rate': 0.5, 'a.factors.learning_rate': 0.2}
_NONE = {'may_go': [], 'command': ''}
_UNIQUE = {'features': 30_000, 'shows': 45_000, 'bytes_share': 0.95}
CASES = (
  (found('uncalibrated', reason='Predictions are of a sample'), 'Predictions are of a sample.'),
  (
    found('few_admitted', 'admission_count', threshold=10.0, admitted=0, features=14, share=0.0),
    'lifecycle.admission_count 10 admits 0 of the 14 features seen (0.0%): the others have only',
  ),
  (
    found('label_rate', 'day_2', rate=0.001, usual=0.2),
    'The label of day_2 looks broken: its click rate is 0.0010, that of the other passes 0.2000.',
  ),
  (
    found('label_auc', 'day_2', auc=0.5, usual=0.7),
    'The label of day_2 looks broken: its AUC is 0.5000, that of the passes before 0.7000.',
  ),
  (
    found('never_filled', slots=['item'], dense=[]),
    "Blank in every sample of the training: slot 'item'. Check the log, or leave it out.",
  ),
  (
    found('never_filled', slots=['a', 'b'], dense=['age']),
    "Blank in every sample of the training: slots 'a' and 'b'; dense column 'age'. Check the log, "
    'or leave them out.',
  ),
  (
    found('went_blank', 'item', when='in day_2', share=0.99, usual=0.02, of='samples'),
    "Slot 'item' went blank in day_2: 99% of its samples have no feature, 2% before.",
  ),
  (
    found('cold', shares={'user': {'valid': 0.901, 'test': 0.91}}, **_TRY),
    "Cold start: training never saw the values of slot 'user' in 90% of data.valid and 91% of "
    f'data.test. {_GAIN} Features of the past and histories know new values, too (docs/',
  ),
  (
    found('cold', shares={'a': {'test': 0.6}, 'b': {'test': 1.0}}, **_NONE),
    "Cold start: training never saw the values of slots 'a' in 60% of data.test and 'b' in 100% of "
    'data.test. Features of the past',
  ),
  (
    found('drifted', 'bin', psi=0.3, when='day 3'),
    "The bins of slot 'bin' have drifted since the first day: their population stability index is "
    '0.30 on day 3.',
  ),
  (
    found('left_range', 'price', share=1.0, when='day 3'),
    "Dense column 'price' has left the values of the first pass: 100% on day 3 are cut by",
  ),
  (
    found('leak', 'tip', auc=0.99, without=0.59),
    "Column 'tip' looks like a leak of the label: with it AUC is 0.9900, with its values permuted "
    'over samples 0.5900.',
  ),
  (
    found('dead_columns', 'user', columns=[2, 5]),
    "The factors of slot 'user' are (almost) 0 in every row in columns 2 and 5.",
  ),
  (
    found('collapsed', 'user', rank=1.2),
    "The factors of slot 'user' have collapsed to an effective rank of 1.2.",
  ),
  (
    found('large_columns', **_FIRST, sizes={'hour': 21.2}),
    'In the first pass logloss is 1.04, far above the 0.46 of predicting the share of clicks for '
    "all: dense column 'hour' is about 21.2 (root mean square). Give such columns transform: "
    'standardise.',
  ),
  (
    found('long_steps', 'buy', **_FIRST, rates=_RATES),
    'In the first pass logloss of buy is 1.04, far above the 0.46 of predicting the share of '
    'positives for all: steps look too long. Try half of the learning rates: --set '
    'a.linear.learning_rate=0.25 --set a.factors.learning_rate=0.1 in place of 0.5 and 0.2.',
  ),
  (
    found('long_steps', **_FIRST, rates=_RATES | {'b.linear.learning_rate': 0.5}),
    'In the first pass logloss is 1.04, far above the 0.46 of predicting the share of clicks for '
    'all: steps look too long. Try half of the learning rates: a.linear.learning_rate 0.25 in '
    'place of 0.5, a.factors.learning_rate 0.1 in place of 0.2 and b.linear.learning_rate 0.25',
  ),
  (
    found('overfits', trained=0.97, new=0.67, advice=[_RARE], added=[]),
    'The model overfits: in the end AUC is 0.97 on data.train and 0.67 on data.valid. Slot '
    "'user' holds many rare values, whose factors learn single samples by heart. Counts may help: "
    '--set data.slots.0.counts=true. Else use more samples, or a model that memorises less: ',
  ),
  (
    found('overfits', trained=0.97, new=0.67, advice=[], added=[]),
    'The model overfits: in the end AUC is 0.97 on data.train and 0.67 on data.valid. Use more',
  ),
  (
    found('overfits', trained=0.97, new=0.67, advice=[], added=['day_2']),
    'The model overfits: in the end AUC is 0.97 on data.train and 0.67 on data.valid. day_2 went '
    'on from the last state, which may have overfitted before: begin the next day with ',
  ),
  (
    found('harmful', **_TRY),
    "With 'user' and what is made of it permuted over the samples, data.valid is predicted "
    f'better, by more than chance. {_GAIN}',
  ),
  (_RARE, "Slot 'user' holds many rare values, whose factors learn single samples by heart."),
  (
    found(
      'better_logloss',
      kept={'epoch': 2.0, 'auc': 0.7, 'logloss': 0.5},
      other={'epoch': 1.0, 'auc': 0.69, 'logloss': 0.44},
    ),
    'The kept epoch 2 has the best AUC, 0.7000, but a logloss of 0.5000; epoch 1 has AUC 0.6900 '
    'and logloss 0.4400. If probabilities matter: train.plateau.metric: logloss.',
  ),
  (
    found('miscalibrated', 'test', name='log', calibration=1.4, of='the clicks'),
    'Predictions of the test split (log) lie 40% above the clicks.',
  ),
  (
    found('one_class', 'valid', label=0, task='buy'),
    'On data.valid, all labels are 0 of buy, so they judge no model: hold out samples with labels',
  ),
  (
    found('no_help', 'test', **_WORSE),
    'On data.test, the kept state does not help: logloss 0.036200 is worse than the 0.033400 of '
    'predicting the share of clicks for all.',
  ),
  (
    found('no_help', 'test', metric='logloss', value=0.130004, constant=0.13, task='buy'),
    'On data.test, the kept state does not help: logloss 0.130004 is worse than the 0.130000 of '
    'predicting the share of clicks for all of buy.',
  ),
  (
    found('no_help_yet', 'valid', why=found('few_steps', steps=13), **_WORSE | {'task': 'buy'}),
    'valid: logloss 0.036200 is worse than the 0.033400 of predicting the share of clicks for '
    'all of buy: it was trained for 13 steps only; more epochs or a smaller train.batch_size help',
  ),
  (
    found('finds_no_more', 'test', metric='recall@10', value=0.0145, base=0.066, unknown=0.9),
    'On data.test the model finds no more than a list of the most shown items: recall@10 is '
    '0.0145, that of the list 0.0660. Of 90% of the queries it knows nothing.',
  ),
  (
    found('finds_less', metric='recall@20', test=0.012, valid=0.035),
    'On data.test recall@20 is 0.0120, on data.valid 0.0350. If the samples of data.test are',
  ),
  (
    found('many_weights', 'user', weights=802_000, samples=32_000.0, share=1.0),
    'The tables hold 802,000 weights, but the log has only 32,000 samples to train them; 100% are '
    "of slot 'user'. Use a smaller width or a higher lifecycle.admission_threshold.",
  ),
  (
    found('unique_values', 'user', **_UNIQUE, **_TRY, unknown=0.99),
    "Slot 'user' has a new value in 67% of its impressions: 30,000 features of 45,000 "
    'impressions, in 95% of the bytes; the model does not know 99% of those it evaluates. Coarser '
    f'values may serve better. {_GAIN}',
  ),
  (
    found('unique_values', 'user', **_UNIQUE, **_NONE, unknown=None),
    "Slot 'user' has a new value in 67% of its impressions: 30,000 features of 45,000 "
    'impressions, in 95% of the bytes. Coarser values may serve better.',
  ),
  (
    found('bad_records', records={'a': 17.0, 'b': 3.0}),
    '20 bad records were left out: a (17) and b (3).',
  ),
  (found('set_aside', fate='late', reasons=['a: late']), '1 pass was late: a: late.'),
  (
    found('set_aside', fate='refused', reasons=['a: x', 'b: y', 'c: z']),
    '3 passes were refused: a: x; b: y; and 1 more.',
  ),
  (found('lost', step=50.0, reason=_LOST), f'The job ended at step 50: {_LOST}.'),
  (
    found('interrupted', steps=[50.0, 1e3]),
    'The job ended and was continued 2 times, at step 50 and 1,000.',
  ),
  (
    found('large_steps', 'a.linear', kind='rmsprop', rate=1.0, usual=0.01),
    'a.linear takes steps of rmsprop at learning_rate 1; wanted about 0.01',
  ),
  (found('few_steps', steps=13), 'it was trained for 13 steps only; more epochs or a smaller'),
  (found('uncalibrated_loss', reason='the loss orders only'), 'the loss orders only'),
  (
    found('overfits_here', trained=0.97, new=0.67),
    'the model overfits: AUC was 0.97 in training and is 0.67 here; fewer epochs, l2, dropout',
  ),
  (found('not_finite', 'logloss', value=None), 'logloss is None; wanted a finite one'),
  (
    found('blank', 'item', share=0.1, usual=0.98),
    "slot 'item' is blank: 10.00% of the samples have it; wanted about 98.00%",
  ),
  (
    found('fell', 'auc', value=0.61, usual=0.7, tolerance=0.02),
    'auc is 0.6100; wanted 0.7000, or worse by 0.02 at most',
  ),
  (found('no_auc', label=0.0), 'no AUC: all labels are 0'),
  (found('no_auc', 'buy', label=1.0), 'buy: no AUC: all labels are 1'),
  (found('few_clicks', clicks=40.0), '40 clicks are too few to judge a model by'),
  (found('other_sampling', calibration=3.0), 'the predictions add up to 3.00 times the clicks; '),
  (
    found('diverges', fewer=', train fewer epochs'),
    'the model overfits or diverges; lower the learning rates, train fewer epochs, or set l2',
  ),
)


class SentencesTest(tf.test.TestCase):
  def test_each_code_has_its_sentence(self):
    self.assertEqual({finding.code for finding, _ in CASES}, SENTENCES.keys())
    for finding, sentence in CASES:
      self.assertStartsWith(finding.sentence, sentence)


if __name__ == '__main__':
  tf.test.main()
