"""Reads text of libffm, as libsvm_format.py says."""

import functools

from trainer.data import libsvm_format

blocks = functools.partial(libsvm_format.blocks_of, 3)
