"""Set-up and packaging: prerequisites, pinned versions, the Dockerfile, `pip install .`."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
import tensorflow as tf
import tomli
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = ('bash', 'sed', 'uname', 'make', 'cmake', 'g++', 'env', 'touch', 'mkdir', 'tail', 'awk')


def _pins(name):
  """Returns the requirements of a file that hold for this Python, without their markers."""
  lines = [line.partition('#')[0].strip() for line in (ROOT / name).read_text().splitlines()]
  requirements = [Requirement(line) for line in lines if line]
  return [f'{r.name}{r.specifier}' for r in requirements if r.marker is None or r.marker.evaluate()]


# Those of the environment that runs this.
REQUIREMENTS = (
  'requirements-next.txt'
  if f'tensorflow=={tf.__version__}' in _pins('requirements-next.txt')
  else 'requirements.txt'
)


class PrerequisitesTest(tf.test.TestCase):
  """`make` on machines that lack something: nothing is done but one line said."""

  def make(self, tools, *args, python=None):
    folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    for tool in tools:
      (folder / tool).symlink_to(shutil.which(tool))
    if python:
      (folder / 'python3').write_text(f'#!/bin/bash\n{python}\n')
      (folder / 'python3').chmod(0o755)
    env = {'PATH': str(folder), 'HOME': str(folder)}
    return subprocess.run(
      [folder / 'make', '-n', f'VENV={folder}/venv', *(args or ['setup'])],
      cwd=ROOT,
      env=env,
      capture_output=True,
      text=True,
      timeout=60,
    )

  def assert_wanted(self, done, package, missing):
    self.assertEqual(done.returncode, 2)
    self.assertEqual(done.stdout, '')
    self.assertLen(done.stderr.splitlines(), 1, done.stderr)
    self.assertIn(f'apt-get install {package}', done.stderr)
    self.assertIn(missing, done.stderr)

  def without(self, tool):
    return [t for t in TOOLS if t != tool]

  def test_each_missing_one_is_named(self):
    python = f'exec {sys.executable} "$@"'
    for goal in ('setup', 'train', 'test'):
      self.assert_wanted(self.make(TOOLS, goal), 'python3 python3-venv', 'python3 is missing')
    self.assert_wanted(
      self.make(self.without('g++'), python=python), 'g++', 'C++ compiler, is missing'
    )
    self.assert_wanted(self.make(self.without('cmake'), python=python), 'cmake', 'cmake is missing')
    no_venv = f'case "$*" in *ensurepip*) exit 1;; *) {python};; esac'
    package = f'python3.{sys.version_info[1]}-venv'
    self.assert_wanted(self.make(TOOLS, python=no_venv), package, 'has no venv')
    self.assert_wanted(self.make(TOOLS, 'setup', 'PYTHON=snake'), 'python3', 'snake is missing')
    done = self.make(TOOLS, python='case "$1" in -V) echo Python 3.9.18;; *) echo 3.9;; esac')
    self.assertEqual(done.returncode, 2)
    self.assertIn('is Python 3.9.18; wanted Python 3.10 to 3.13', done.stderr)
    done = self.make(TOOLS, 'setup', 'STACK=newest')
    self.assertEqual(done.returncode, 2)
    self.assertIn("STACK: found 'newest'; wanted next", done.stderr)

  def test_each_python_has_its_tensorflow(self):
    for version, stack, file in (
      ('3.10', '', 'requirements-next.txt'),
      ('3.11', '', 'requirements.txt'),
      ('3.11', 'next', 'requirements-next.txt'),
      ('3.13', '', 'requirements-next.txt'),
    ):
      python = f'case "$*" in -V) ;; *version_info*) echo {version};; esac'
      done = self.make(TOOLS, 'setup', f'STACK={stack}', python=python)
      self.assertEqual(done.returncode, 0, done.stderr)
      tensorflow = re.search('tensorflow==(.*)', (ROOT / file).read_text())[1]
      self.assertIn(f'Python {version} with TensorFlow {tensorflow}', done.stdout)
      self.assertIn(f'-r {file} ', done.stdout)
      self.assertEqual('without TFRA' in done.stdout, 'next' in file)


class PinsTest(tf.test.TestCase):
  def test_every_requirement_is_pinned_and_installed(self):
    for line in _pins(REQUIREMENTS) + _pins('requirements-dev.txt'):
      if line == 'opentelemetry-proto':
        continue  # its version follows that of protobuf, which differs between the stacks
      match = re.fullmatch(r'([A-Za-z0-9_.-]+)==([0-9][0-9A-Za-z.]*)', line)
      self.assertIsNotNone(match, line)
      self.assertEqual(
        importlib.metadata.version(match[1]),
        match[2],
        'make setup brings the environment up to date',
      )

  def test_what_is_pulled_in_is_listed_too(self):
    listed = {
      re.sub('[-_.]+', '-', line.partition('==')[0]).lower() for line in _pins(REQUIREMENTS)
    }
    for name in listed | {'horovod'}:
      for requirement in importlib.metadata.requires(name) or []:
        if 'extra ==' in requirement:
          continue
        requirement = Requirement(requirement)
        if requirement.marker is None or requirement.marker.evaluate():
          self.assertIn(re.sub('[-_.]+', '-', requirement.name).lower(), listed, f'{name} needs it')

  def test_versions_agree(self):
    project = tomli.loads((ROOT / 'pyproject.toml').read_text())
    for python in ('3.10', '3.11', '3.12', '3.13'):
      file = 'requirements.txt' if python == '3.11' else 'requirements-next.txt'
      pinned = set((ROOT / file).read_text().splitlines())
      for requirement in map(Requirement, project['build-system']['requires']):
        if requirement.marker and not requirement.marker.evaluate({'python_version': python}):
          continue
        if '==' in str(requirement.specifier):
          self.assertIn(f'{requirement.name}{requirement.specifier}', pinned)
    horovod = importlib.metadata.version('horovod')
    self.assertIn(f'HOROVOD := {horovod}\n', (ROOT / 'Makefile').read_text())
    self.assertIn(f'ARG HOROVOD={horovod}\n', (ROOT / 'Dockerfile').read_text())
    self.assertIn(f'## {project["project"]["version"]}', (ROOT / 'CHANGELOG.md').read_text())


class DockerfileTest(tf.test.TestCase):
  def test_copies_what_exists_and_is_let_through(self):
    ignored = (ROOT / '.dockerignore').read_text().split()
    copied = re.findall(
      r'^COPY (?!--from)(.+) \S+$', (ROOT / 'Dockerfile').read_text(), re.MULTILINE
    )
    for source in ' '.join(copied).split():
      self.assertTrue((ROOT / source).exists(), source)
      self.assertTrue({f'!{source}', '!' + source.partition('/')[0]} & {*ignored}, source)


@pytest.mark.long
class InstallTest(tf.test.TestCase):
  def test_pip_install_builds_the_op_library_and_asks_for_its_tensorflow(self):
    target = pathlib.Path(self.get_temp_dir()) / 'site'
    subprocess.run(
      [
        sys.executable,
        '-m',
        'pip',
        'install',
        '-q',
        '--disable-pip-version-check',
        '--no-build-isolation',
        '--no-deps',
        '--target',
        target,
        '.',
      ],
      cwd=ROOT,
      check=True,
      timeout=900,
      stdin=subprocess.DEVNULL,
    )
    (installed,) = importlib.metadata.distributions(name='ctr-trainer', path=[str(target)])
    required = [r for r in installed.requires if 'extra ==' not in r]
    self.assertIn(f'tensorflow=={tf.__version__}', required)
    for requirement in map(Requirement, required):
      version = importlib.metadata.version(requirement.name)
      self.assertTrue(requirement.specifier.contains(version), requirement)
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    probe = (
      'from ops import library as o; import trainer.config as c; '
      'print(o.__file__, c.__file__, o.load().__name__, sep="\\n")'
    )
    found = subprocess.run(
      [sys.executable, '-c', probe],
      cwd=self.get_temp_dir(),
      env={**env, 'PYTHONPATH': str(target)},
      capture_output=True,
      text=True,
      timeout=120,
    )
    self.assertEqual(found.returncode, 0, found.stderr)
    for path in found.stdout.splitlines()[:2]:
      self.assertTrue(path.startswith(str(target)), path)
    scripts = tomli.loads((ROOT / 'pyproject.toml').read_text())['project']['scripts']
    self.assertIn('ctr-train', scripts)
    for script in scripts:
      self.assertTrue((target / 'bin' / script).exists(), script)
      told = subprocess.run(
        [sys.executable, target / 'bin' / script, '--help'],
        cwd=self.get_temp_dir(),
        env={**env, 'PYTHONPATH': str(target)},
        capture_output=True,
        text=True,
        timeout=120,
      )
      self.assertEqual(told.returncode, 0, told.stderr)
      self.assertIn(script, told.stdout)
      self.assertLess(max(map(len, told.stdout.splitlines())), 101)


if __name__ == '__main__':
  tf.test.main()
