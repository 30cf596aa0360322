"""The Kubernetes manifests: their shape, what they name, and how a pod that is taken away ends."""

import copy
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import jsonschema
import tensorflow as tf
import tomli
import yaml

from tests.support import jobs
from tests.support.commands import ROOT

KUBERNETES = ROOT / 'launch' / 'kubernetes'
SHAPES = yaml.safe_load((ROOT / 'tests' / 'support' / 'manifests.yaml').read_text('utf-8'))
PROJECT = tomli.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']
_QUANTITY = {'type': 'string', 'pattern': r'^\d+(\.\d+)?(m|[KMGTPE]i?)?$'}
_TEXTS = {'type': 'object', 'additionalProperties': {'type': 'string'}}
TYPES = {
  'text': {'type': 'string'},
  'texts': _TEXTS,
  'flag': {'type': 'boolean'},
  'count': {'type': 'integer', 'minimum': 0, 'maximum': 2**31 - 1},
  'port': {'type': 'integer', 'minimum': 1, 'maximum': 65535},
  'path': {'type': 'string', 'pattern': '^/'},
  'name': {'type': 'string', 'pattern': '^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$'},
  'quantity': _QUANTITY,
  'quantities': {
    'type': 'object',
    'additionalProperties': _QUANTITY,
    'propertyNames': {'pattern': r'^(cpu|memory|ephemeral-storage|[a-z.]+/[a-z.-]+)$'},
  },
}
# What Pod Security "restricted" wants.
POD_RESTRICTED = {'runAsNonRoot': True, 'seccompProfile': {'type': 'RuntimeDefault'}}
RESTRICTED = {'allowPrivilegeEscalation': False, 'capabilities': {'drop': ['ALL']}}


def schema(shape) -> dict:
  """The JSON schema of a shape in tests/support/manifests.yaml."""
  if isinstance(shape, list):
    return {'type': 'array', 'items': schema(shape[0]), 'minItems': 1}
  if isinstance(shape, dict):
    return {
      'type': 'object',
      'properties': {key.rstrip('!'): schema(value) for key, value in shape.items()},
      'required': [key[:-1] for key in shape if key.endswith('!')],
      'additionalProperties': False,
    }
  if shape.startswith('+'):
    return schema(SHAPES[shape[1:]])
  return TYPES.get(shape) or {'enum': shape.split('|')}


def whole(manifest) -> dict:
  kind = schema(SHAPES[f'{manifest["apiVersion"]} {manifest["kind"]}'])
  head = {
    'apiVersion!': 'text',
    'kind!': 'text',
    'metadata!': {'name!': 'name', 'labels': 'texts'},
    'spec!': 'text',
  }
  found = schema(head)
  found['properties']['spec'] = kind
  return found


def templates(node):
  """The pod templates below a node, each once."""
  if isinstance(node, dict):
    if 'containers' in node.get('spec', {}):
      yield node
    else:
      for value in node.values():
        yield from templates(value)
  elif isinstance(node, list):
    for value in node:
      yield from templates(value)


