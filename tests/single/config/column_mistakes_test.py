"""Over 300 mistaken declarations of made columns: each ends in one line that names the place."""

import tensorflow as tf
import yaml

from trainer import config
from trainer.errors import ConfigError

NAN = float('nan')
NO_NAME = (None, 3, 1.5, True, [], ['x'], {}, {'a': 1})
NO_COUNT = (0, -1, 1.5, 'x', '3', [], {}, True, 10**30)
NO_SWITCH = (None, 'perhaps', 3, 1.5, [], {})
# kind -> a right declaration, and wrong values of its keys
KINDS = {
  'bins': (
    {'bins': 'x', 'boundaries': [1, 2]},
    {
      'bins': NO_NAME,
      'boundaries': ([], [2, 1], [1, 1], ['x'], 'x', [NAN], [float('inf')], [1e39], {}, 3, [[1]],
                     [None], [1, 1 + 1e-9], list(range(10_001))),
      'log_squared': (*NO_SWITCH, True),
    },
  ),
  'quantiles': ({'bins': 'x', 'quantiles': 4}, {'quantiles': (*NO_COUNT, None, 1, 10_001)}),
  'widths': (
    {'bins': 'x', 'widths': 4},
    {'widths': (*NO_COUNT, None, 1, 10_001), 'quantiles': (4,), 'log_squared': (True,)},
  ),
  'number': ({'number': 'x'}, {'number': NO_NAME}),
  'cross': (
    {'cross': ['x', 'y']},
    {
      'cross': ([], ['x'], ['x', 'x'], list('abcdefghi'), 'x', None, 3, {}, [1, 2], [None, 'x']),
      'most': (*NO_COUNT, None, 10_001),
    },
  ),
  'time': (
    {'time': 'x', 'part': 'hour'},
    {
      'time': NO_NAME,
      'part': (None, 'hours', 'Hour', '', 3, [], {}, 'minutes_since'),
      'zone': (None, 'Berlin', 'Europe/Berln', '', 3, [], '../etc/passwd', '/etc/localtime', 'a\0'),
      'unit': (None, 'sec', 'ms', '', 3, [], {}),
      'since': ('y', 3, [], {}),
    },
  ),
  'text': (
    {'text': 'x', 'lower': True},
    {
      'text': NO_NAME,
      'lower': (*NO_SWITCH, False),
      'match': ('(', 'a', '(a)(b)', '(?=a)', '(?P<x', '[', '*', '(?:a)', 3, [], {}, True),
      'ngrams': NO_COUNT,
      'prefixes': ([], [0], [3, 3], [6, 3], [-1], ['x'], 3, '3', {}, [1.5], [None]),
    },
  ),
  'lookup': (
    {'lookup': 'x', 'table': 'items.csv', 'value': 'y'},
    {'lookup': NO_NAME, 'table': NO_NAME, 'value': NO_NAME, 'key': NO_NAME[1:], 'content': (3, [])},
  ),
  'expression': (
    {'expression': 'x / y'},
    {
      'expression': (
        '', ' ', '1', 'x +', 'x ** y', 'x // y', 'x % y', 'x if y else z', 'x and y', 'not x', '~x',
        'lambda: x', 'f(x)', 'log(x, y)', 'log()', 'min(x)', 'clip(x, 1)', 'where(x)', "x['y']",
        'x[0]', 'x.y()', '__import__("os")', 'x < y < z', '"x"', 'x + "y"', '1j * x', '1e999 * x',
        'x := 3', '(x, y)', '[x]', '{x}', 'x @ y', 'x << 1', '+x', 'x is y', 'x in y', 'log(x=y)',
        'log(*x)', 'x; y', 'x = y', 'True + x', 'None', 'x\ny', 'x' + ' + x' * 300, '(' * 500,
        'x\0', *NO_NAME,
      ),
    },
  ),
  'overlap': (
    {'overlap': ['x', 'y']},
    {
      'overlap': ([], ['x'], ['x', 'x'], ['x', 'y', 'z'], 'x', None, 3, {}, [1, 2]),
      'of': (None, 'shares', '', 3, [], {}),
    },
  ),
}  # fmt: skip
DENSE = ('expression', 'overlap', 'lookup', 'time')
# What cannot stand in one place: data sections, and what the line names.
PLACES = [
  ({'dense': [{'name': 'a', 'from': of}]}, 'data.dense.0.from')
  for of in ({'bins': 'x', 'boundaries': [1]}, {'cross': ['x', 'y']}, {'number': 'x'},
             {'text': 'x', 'ngrams': 2}, {'text': 'x', 'prefixes': [2]})
] + [
  ({'slots': [{'name': 'a', 'from': of}]}, 'data.slots.0.from')
  for of in ({'expression': 'x'}, {'overlap': ['x', 'y'], 'of': 'share'},
             {'time': 'x', 'part': 'minutes_since', 'since': 'y'},
             'x', 3, True, [], ['bins'], {}, {'bin': 'x'}, {'unknown': 1}, {'boundaries': [1]},
             {'bins': 'x', 'boundaries': [1], 'cross': ['x', 'y']})
] + [
  ({'slots': [{'name': 'a', 'from': {'cross': ['x', 'y']}, key: value}, {'name': 'x'}]},
   f'data.slots.0.{key}')
  for key, value in (('column', 'b'), ('separator', '|'), ('value_separator', ':'))
] + [
  ({'slots': [{'name': n, 'from': of} for n, of in columns]}, 'data.slots')
  for columns in (
    [('a', {'cross': ['b', 'x']}), ('b', {'cross': ['a', 'x']})],
    [('a', {'cross': ['b', 'x']}), ('b', {'cross': ['c', 'x']}), ('c', {'cross': ['a', 'y']})],
    [('a', {'bins': 'x', 'boundaries': [1]}), ('b', {'bins': 'a', 'boundaries': [1]})],
    [('a', {'bins': 'x', 'boundaries': [1]}), ('b', {'number': 'a'})],
    [('a', {'number': 'x'}), ('b', {'cross': ['a', 'y']})],
    [('a', {'text': 'x', 'ngrams': 2}), ('b', {'text': 'a', 'lower': True})],
    [('a', {'text': 'x', 'ngrams': 2}), ('b', {'bins': 'a', 'boundaries': [1]})],
    [('a', {'cross': ['x', 'y']}), ('b', {'lookup': 'a', 'table': 't.csv', 'value': 'v'})],
    [('a', {'number': 'x'}), ('a', {'number': 'y'})],
  )
] + [
  ({'slots': [{'name': 'tags', 'separator': '|'}, {'name': 'a', 'from': of}]}, 'data.slots.1.from')
  for of in ({'bins': 'tags', 'boundaries': [1]}, {'number': 'tags'},
             {'text': 'tags', 'lower': True}, {'time': 'tags', 'part': 'hour'})
] + [
  ({'slots': [{'name': 'n', 'separator': '|', 'value_separator': ':'},
              {'name': 'a', 'from': {'cross': ['n', 'x']}}]}, 'data.slots.1.from.cross'),
  ({'slots': [{'name': 'a', 'from': {'number': 'label'}}]}, 'data.slots'),
  ({'slots': [{'name': 'a', 'from': {'cross': ['b', 'x']}}],
    'dense': [{'name': 'b', 'from': {'expression': 'x'}}]}, 'data.slots.0.from.cross'),
] + [
  ({'thousands': value, 'decimal': decimal}, 'data.thousands')
  for decimal, value in ((',', ','), ('.', '.'), ('.', ''), ('.', 'ab'), ('.', '5'), ('.', 'e'),
                         ('.', '-'), ('.', '+'), ('.', '%'), ('.', 3))
] + [({'decimal': value}, 'data.decimal') for value in (';', '', None, 3, [], 'point')]  # fmt: skip


