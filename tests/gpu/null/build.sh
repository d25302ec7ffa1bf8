#!/usr/bin/env bash
# Build the null GPU: PyTorch for CUDA and this project in a venv of its own (5 GB, minutes), and the
# libraries that take the place of CUDA's. README.md beside this file says what it is for.
#
#     bash tests/gpu/null/build.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
for tool in gcc nm; do
  command -v $tool > /dev/null || { echo "no $tool: install gcc and binutils" >&2; exit 2; }
done
mkdir -p "$1"
out=$(cd "$1" && pwd)
python="$out/venv/bin/python"
if [ ! -e "$out/installed" ]; then
  [ "$(df -Pk "$out" | awk 'END {print int($4 / 1e6)}')" -ge 8 ] || {
    echo "$out has less than 8 GB of free space: give another folder" >&2; exit 2; }
  "${PYTHON:-python3}" -m venv "$out/venv"
  "$python" -m pip install -q --disable-pip-version-check torch==2.11.0 nvidia-cuda-crt setuptools \
    -e "$root[data]" pytest pytest-timeout
  touch "$out/installed"
fi
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
include="$site/nvidia/cu13/include"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# functions of cuBLAS that PyTorch calls and nullgpu.c does not have: they return 0
nm -D --undefined-only "$site"/torch/lib/libtorch*.so | grep -oE '\bcublas[A-Za-z0-9_]+' | sort -u \
  > "$work/called"
grep -oE '^(int|size_t) cublas[A-Za-z0-9_]+' "$here/nullgpu.c" | awk '{print $2}' | sort -u \
  > "$work/written"
comm -23 "$work/called" "$work/written" | sed 's/.*/int &(void) { return 0; }/' > "$work/blas.inc"
# functions of the driver that Triton's header declares and drv.c does not have
"$python" - "$site/triton/backends/nvidia/include/cuda.h" "$here/drv.c" > "$work/drv.inc" << 'P'
import re
import sys

header, written = (open(path).read() for path in sys.argv[1:])
names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header))
names |= {new for _, new in re.findall(r"#define\s+(cu[A-Z]\w+)\s+(cu[A-Z]\w+_v\d)\b", header)}
names -= set(re.findall(r"^\w+ \**(cu[A-Z]\w+)\(", written, re.M))
print("\n".join(f"int {name}(void) {{ return 0; }}" for name in sorted(names)))
P
compile="gcc -O1 -w -shared -fPIC -I$work"
$compile -I"$include" -o "$out/libnullgpu.so" "$here/nullgpu.c" -lpthread
mkdir -p "$out/drv" "$out/site"
$compile -Wl,-soname,libcuda.so.1 -o "$out/drv/libcuda.so.1" "$here/drv.c" -ldl
ln -sf libcuda.so.1 "$out/drv/libcuda.so"
cp "$here/sitecustomize.py" "$out/site/"
cat > "$out/env.sh" << S
export LD_LIBRARY_PATH=$out/drv TRITON_LIBCUDA_PATH=$out/drv PYTHONPATH=$out/site:$root
export TRITON_CACHE_DIR=$out/triton TORCHINDUCTOR_CACHE_DIR=$out/inductor
export TORCH_CUDNN_SDPA_DEPRIORITIZED=1 NULL_GPU=$out
NULLGPU="env LD_PRELOAD=$out/libnullgpu.so $out/venv/bin/"
S
echo "built: . $out/env.sh; \${NULLGPU}python -m gpt_lightning doctor"