class ManifestsTest(tf.test.TestCase):
  def setUp(self):
    super().setUp()
    self.manifests = [
      (path.name, manifest)
      for path in sorted(KUBERNETES.rglob('*.yaml'))
      for manifest in yaml.safe_load_all(path.read_text('utf-8'))
    ]
    self.pods = [(name, pod) for name, one in self.manifests for pod in templates(one)]
    self.assertLen(self.pods, 11)

  def of(self, file, kind):
    (found,) = [one for name, one in self.manifests if (name, one['kind']) == (file, kind)]
    return found

  def test_they_follow_their_shapes(self):
    for name, manifest in self.manifests:
      errors = jsonschema.Draft202012Validator(whole(manifest)).iter_errors(manifest)
      self.assertEmpty([f'{e.json_path}: {e.message}' for e in errors], name)

  def test_the_shapes_refuse(self):
    breakages = (
      lambda pod: pod['spec'].update(restartPolicy='Sometimes'),
      lambda pod: pod['spec'].update(terminationGracePeriod=9),
      lambda pod: pod['spec']['containers'][0].pop('image'),
      lambda pod: pod['spec']['containers'][0]['securityContext'].update(privileged=True),
      lambda pod: pod['spec']['containers'][0]['resources']['limits'].update(cpu=2),
    )
    for name, manifest in self.manifests:
      for breakage in breakages if list(templates(manifest)) else ():
        broken = copy.deepcopy(manifest)
        breakage(next(templates(broken)))
        with self.assertRaises(jsonschema.ValidationError, msg=name):
          jsonschema.validate(broken, whole(manifest))

  def test_pods_are_restricted(self):
    for name, pod in self.pods:
      spec = pod['spec']
      for key, value in POD_RESTRICTED.items():
        self.assertEqual(spec['securityContext'][key], value, name)
      self.assertGreater(spec['securityContext']['runAsUser'], 0)
      for container in spec['containers']:
        self.assertEqual(container['securityContext'], RESTRICTED, name)
      self.assertFalse(spec['automountServiceAccountToken'])

  def test_names_agree(self):
    for name, pod in self.pods:
      spec = pod['spec']
      for container in spec['containers']:
        self.assertEqual(container['image'], f'ctr-trainer:{PROJECT["version"]}-cpu', name)
        mounts = [mount['name'] for mount in container['volumeMounts']]
        self.assertSameElements(mounts, [volume['name'] for volume in spec['volumes']], name)
        folders = [mount['mountPath'] for mount in container['volumeMounts']]
        ports = {port['name']: port['containerPort'] for port in container.get('ports', [])}
        for probe in ('startupProbe', 'readinessProbe', 'livenessProbe'):
          if probe in container:
            how = container[probe].get('httpGet') or container[probe]['tcpSocket']
            self.assertIn(how['port'], ports, name)
        scraped = pod['metadata'].get('annotations', {}).get('prometheus.io/port')
        self.assertTrue(scraped is None or int(scraped) in ports.values(), name)
        words = [*container['command'], *container.get('args', [])]
        commands = [word for word in words if word.startswith('ctr-')]
        self.assertContainsSubset(commands, PROJECT['scripts'], name)
        for word in words:
          if word.startswith('launch/'):
            self.assertTrue(os.access(ROOT / word, os.X_OK), word)
          if word.startswith('/secret/'):
            self.assertIn('/secret', folders)
        for env in container.get('env', []):
          if env['name'] in ('CTR_SECRET_FILE', 'CTR_WORK_DIR'):
            self.assertIn('/' + env['value'].split('/')[1], folders)
        if commands == ['ctr-train'] or commands == ['ctr-publish']:
          self.assertEqual(words[words.index('--metrics_port') + 1], str(ports['metrics']))
          self.assertEqual(words[words.index('--metrics_host') + 1], '0.0.0.0')
    for container in (
      self.of('mpijob.yaml', 'MPIJob')['spec']['mpiReplicaSpecs']['Worker'],
      self.of('trainjob.yaml', 'TrainingRuntime')['spec']['template']['spec']['replicatedJobs'][0],
    ):
      (pod,) = templates(container)
      config = pod['spec']['containers'][0]['args'][-1]
      self.assertEqual(os.path.dirname(config) + '/.ssh', '/home/ctr/.ssh')
      self.assertIn(f'>{config}', (ROOT / 'Dockerfile').read_text('utf-8'))
    for pod in templates(self.of('tfjob.yaml', 'TFJob')):
      (container,) = pod['spec']['containers']
      self.assertEqual(container['name'], 'tensorflow')  # the training operator looks for it
      self.assertIn('CTR_SECRET_FILE', [env['name'] for env in container['env']])

  def test_what_is_served(self):
    file = 'serving.yaml'
    service, budget, scaler = (
      self.of(file, kind) for kind in ('Service', 'PodDisruptionBudget', 'HorizontalPodAutoscaler')
    )
    deployments = {
      one['metadata']['name']: one
      for name, one in self.manifests
      if (name, one['kind']) == (file, 'Deployment')
    }
    words = {}
    for name, deployment in deployments.items():
      pod = deployment['spec']['template']
      selected = deployment['spec']['selector']['matchLabels']
      self.assertContainsSubset(selected.items(), pod['metadata']['labels'].items())
      (container,) = pod['spec']['containers']
      words[name] = container['args']
    value = lambda name, flag: words[name][words[name].index(flag) + 1]
    self.assertEqual(value('ctr-publisher', '--to'), value('ctr-scorer', '--store'))
    self.assertIn('--token_file', words['ctr-scorer'])  # all in the cluster may send to it
    self.assertEqual(scaler['spec']['scaleTargetRef']['name'], 'ctr-scorer')
    self.assertNotIn('replicas', deployments['ctr-scorer']['spec'])  # the autoscaler's
    labels = deployments['ctr-scorer']['spec']['template']['metadata']['labels']
    (spread,) = deployments['ctr-scorer']['spec']['template']['spec']['topologySpreadConstraints']
    self.assertEqual(spread['topologyKey'], 'kubernetes.io/hostname')
    self.assertContainsSubset(spread['labelSelector']['matchLabels'].items(), labels.items())
    for selector in (service['spec']['selector'], budget['spec']['selector']['matchLabels']):
      self.assertContainsSubset(selector.items(), labels.items())
    (container,) = deployments['ctr-scorer']['spec']['template']['spec']['containers']
    for probe in ('startupProbe', 'readinessProbe', 'livenessProbe'):
      self.assertEqual(container[probe]['httpGet']['path'], '/healthz')
    ports = {port['name']: port['containerPort'] for port in container['ports']}
    self.assertContainsSubset([p['targetPort'] for p in service['spec']['ports']], ports)
    self.assertEqual(ports['grpc'], int(value('ctr-scorer', '--grpc_port')))

  def test_the_network_is_closed_to_all_pods_of_ours(self):
    policies = {
      one['metadata']['name']: one['spec']
      for name, one in self.manifests
      if one['kind'] == 'NetworkPolicy'
    }
    everyone = policies['ctr-closed']['podSelector']['matchLabels']
    apps = set()
    for name, pod in self.pods:
      labels = pod['metadata']['labels']
      self.assertContainsSubset(everyone.items(), labels.items(), name)
      apps.add(labels['app'])
    self.assertSameElements(apps, ['ctr-trainer', 'ctr-ranks', 'ctr-publisher', 'ctr-scorer'])
    for policy in policies.values():
      for rule in policy['ingress']:
        self.assertNotEmpty(rule['from'])  # an empty one admits everyone
    (open_to_ranks,) = policies['ctr-ranks']['ingress']
    self.assertEqual(open_to_ranks['from'], [{'podSelector': policies['ctr-ranks']['podSelector']}])


