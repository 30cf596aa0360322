"""`python -m trainer.config --print` shows every key with its default and what it means."""

import sys

from ops.policy import Policy
from trainer.config import schema_text
from trainer.config.schema import Config

if sys.argv[1:] != ['--print']:
  sys.exit(f'error: found {" ".join(sys.argv[1:])!r}; wanted python -m trainer.config --print')
print(schema_text.commented_yaml(Config, {'lifecycle': Policy}), end='')
