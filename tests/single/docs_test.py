"""The examples of README.md and docs/ are right: configs are read, commands have such flags."""

import ast
import importlib.util
import os
import pathlib
import re
import shlex

import boto3
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import tensorflow as tf
import tomli
import yaml

from tests.support.s3 import S3
from trainer import config
from trainer.config.formats import FORMATS
from trainer.data.conversion import prepare_pass
from trainer.data.file_system import SUFFIXES
from trainer.data.passes import passes

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
BLOCK = re.compile(r'```(\w*)\n(.*?)```', re.DOTALL)
SCRIPTS = tomli.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']['scripts']
COMMAND = re.compile(
  r'-m trainer\.(?:cli\.)?(\w+)|\b(ctr-\w+) |launch/(?:local|cluster|parameter_servers)\.sh '
  r'(?:\S+ (evaluate|predict|inspect|doctor) )?'
)
REST = {
  'data': {'train': ['log.csv'], 'label': 'click', 'slots': [{'name': 'user'}, {'name': 'item'}]},
  'model': {'interactions': ['linear']},
}


def blocks(page: pathlib.Path, language: str) -> list[str]:
  """The examples of a page that are in a language, as it is named behind ```."""
  return [text for name, text in BLOCK.findall(page.read_text('utf-8')) if name == language]


def whole(text: str) -> config.Config:
  """The config that an example shows, with what it leaves out."""
  tree = yaml.safe_load(text)
  tree = {'model': tree} if 'interactions' in tree else tree
  for section, values in REST.items():
    tree[section] = values | tree.get(section, {})
    if 'labels' in tree[section]:
      del tree[section]['label']
    if 'retrieval' in tree[section]:
      del tree[section]['interactions']
  return config.parse(yaml.safe_dump(tree), 'an example', [], None)


def commands(page: pathlib.Path) -> list[str]:
  """The commands of a page, in blocks and in lines."""
  text = page.read_text('utf-8')
  lines = [line for _, block in BLOCK.findall(text) for line in block.splitlines()]
  lines += re.findall(r'`([^`]*)`', BLOCK.sub('', text))
  lines = [line.partition('#')[0] for line in lines]
  # trainer.config has no flags of this kind.
  return [line for line in lines if COMMAND.search(line) and 'trainer.config' not in line]


def flags_of(module: str) -> set[str]:
  """The flags that a command defines; --noNAME too of those that are on or off."""
  path = 'trainer/run.py' if module == 'run' else f'trainer/cli/{module}.py'
  tree = ast.parse((ROOT / path).read_text('utf-8'))
  defined = {
    node.args[0].value: node.func.attr
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and getattr(node.func, 'attr', '').startswith('DEFINE_')
  }
  return {*defined, *(f'no{name}' for name, kind in defined.items() if kind == 'DEFINE_bool')}


