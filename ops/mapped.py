"""Guards against memory-mapped files that are truncated while they are read."""

import ctypes

from ops import library


def tell_files_cut_short() -> None:
  """From now on, a read past the end of a truncated mapped file ends the process with status 2.

  It prints one line that names the file; otherwise such a read ends the process with a bus error.
  The rest of the last page reads as zeros instead, so check the file's size after reading it.
  """
  library.load()
  ctypes.CDLL(library.PATH).ctr_tell_files_cut_short()
