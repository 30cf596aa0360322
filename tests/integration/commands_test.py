"""The commands and the Python of README.md and pages of docs/, run as they stand there, in order.

They are read out of the pages' code blocks. Only sizes are changed: the log is small, a job has
fewer processes, and a search fewer trials.
"""

import pathlib
import re
import subprocess
import tempfile
import time

import numpy as np
import pandas as pd
import pytest
import requests
import tensorflow as tf
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALLER = {'launch/local.sh 4 ': 'launch/local.sh 2 ', 'servers.sh 2 3 ': 'servers.sh 1 1 '}
# Commands that are not run here, and where they are.
ELSEWHERE = {
  'source ': 'each shell here begins with it',
  'make ': 'CI types make test; make train would train the whole demo',
  'horovodrun -np 8 -H host1:4,host2:4 ': 'tests/integration/multihost_test.py has hosts',
  'launch/cluster.sh ': 'tests/integration/launch_test.py',
  'launch/parameter_servers.sh 2 3 --config my.yaml --set sync.mode=ps_': 'as mode ps',
}

# What the Python of docs/better_model.md finds there, and what it must have made.
LOG = """
import pandas as pd

log = pd.DataFrame({'time': [3, 1, 2, 4], 'item': [7, 8, 9, 6], 'click': [1, 1, 1, 0]})
log['user'] = list('aaba')
"""
MADE = "assert histories == ['', '', '8', '8|7']"
# LightGBM is no requirement: where it is missing, scikit-learn's trees stand in.
STAND_IN = """
import importlib.util, sys, types
from sklearn.ensemble import HistGradientBoostingClassifier

class LGBMClassifier:
  def __init__(self, n_estimators, learning_rate):
    self.trees = HistGradientBoostingClassifier(max_iter=n_estimators // 100)
    self.predict_proba = self.trees.predict_proba

  def fit(self, x, y, eval_set, callbacks):
    self.trees.fit(x, y)

if importlib.util.find_spec('lightgbm') is None:
  early = {'early_stopping': lambda rounds: None}
  sys.modules['lightgbm'] = types.SimpleNamespace(LGBMClassifier=LGBMClassifier, **early)
"""


def python(page: str) -> list[str]:
  """Returns the blocks of Python on a page."""
  text = (ROOT / page).read_text(encoding='utf-8')
  return re.findall(r'^```python\n(.*?)^```', text, re.MULTILINE | re.DOTALL)


def blocks(page: str) -> tuple[list[dict], list[str]]:
  """Returns the configs of a page and its command lines, without comments, in their order."""
  text = (ROOT / page).read_text(encoding='utf-8')
  configs, commands = [], []
  for kind, block in re.findall(r'^```(\w*)\n(.*?)^```', text, re.MULTILINE | re.DOTALL):
    if kind == 'yaml':
      configs.append(yaml.safe_load(block))
    elif not kind:
      lines = [re.sub(r'\s+#.*', '', line) for line in block.splitlines()]
      commands += [x for x in lines if re.match(r'(ctr-|launch/|make |source |horovodrun )', x)]
  for row in re.findall(r'^\|.*\|$', text, re.MULTILINE):  # which mode when
    spans = re.findall(r'`([^`]+)`', row)
    commands += [x for x in spans if re.match(r'(ctr-|launch/|horovodrun ).* --config ', x)]
  return configs, commands


def write_logs(folder: pathlib.Path, config: dict) -> None:
  """Writes what a config's patterns match: their columns as the config names them."""
  data, rng = config['data'], np.random.default_rng(0)
  names = [p for key in ('train', 'valid', 'test') for p in data.get(key, [])]
  names += ['logs/other.csv', 'logs/day_2.csv']
  for name in [n.replace('*', d) for n in names for d in (('1', '2') if '*' in n else ('',))]:
    columns = {data['label']: rng.integers(2, size=300)}
    for slot in data['slots']:
      values = rng.integers(20, size=300)
      columns[slot['name']] = [f'{v}{slot.get("separator", "")}{v + 1}' for v in values]
    columns |= {dense['name']: rng.random(300).round(2) for dense in data['dense']}
    (folder / name).parent.mkdir(exist_ok=True)
    pd.DataFrame(columns).to_csv(folder / name, index=False)