class DocsTest(tf.test.TestCase):
  def test_configs(self):
    found = [(page, text) for page in PAGES for text in blocks(page, 'yaml')]
    self.assertGreater(len(found), 9)
    for page, text in found:
      with self.subTest(page=page.name, text=text):
        whole(text)

  def test_commands(self):
    found = [(page, line) for page in PAGES for line in commands(page)]
    self.assertGreater(len(found), 30)
    for page, line in found:
      with self.subTest(page=page.name, line=line):
        module, script, launched = COMMAND.search(line).groups()
        if script:
          module = re.fullmatch(r'trainer\.(?:cli\.)?(\w+):main', SCRIPTS[script])[1]
        known = flags_of(module or launched or 'run')
        words = shlex.split(line)
        for i, word in enumerate(words):
          if word.startswith('--'):
            self.assertIn(word[2:].partition('=')[0], known)
          if word == '--set':
            setting = words[i + 1]
            if module == 'tune':  # the first of those to choose from
              setting = setting.partition(',')[0]
            config.parse(yaml.safe_dump(REST), 'an example', [setting], None)

  def features_of_the_past(self, log, library, **names):
    """What a page's Python adds to a log: (number of samples, clicks, rate, history) of each."""
    pandas, polars, histories, _ = blocks(ROOT / 'docs' / 'better_model.md', 'python')
    names['log'] = log
    exec({'pandas': pandas, 'polars': polars}[library] + histories, names)
    columns = [names['log'][name].to_list() for name in ('user_n', 'clicks', 'user_rate')]
    return [*zip(*columns, names['histories'])]

  def a_log(self):
    """A log out of order, in which users have several samples at a time, and up to 80 clicks."""
    rng, columns = np.random.default_rng(0), {'time': 90, 'user': 4, 'item': 30, 'click': 2}
    return pd.DataFrame({name: rng.integers(0, most, 500) for name, most in columns.items()})

  def past_of(self, log):
    """The same by a search of the whole log for each sample."""
    rows = log.sort_values('time', kind='stable').to_dict('records')
    for row in rows:
      before = [r for r in rows if r['user'] == row['user'] and r['time'] < row['time']]
      items = [str(r['item']) for r in before if r['click']]
      yield len(before), len(items), (len(items) + 1) / (len(before) + 2), '|'.join(items[-50:])

  def test_features_of_the_past(self):
    log = self.a_log()
    wanted = [*self.past_of(log)]
    self.assertGreater(max(clicks for _, clicks, *_ in wanted), 50)
    self.assertEqual(self.features_of_the_past(log, 'pandas', pd=pd), wanted)

  def test_features_of_the_past_in_polars(self):
    if not importlib.util.find_spec('polars'):
      self.skipTest('polars is not installed')
    import polars as pl

    log = self.a_log()
    found = self.features_of_the_past(pl.from_pandas(log), 'polars', pl=pl)
    self.assertEqual(found, [*self.past_of(log)])

  def test_modules_that_are_started(self):
    """They are where a page, a config or the Makefile says."""
    before = 'trainer.evaluate'  # as 0.2.0 has it, in upgrading.md
    for file in (*PAGES, ROOT / 'CONTRIBUTING.md', ROOT / 'Makefile', *ROOT.glob('configs/*.yaml')):
      named = re.findall(
        r'-m ((?:benchmarks|campaigns|ops|trainer)[\w.]*\w)', file.read_text('utf-8')
      )
      for name in {*named} - {before}:
        self.assertTrue((ROOT / f'{name.replace(".", "/")}.py').exists(), f'{file.name}: {name}')

  def test_the_table_of_formats(self):
    page = (ROOT / 'docs' / 'data.md').read_text('utf-8')
    page = page[: page.index('## A prepared pass')]
    rows = re.findall(r'^\| `(\w+)` \| ([^|]*) \|', page, re.MULTILINE)
    self.assertEqual([name for name, _ in rows], [*FORMATS, 'prepared'])
    told = {s: name for name, cell in rows for s in re.findall(r'\.\w+', cell) if name in FORMATS}
    suffixes = {s: name for s, name in SUFFIXES.items() if name != 'csv'}  # any other
    self.assertEqual({s: name for s, name in told.items() if name != 'csv'}, suffixes)

  def test_the_configs_of_the_data_page(self):
    """They read what they say, from files and from a bucket."""
    libffm, bucket, made = (whole(text) for text in blocks(ROOT / 'docs' / 'data.md', 'yaml'))
    kinds = {one.kind for one in made.data.made.values()}
    self.assertEqual(kinds, config.MADE.keys())
    folder = self.get_temp_dir()
    os.makedirs(f'{folder}/log')
    with open(f'{folder}/log/day_0.ffm', 'w', encoding='utf-8') as f:
      f.write('1 0:3:1 1:7:0.5\n0 0:4:1 1:7:1\n')
    (one,) = passes(libffm.data, [f'{folder}/{p}' for p in libffm.data.train], 'data.train')
    meta = prepare_pass(libffm, one.path, f'{folder}/out')
    self.assertEqual((meta['samples'], meta['features']), (2, 4))
    table = pa.table({'click': [1, 0], 'user': ['a', 'b'], 'item': [1, 2]})
    with S3():
      client = boto3.client('s3')
      client.create_bucket(Bucket='ads')
      sink = pa.BufferOutputStream()
      pa.parquet.write_table(table, sink)
      for name in ('log/dt=2024-01-31/part-0.parquet', 'holdout/part.parquet'):
        client.put_object(Bucket='ads', Key=name, Body=sink.getvalue().to_pybytes())
      (day,) = passes(bucket.data, bucket.data.train, 'data.train')
      self.assertEqual(day.day, 20240131)
      (test,) = passes(bucket.data, bucket.data.test, 'data.test')
      for one in (day, test):
        self.assertEqual(prepare_pass(bucket, one.path, f'{folder}/out')['samples'], 2)


if __name__ == '__main__':
  tf.test.main()
