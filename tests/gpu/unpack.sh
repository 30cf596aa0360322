#!/usr/bin/env bash
# unpack.sh [PARTS [KIT]]: joins what pack.sh made. If a part is missing or damaged, it names it and fails; nothing is unpacked
# then. Afterwards KIT/python is the interpreter. It needs bash, tar, and Python 3.9 or later.
set -euo pipefail
parts=${1:-build/gpu_kit} kit=${2:-/tmp/gpu_kit}
rm -rf "$kit"
mkdir -p "$kit"
if python3 -c 'import lzma'; then
  python3 "$(dirname "$0")/parts.py" join "$parts"
else
  cat "$parts"/part-* | xz -dc -T0 # a part is a row of xz streams; what is missing shows as a broken archive
fi | tar -x -C "$kit"
"$kit/python" -c 'import sys, tensorflow as tf; print("Python", sys.version.split()[0], "TensorFlow", tf.__version__)'
