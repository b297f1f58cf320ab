#!/usr/bin/env bash
# Builds a wheel of Horovod 0.28.1 for one Python and one TensorFlow, from 2.16 to 2.21.
# usage: docker/horovod/build_wheel.sh PYTHON TENSORFLOW [FOLDER] [cpu|gpu]
#   PYTHON      a version such as 3.12, or the path of an interpreter: that of the cluster
#   TENSORFLOW  the version that the cluster has, such as 2.19.0
#   FOLDER      where the wheel goes (default: dist/horovod-tensorflow-TENSORFLOW)
# The file's name says the Python and not the TensorFlow, for which the folder stands. A wheel for another TensorFlow
# installs, but does not import. Build where the C library is not newer than the cluster's: in its own image at best.
set -euo pipefail
usage="usage: build_wheel.sh PYTHON TENSORFLOW [FOLDER] [cpu|gpu]"
python=${1:?$usage}
tensorflow=${2:?$usage}
folder=$(realpath -m "${3:-dist/horovod-tensorflow-$tensorflow}")
variant=${4:-cpu}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck source=docker/horovod/uv.sh
source "$here/uv.sh"

[[ $tensorflow =~ ^2\.(16|17|18|19|20|21)\.[0-9]+$ ]] || {
  echo "groundswell: TensorFlow '$tensorflow': expected a full version from 2.16.1 to 2.21, such as 2.19.0" >&2
  exit 2
}
case $variant in
  cpu) package=tensorflow-cpu recipe=$root/pyproject.toml ;;
  gpu) package=tensorflow recipe=$here/gpu.toml ;;
  *)
    echo "groundswell: variant '$variant' is neither cpu nor gpu" >&2
    exit 2
    ;;
esac
lacks_compiler && missing "a C++ compiler (${CXX:-g++}), needed to build Horovod," g++
command -v make >/dev/null || missing "make, needed to build Horovod," make
[ "$variant" = cpu ] || [ -x /usr/local/cuda/bin/nvcc ] || missing "nvcc in /usr/local/cuda" cuda-toolkit

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bring_uv "$root/.venv-uv"
"$uv" venv --quiet --python "$python" "$work/env"
echo "groundswell: building Horovod for $("$work/env/bin/python" --version) and TensorFlow $tensorflow ($variant), 2 to 5 minutes"
# As the recipe in [tool.uv] of pyproject.toml: pip builds here, because uv would build for the locked TensorFlow.
into=(--python "$work/env/bin/python") # uv takes another one where UV_SYSTEM_PYTHON or UV_PYTHON is set
locked=(--constraints "$root/requirements.lock" --constraints "$here/requirements-build.lock") # with their hashes
"$uv" pip install "${into[@]}" --quiet "${locked[@]}" pip wheel packaging cmake setuptools cloudpickle psutil pyyaml
"$uv" pip install "${into[@]}" --quiet "$package==$tensorflow" # no lock has the versions that other TensorFlows need
mapfile -t settings < <("$work/env/bin/python" - "$recipe" <<'PYTHON'
import sys, tomllib
recipe = tomllib.load(open(sys.argv[1], "rb"))
for name, value in recipe.get("tool", {}).get("uv", recipe)["extra-build-variables"]["horovod"].items():
    print(f"{name}={value}")
PYTHON
)
grep -A 1 '^horovod==' "$root/requirements.lock" >"$work/horovod.txt" # the version and its hash
mkdir -p "$folder"
# The headers go first on the include path: they stand in for those that TensorFlow's wheel ships in part (include/README.md).
env "${settings[@]}" CXXFLAGS="-I$here/include ${CXXFLAGS:-}" PATH="$work/env/bin:$PATH" \
  "$work/env/bin/pip" wheel --quiet --disable-pip-version-check --no-cache-dir --no-build-isolation --no-deps \
  --require-hashes --requirement "$work/horovod.txt" --wheel-dir "$work/wheel" >"$work/log" 2>&1 || {
  tail -n 60 "$work/log" >&2
  echo "groundswell: Horovod does not build for TensorFlow $tensorflow; above is the end of its log" >&2
  exit 1
}
"$uv" pip install "${into[@]}" --quiet --no-deps "$work"/wheel/horovod-*.whl
[ "$variant" = gpu ] || "$work/env/bin/python" -c 'import horovod.tensorflow as hvd; assert hvd.gloo_built()' 2>"$work/log" || {
  tail -n 5 "$work/log" >&2
  echo "groundswell: Horovod was built for TensorFlow $tensorflow and does not import" >&2
  exit 1
}
mv "$work"/wheel/horovod-*.whl "$folder/"
ls "$folder"/horovod-*.whl
