"""Seeded random values of a log's columns: missing, huge, of many scripts, near changes of clocks.

Each function takes a NumPy generator and a number of values, and returns a list.
"""

import datetime

import numpy as np


def numbers(rng, n):
  """Texts of numbers of every size, missing ones, boundaries."""

  def one():
    match rng.integers(9):
      case 0:
        return None
      case 1:
        return str(int(rng.integers(-5, 30)))
      case 2:
        return repr(float(np.exp(np.clip(rng.normal() * 30, -200, 88)) * rng.choice([-1, 1])))
      case 3:
        return rng.choice(
          ['-0.0', '0', '1e-40', '-1e-45', '3.4e38', '-3.4028234e38', '1e-38', '0.7']
        )
      case 4:
        return repr(float(np.exp(np.sqrt(rng.integers(1, 300)))))
      case 5:
        return repr(float(np.float32(np.exp(np.sqrt(rng.integers(1, 300))))))
      case _:
        return f'{rng.normal() * 10:.{rng.integers(0, 9)}f}'

  return [one() for _ in range(n)]


LETTERS = list('aAbBzZ019.-_/ ()\t"\'\\,;|:äÄßİıΣς語𝄞\u0301\x1f\xa0')


def texts(rng, n):
  def one():
    if rng.random() < 0.1:
      return rng.choice([None, '', ' ', '\t'])
    return ''.join(rng.choice(LETTERS, rng.integers(0, 14)))

  return [one() for _ in range(n)]


def ids(rng, n):
  return [
    rng.choice([None, '', '1', '2', '2.0', '03', '3', 'x y', ' x y ', 'ü', 'u9']) for _ in range(n)
  ]


def lists(rng, n):
  some = ['1', '2', '2.0', 'x', 'y', '', ' x', 'ü']
  return ['|'.join(rng.choice(some, rng.integers(0, 6))) for _ in range(n)]


ZONES = ('Europe/Berlin', 'America/St_Johns', 'Australia/Lord_Howe', 'Asia/Kathmandu', 'UTC')


def seconds(rng, n):
  """Times of every century, and those around changes of the clock."""
  changes = [1711846800, 1729990800, 1698541200, 1679792400]
  return [
    int(rng.integers(-2208988800, 7258118400))
    if rng.random() < 0.5
    else int(rng.choice(changes)) + int(rng.integers(-7300, 7300))
    for _ in range(n)
  ]


def iso(rng, n):
  found = []
  for s in seconds(rng, n):
    at = datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=s)
    text = at.isoformat(rng.choice(['T', ' ']))
    text += rng.choice(['', '.5', '.123456', 'Z', '+02:00', '-0330', '.25Z'])
    found.append(
      rng.choice([text, at.date().isoformat(), None, '', text[:16]], p=[0.7, 0.1, 0.05, 0.05, 0.1])
    )
  return found


def odd_numbers(rng, n):
  """Texts most of which are no finite float32."""
  some = [
    'nan',
    'NaN',
    'inf',
    '-inf',
    '1e400',
    '1e39',
    '-3.5e38',
    '1e-400',
    '0x10',
    '1_0',
    '１',
    '',
  ]
  pieces = [*'0123456789.eE+-%, ', 'na', 'inf', '٣', '\x00']

  def one():
    if rng.random() < 0.3:
      return rng.choice(some)
    return ''.join(rng.choice(pieces, rng.integers(1, 6)))

  return [one() for _ in range(n)]


def odd_times(rng, n):
  """Times as `iso` makes them, most of them with one character that is another one."""
  found = [list(text or '') for text in iso(rng, n)]
  for text in found:
    if text and rng.random() < 0.8:
      text[rng.integers(len(text))] = rng.choice([*'0123456789-:TZ+. ', '２', ''])
  return [''.join(text) for text in found]