def declarations():
  """Yields data sections, and the key that the line names."""
  for name, (right, wrong) in KINDS.items():
    section = 'dense' if name in DENSE else 'slots'
    kind = next(iter(right))
    at = f'data.{section}.0.from'
    for key, values in wrong.items():
      for value in values:
        yield {section: [{'name': 'a', 'from': right | {key: value}}]}, at
    for key in right.keys() - {kind}:
      if not (kind == 'text' and key == 'lower'):
        yield {section: [{'name': 'a', 'from': {k: v for k, v in right.items() if k != key}}]}, at
    for key in (kind[:-1], f'{kind}s', 'colum', 'seperator', 'boundary'):
      yield {section: [{'name': 'a', 'from': right | {key: 'x'}}]}, at
  yield from PLACES


def parse(section):
  tree = {'data': {'train': ['x.csv'], 'slots': [{'name': 's'}]} | section}
  return config.parse(yaml.safe_dump(tree | {'model': {'interactions': ['linear']}}), 'c.yaml')


class ColumnMistakesTest(tf.test.TestCase):
  def test_each_ends_in_one_line(self):
    for name, (right, _) in KINDS.items():
      parse({'dense' if name in DENSE else 'slots': [{'name': 'a', 'from': right}]})
    mistakes = list(declarations())
    self.assertGreaterEqual(len(mistakes), 300)
    for section, key in mistakes:
      try:
        parse(section)
      except ConfigError as e:
        text = str(e)
        self.assertIn(f"'{key}", text, section)
        self.assertNotIn('\n', text)
        self.assertLess(len(text), 500, text)
      else:
        self.fail(f'was taken: {str(section)[:300]}')


if __name__ == '__main__':
  tf.test.main()