class CommandsTest(tf.test.TestCase):
  def shell(self, folder, commands):
    """Runs commands one after another in one bash; each must succeed."""
    activate = f'cd {ROOT}; set +u; source .venv/bin/activate; set -u; cd {folder}'
    script = folder / 'commands.sh'
    script.write_text('\n'.join(['set -eu', activate, 'set -x', *commands]) + '\n')
    done = subprocess.run(
      ['bash', script], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-5000:])
    return done.stdout

  def prepare(self, page):
    folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    configs, commands = blocks(page)
    write_logs(folder, configs[0])
    text = yaml.safe_dump(configs[0])
    (folder / 'my.yaml').write_text(text)
    (folder / 'absolute.yaml').write_text(text.replace('logs/', f'{folder}/logs/'))
    for command in commands:
      self.assertNotIn('&&', command, 'a line is a command')
    return folder, [c for c in commands if not c.startswith(tuple(ELSEWHERE))]

  def test_readme(self):
    folder, commands = self.prepare('README.md')
    self.assertGreaterEqual(len(commands), 7, commands)
    lines = []
    for command in commands:
      for old, new in SMALLER.items():
        command = command.replace(old, new)
      if command.startswith('launch/'):  # works in the project's root; a run of its own
        command = f'{ROOT}/{command} --run_dir {folder}/runs/{len(lines)}'
        command = command.replace('my.yaml', f'{folder}/absolute.yaml')
      lines.append(command)
    out = self.shell(folder, lines)
    self.assertIn('data.train: 2 passes, 600 samples', out)
    self.assertLen((folder / 'probabilities.txt').read_text().splitlines(), 300)
    written = {
      path.name.partition('-')[2] or path.name for path in (folder / 'runs/mine/exports').iterdir()
    }
    self.assertContainsSubset({'base', 'delta', 'saved_model'}, written)

  @pytest.mark.long
  def test_tutorial(self):
    folder, commands = self.prepare('docs/tutorial.md')
    serve = [c for c in commands if c.startswith('ctr-serve')]
    self.assertLen(serve, 1)
    out = self.shell(folder, [c for c in commands if c not in serve])
    self.assertIn('with early stopping', out)
    with subprocess.Popen(
      ['bash', '-c', f'. {ROOT}/.venv/bin/activate; exec {serve[0]} --port 0'],
      cwd=folder,
      stdout=subprocess.PIPE,
      text=True,
    ) as server:
      try:
        address = re.search(r'http://[^/]*/v1/models/ctr', server.stdout.readline())
        one = {'user_id': '3', 'item_id': '4', 'tags': '1|2', 'price': 0.5}
        request = {'json': {'instances': [one]}, 'timeout': 30}
        deadline, answer = time.monotonic() + 60, None
        while answer is None or (answer.status_code == 503 and time.monotonic() < deadline):
          answer = requests.post(f'{address[0]}:predict', **request)  # 503: not loaded yet
        self.assertEqual(answer.status_code, 200, answer.text)
        self.assertBetween(answer.json()['predictions'][0], 0, 1)
      finally:
        server.terminate()

  @pytest.mark.long
  def test_better_model_and_python(self):
    """In the folder of the tutorial."""
    folder, _ = self.prepare('docs/tutorial.md')
    past, _, histories, beside = python('docs/better_model.md')
    code = [text.replace('trials=20', 'trials=1') for text in python('docs/python.md')]
    code += ["print(f'found {len(table)} trial')", LOG, past, histories, MADE]
    code += [STAND_IN, beside]
    (folder / 'pages.py').write_text('\n'.join(code))
    out = self.shell(folder, [*blocks('docs/better_model.md')[1], 'python pages.py'])
    self.assertTrue((folder / 'both.html').exists())
    self.assertIn('found 1 trial', out)
    figures = [float(text) for line in out.splitlines()[-2:] for text in line.split()]
    self.assertLen(figures, 4)


if __name__ == '__main__':
  tf.test.main()