class PodTest(tf.test.TestCase):
  """SIGTERM at the first process of a pod, in a process namespace of its own."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.get_temp_dir()))
    self.config = jobs.write_config(str(self.folder))
    self.run = ['--config', self.config, '--run_dir', str(self.folder / 'run')]
    self.own = ['unshare', '-pf', '--kill-child', '--mount-proc']
    if os.geteuid() or not shutil.which('unshare') or not shutil.which('nsenter'):
      raise unittest.SkipTest('a pod of its own needs root, unshare and nsenter')
    if subprocess.run([*self.own, 'true'], capture_output=True, check=False).returncode:
      raise unittest.SkipTest('this machine allows no process namespaces')

  def pod(self, *command, **kwargs):
    """Starts a command as in a pod; returns the process and the id of the pod's first process."""
    words = [*self.own, KUBERNETES / 'pod.sh', *command]
    process = subprocess.Popen(words, cwd=ROOT, **kwargs)
    self.addCleanup(process.kill)
    children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
    while not (found := children.read_text().split()):
      self.assertIsNone(process.poll())
    return process, int(found[0])

  def assert_saved(self):
    lines = (self.folder / 'run' / 'metrics.jsonl').read_text('utf-8').splitlines()
    events = [json.loads(line)['event'] for line in lines]
    self.assertEqual(events[-2:], ['save', 'end'])

  def test_a_trainer_saves_its_state(self):
    command = [sys.executable, '-m', 'trainer.run', *self.run]
    env = os.environ | {'PYTHONUNBUFFERED': '1', 'CTR_THREADS': '1'}
    process, first = self.pod(
      *command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output = ''
    for line in process.stdout:
      output += line
      if 'epoch 1 ' in line:
        os.kill(first, signal.SIGTERM)
        break
    output += process.stdout.read()
    self.assertEqual(process.wait(timeout=120), 130, output)  # no success, so it is started again
    self.assert_saved()

  def test_the_ranks_of_a_worker_save_their_state(self):
    """nsenter takes the place of ssh: ranks are started beside the pod's first process."""
    worker, first = self.pod('sleep', 'infinity')
    ssh = self.folder / 'bin' / 'ssh'
    ssh.parent.mkdir()
    ssh.write_text(
      f'#!/bin/sh\nfor last; do :; done\nexec nsenter -t {first} -p -m sh -c "$last"\n'
    )
    ssh.chmod(0o755)
    (self.folder / 'hosts').write_text('worker-0 slots=2\n')
    env = os.environ | {'PATH': f'{ssh.parent}:{os.environ["PATH"]}', 'CTR_THREADS': '1'}
    words = [ROOT / 'launch' / 'cluster.sh', '-i', 'lo', self.folder / 'hosts', *self.run]
    launcher = subprocess.Popen(
      words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    self.addCleanup(launcher.kill)
    output = ''
    for line in launcher.stdout:
      output += line
      if re.search('epoch 1 ', line):
        os.kill(first, signal.SIGTERM)
        break
    output += launcher.stdout.read()
    self.assertEqual(launcher.wait(timeout=120), 130, output)
    self.assertEqual(worker.wait(timeout=60), 130)
    self.assert_saved()


if __name__ == '__main__':
  tf.test.main()
