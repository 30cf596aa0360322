"""Guards against memory-mapped files that are truncated while they are read."""

import ctypes

from ops import library


def tell_files_cut_short() -> None:
  """Makes a read past the new end of a truncated mapped file end the process with status 2 and one
  line that names the file, rather than with a bus error.

  The last page of such a file stays mapped and reads as zeros past the end, so compare the size of
  the file after reading it.
  """
  library.load()
  ctypes.CDLL(library.PATH).ctr_tell_files_cut_short()
