#!/usr/bin/env bash
# launch/horovod_wheel.sh VERSION DIRECTORY: builds Horovod's wheel against the TensorFlow of the `python` on PATH.
# Horovod's own variables are passed on, as HOROVOD_GPU_OPERATIONS=NCCL.
set -euo pipefail
version=$1
out=$(realpath -m "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=(python -m pip --disable-pip-version-check)
"${pip[@]}" download -q --no-binary horovod --no-build-isolation --no-deps -d "$work" "horovod==$version"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
# Horovod 0.28.1 calls XLA as TensorFlow 2.17 and before had it. These are the ops for collectives inside compiled clusters, which
# are off unless HOROVOD_ENABLE_XLA_OPS is set, and which we never set.
sed -i '/xla_mpi_ops\.cc/d' "$work/horovod-$version/horovod/tensorflow/CMakeLists.txt"
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
export CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS='-include cstdint -include stdexcept -include string' MAKEFLAGS="-j$(nproc)"
"${pip[@]}" wheel -q --no-build-isolation --no-cache-dir --no-deps -w "$out" "$work/horovod-$version"
