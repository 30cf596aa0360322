"""Guards against memory-mapped files that are truncated while they are read."""

import ctypes

from ops import library


def tell_files_cut_short() -> None:
  """Lets reads past the end of a truncated mapped file end the process with one line, status 2.

  The line names the file; otherwise the process would end with a bus error. Past its end, the last
  page of such a file reads as zeros, so compare the size of the file after reading it.
  """
  library.load()
  ctypes.CDLL(library.PATH).ctr_tell_files_cut_short()
