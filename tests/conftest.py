"""What every test needs before TensorFlow is imported:

legacy Keras, quiet logs, no GPU, the root on the path, folders of plain names.
"""

import os
import pathlib
import sys
import tempfile

import pytest

os.environ['TF_USE_LEGACY_KERAS'] = '1'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
os.environ['CUDA_VISIBLE_DEVICES'] = ''
# get_temp_dir() begins so; otherwise with the name of the program, which is '<string>' under xdist.
os.environ.setdefault('TEST_TMPDIR', os.path.join(tempfile.gettempdir(), 'ctr_test_'))

ROOT = str(pathlib.Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
  sys.path.insert(0, ROOT)
# Processes that a test starts find the packages too, wherever they run.
os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [ROOT, os.environ.get('PYTHONPATH')]))


@pytest.fixture(scope='module', autouse=True)
def _no_reports(request):
  """Jobs draw no report.html, a third of a small one's time, without the mark `reports`."""
  with pytest.MonkeyPatch.context() as patch:
    if 'trainer.job.job' in sys.modules and not request.node.get_closest_marker('reports'):
      patch.setattr('trainer.tools.closing.write_report', lambda run_dir: None)
    yield


# Those that take longest begin first, so that the two workers end at about the same time.
_LONGEST = (
  *('upgrade', 'commands', 'serving', 'api', 'launch', 'parameter_server', 'reused_run', 'columns'),
  *('warm_start', 'server_step', 'made_columns', 'job', 'served', 'item_table', 'command_line'),
)


def pytest_collection_modifyitems(items):
  # test_session is a method of tf.test.TestCase, not a test.
  items[:] = [item for item in items if item.name != 'test_session']
  places = {f'{name}_test.py': place for place, name in enumerate(_LONGEST)}
  items.sort(key=lambda item: places.get(item.path.name, len(places)))
