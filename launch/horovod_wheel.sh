#!/usr/bin/env bash
# launch/horovod_wheel.sh VERSION DIRECTORY [gpu]: builds Horovod's wheel against the TensorFlow of the `python` on PATH.
# gpu: with NCCL, from the packages of tensorflow[and-cuda], on any machine: no GPU, driver or CUDA development kit is needed. clang 19 compiles
# Horovod's one file of kernels ($CLANG, clang++-19) for the compute capabilities $CUDA_ARCHITECTURES (70 75 80 86 89 90).
set -euo pipefail
version=$1
out=$(realpath -m "$2")
device=${3:-cpu}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=(python -m pip --disable-pip-version-check)
"${pip[@]}" download -q --no-binary horovod --no-build-isolation --no-deps -d "$work" "horovod==$version"
source=$work/horovod-$version
tar -xzf "$source.tar.gz" -C "$work"
# Horovod 0.28.1 calls XLA as TensorFlow 2.17 and before had it. These are the ops for collectives inside compiled clusters, which
# are off unless HOROVOD_ENABLE_XLA_OPS is set, and which we never set.
sed -i '/xla_mpi_ops\.cc/d' "$source/horovod/tensorflow/CMakeLists.txt"
# Its flatbuffers assign to a constant, which GCC 14 (Debian 13) refuses.
sed -i 's/  const size_type count_;/  size_type count_;/' "$source/third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
# TensorFlow 2.21 has no AsGpuStreamValue; both of ours know a CUDA stream by its handle. A template, for the class is defined further down.
sed -i 's/^GpuStreamHandle AsGpuStreamValue(Stream\* stream);/template <class S> GpuStreamHandle AsGpuStreamValue(S* stream) {\
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\
}/' "$source/horovod/tensorflow/mpi_ops.cc"
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
export CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS='-include cstdint -include stdexcept -include string' MAKEFLAGS="-j$(nproc)"

if [ "$device" = gpu ]; then
  # A CUDA home of links to the packages of TensorFlow. They lack fatbinary, which packs kernels, and a part of the headers.
  cuda=$work/cuda
  mkdir -p "$cuda"/{bin,lib64,nvvm} "$work/more"
  "${pip[@]}" download -q --no-deps -d "$work/more" nvidia-cuda-nvcc==13.0.88 nvidia-cuda-cccl-cu12==12.9.27
  for wheel in "$work"/more/*.whl; do python -m zipfile -e "$wheel" "$work/more"; done
  nvidia=$(python -c 'import importlib.util; print(importlib.util.find_spec("nvidia").submodule_search_locations[0])')
  cp -rsf "$nvidia"/{cuda_runtime,cuda_nvcc,curand,nccl}/include "$work/more/nvidia/cuda_cccl/include" "$cuda"
  ln -s "$nvidia/cuda_nvcc/nvvm/libdevice" "$cuda/nvvm"
  ln -s "$nvidia/cuda_nvcc/bin/ptxas" "$cuda/bin"
  ln -s "$nvidia/cuda_runtime/lib/libcudart.so.12" "$cuda/lib64/libcudart.so"
  ln -s "$nvidia/nccl/lib/libnccl.so.2" "$cuda/lib64/libnccl.so"
  install "$work/more/nvidia/cu13/bin/fatbinary" "$cuda/bin/fatbinary-13"
  # clang 19 names images as fatbinary of CUDA 12 wants it.
  printf '%s\n' '#!/usr/bin/env bash' 'for a; do set -- "$@" "$(sed -E "s/^--image=profile=sm_/--image3=kind=elf,sm=/; s/^--image=profile=compute_/--image3=kind=ptx,sm=/" <<<"$a")"; shift; done' \
    'exec "$0-13" --compress-mode=none "$@"' >"$cuda/bin/fatbinary"
  chmod +x "$cuda/bin/fatbinary"
  "${CLANG:-clang++-19}" -x cuda --cuda-path="$cuda" $(printf -- '--cuda-gpu-arch=sm_%s ' ${CUDA_ARCHITECTURES:-70 75 80 86 89 90}) \
    -O3 -std=c++17 -fPIC -I"$source" -c "$source/horovod/common/ops/cuda/cuda_kernels.cu" -o "$work/kernels.o"
  # In place of CMake's search for nvcc: what was compiled, and libraries that are found beside Horovod when it is loaded.
  cat >"$source/horovod/common/ops/cuda/CMakeLists.txt" <<CMAKE
foreach(kernels horovod_cuda_kernels compatible_horovod_cuda_kernels)
  add_library(\${kernels} INTERFACE)
  target_link_libraries(\${kernels} INTERFACE $work/kernels.o)
endforeach()
CMAKE
  sed -i "/^include(CheckLanguage)/,/^macro(ADD_CUDA)/{/^macro/!d}; s|find_package(CUDAToolkit REQUIRED)|set(CUDAToolkit_INCLUDE_DIRS $cuda/include)\n\
    set(CUDAToolkit_LIBRARY_DIR $cuda/lib64)\n\
    include_directories(SYSTEM $cuda/include)\n\
    list(APPEND LINKER_LIBS $cuda/lib64/libcudart.so)\n\
    set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n\
    set(CMAKE_INSTALL_RPATH \"\\\\\$ORIGIN/../../nvidia/nccl/lib;\\\\\$ORIGIN/../../nvidia/cuda_runtime/lib\")|" "$source/CMakeLists.txt"
  export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
fi
"${pip[@]}" wheel -q --no-build-isolation --no-cache-dir --no-deps -w "$out" "$source"
