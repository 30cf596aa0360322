"""Files that texts name are there: a name that a move left behind fails here."""

import pathlib
import re

import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = 'trainer', 'ops', 'tests', 'benchmarks', 'configs', 'launch', 'docs', 'examples'
TEXTS = {'.py', '.md', '.h', '.cc', '.sh', '.yaml'}
PATH = re.compile(rf'(?<![\w/.-])((?:{"|".join(FOLDERS)})/[\w/.-]*\w)(?![\w*{{<])')


def texts() -> list[pathlib.Path]:
  """The project's texts, this one left out."""
  found = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md']
  for folder in FOLDERS:
    found += (p for p in (ROOT / folder).rglob('*') if p.suffix in TEXTS)
  return [p for p in found if p != pathlib.Path(__file__).resolve()]


class NamesTest(tf.test.TestCase):
  def test_paths_exist(self):
    missing = []
    for text in texts():
      for name in PATH.findall(text.read_text(encoding='utf-8')):
        path = ROOT / name
        there = path.exists() or path.with_name(path.name + '.py').exists()
        if not there and not list(path.parent.glob(path.name + '*')):
          missing.append(f'{text.relative_to(ROOT)}: {name}')
    self.assertEmpty(missing)


if __name__ == '__main__':
  tf.test.main()
