"""The reference of the config: current, complete, and its examples are valid."""

import pathlib

import tensorflow as tf
import yaml

from trainer import config
from trainer.cli import reference
from trainer.config import schema_text

ROOT = pathlib.Path(__file__).resolve().parents[3]
SMALLEST = """
data:
  train: [x.csv]
  group: user
  slots: [{name: user, table: ids}, {name: item, table: ids}]
  dense: [{name: price}]
sparse: {tables: {ids: {width: 4}}}
model: {interactions: [linear, dnn]}
"""


class ReferenceTest(tf.test.TestCase):
  def test_the_page_is_current(self):
    committed = (ROOT / 'docs' / 'config.md').read_text(encoding='utf-8')
    wanted = 'python -m trainer.cli.reference > docs/config.md'
    self.assertEqual(committed, reference.page(), f'make it again: {wanted}')

  def test_every_key_has_a_meaning(self):
    def check(found, where):
      for key in found:
        self.assertTrue(key.meaning, f'{where}.{key.name}')
        if key.section:
          check(schema_text.keys(key.section), f'{where}.{key.name}')

    check(schema_text.keys(config.Config), 'config')

  def test_examples_are_valid(self):
    with_others = {
      'train.plateau': ['data.valid=[x.csv]'],
      'train.schedule.period': ['train.schedule.kind=cosine'],
      'data.topic.brokers': ['data.topic.topic=clicks'],
      'data.topic.topic': ['data.topic.brokers=kafka-1'],
      'data.topic.pass.seconds': ['data.topic={brokers: kafka-1, topic: clicks}'],
      'data.slots.*.shares': ['data.slots.1.name=item_id'],
    }
    of_other_slots = (
      'data.slots',
      'sparse.tables',
      'model.interactions.*.args',
      'model.interactions.*.kind',
    )
    for key, example in reference.EXAMPLES.items():
      if key in of_other_slots:
        self.assertNotEmpty(yaml.safe_load(example))
        continue
      change = f'{key.replace(".*", ".0")}={example}'
      config.parse(SMALLEST, key, [*with_others.get(key, []), change])


if __name__ == '__main__':
  tf.test.main()
