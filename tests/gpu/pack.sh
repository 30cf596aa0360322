#!/usr/bin/env bash
# pack.sh VENV [PARTS]: packs what check.py needs on a machine that files reach in parts: the Python and the packages of VENV (made by
# `make setup STACK=next`) without what no step uses, and CUDA's libraries. The tree and its op library travel beside it.
# The parts have at most 56 MiB; unpack.sh joins them. GPU code is kept for one architecture (parts.py).
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=$(realpath "$1") parts=${2:-build/gpu_kit}
work=$(mktemp -d build/pack.XXXX)
trap 'rm -rf "$work"' EXIT
kit=$work/kit gpu=$work/kit/gpu
mkdir -p "$gpu" "$kit/lib"

# Python, with the libraries that its modules are linked to, but not those of the C and C++ run times, which every Linux has.
home=$("$venv/bin/python" -c 'import sys; print(sys.base_prefix)')
version=$("$venv/bin/python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
mkdir -p "$kit/bin"
cp "$home/bin/$version" "$kit/bin/"
tar -c -C "$home/lib" --exclude=site-packages --exclude=__pycache__ --exclude=test --exclude=tests --exclude=idlelib --exclude=tkinter \
  --exclude=turtledemo --exclude=lib2to3 --exclude=ensurepip --exclude='config-*' --exclude='_tkinter*' "$version" | tar -x -C "$kit/lib"
find "$kit/bin" "$kit/lib/$version/lib-dynload" -type f -exec env LD_LIBRARY_PATH="$home/lib" ldd {} + | awk '$2 == "=>" { print $3 }' |
  sort -u | grep -vE '/(libc|libm|libdl|librt|libpthread|libutil|libresolv|libnsl|libgcc_s|libstdc\+\+|ld-linux[^/]*)\.so' |
  xargs -I{} cp -L {} "$kit/lib/"

# Packages: those that a training run imports.
from=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
to=$kit/lib/$version/site-packages
mkdir -p "$to"
packages='absl annotated_types astunparse certifi charset_normalizer cloudpickle dateutil flatbuffers gast google h5py h5py.libs idna jinja2 markupsafe ml_dtypes
  narwhals numpy numpy.libs opt_einsum packaging pandas plotly _plotly_utils prometheus_client psutil pyarrow pydantic pydantic_core requests rich markdown_it
  mdurl pygments six.py tensorboard tensorflow termcolor tf_keras typing_extensions.py typing_inspection urllib3 wrapt yaml'
(cd "$from" && tar -c --exclude=__pycache__ --exclude=tests --exclude='*.pyi' --exclude=tensorflow/include --exclude=pyarrow/include \
  --exclude='pyarrow/libarrow_flight*' --exclude='pyarrow/_flight*' --exclude='pyarrow/_substrait*' \
  --exclude='*.pyx' --exclude='*.pxd' --exclude=pyarrow/src --exclude=plotly/labextension --exclude=tensorboard/webfiles.zip \
  $packages {tensorflow,tf_keras,numpy,plotly}-*.dist-info/METADATA) | tar -x -C "$to"

# CUDA: the oldest that this TensorFlow takes, and the smallest.
"$venv/bin/python" -m pip download -q --disable-pip-version-check --no-deps -d "$work/wheels" \
  nvidia-cublas-cu12==12.5.3.2 nvidia-cuda-runtime-cu12==12.5.82 nvidia-cuda-nvcc-cu12==12.5.82
for wheel in "$work"/wheels/*.whl; do
  "$venv/bin/python" -m zipfile -e "$wheel" "$work/cuda"
done
cp "$work"/cuda/nvidia/cublas/lib/libcublas{,Lt}.so.12 "$work/cuda/nvidia/cuda_runtime/lib/libcudart.so.12" "$gpu/"
nvcc=$to/nvidia/cuda_nvcc  # where TensorFlow looks
mkdir -p "$nvcc/bin" "$nvcc/nvvm"
install "$work/cuda/nvidia/cuda_nvcc/bin/ptxas" "$nvcc/bin/"
cp -r "$work/cuda/nvidia/cuda_nvcc/nvvm/libdevice" "$nvcc/nvvm/"
# TensorFlow wants to open these before it takes a GPU; no step of ours calls them.
for library in libcufft.so.11 libcusolver.so.11 libcusparse.so.12 libcudnn.so.9; do
  ${CC:-cc} -shared -o "$gpu/$library" -Wl,-soname,$library -x c /dev/null
done

find "$to/tensorflow" -name '*.so*' -type f -exec strip --strip-unneeded {} + 2>"$work/strip.log" || cat "$work/strip.log"
"$venv/bin/python" tests/gpu/parts.py thin "$to"/tensorflow/libtensorflow_{cc,framework}.so.2 "$gpu"/libcublas*.so.12
cat >"$kit/python" <<END
#!/bin/sh
kit=\$(dirname "\$(readlink -f "\$0")")
export PYTHONHOME=\$kit PYTHONNOUSERSITE=1 LD_LIBRARY_PATH=\$kit/gpu:\$kit/lib:\${LD_LIBRARY_PATH:-/usr/local/nvidia/lib64}
exec "\$kit/bin/$version" "\$@"
END
chmod +x "$kit/python"
tar -c -C "$kit" -f "$work/kit.tar" .
"$venv/bin/python" tests/gpu/parts.py split "$work/kit.tar" "$parts"
du -cm "$parts"/part-* | sed 's/^/MB /'
