"""What every test needs before TensorFlow is imported:

legacy Keras, quiet logs, no GPU, the root on the path, folders of plain names.
"""

import os
import pathlib
import sys
import tempfile

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


def pytest_collection_modifyitems(items):
  items[:] = [
    item for item in items if item.name != 'test_session'
  ]  # a method of tf.test.TestCase, not a test
