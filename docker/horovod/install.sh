#!/usr/bin/env bash
# Makes one Python environment from the lock, with Horovod built for this TensorFlow.
# usage: docker/horovod/install.sh ENVIRONMENT [cpu|gpu] [--editable]      (used by the Makefile and by the Dockerfiles)
# --editable also installs this checkout, so that changes to it need no new install.
# Safe to repeat: an environment that is up to date is left as it is.
set -euo pipefail
environment=$(realpath -m "${1:?usage: install.sh ENVIRONMENT [cpu|gpu] [--editable]}")
variant=${2:-cpu}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck source=docker/horovod/uv.sh
source "$here/uv.sh"

lacks_compiler && missing "a C++ compiler (${CXX:-g++}), needed to build Horovod," g++
command -v make >/dev/null || missing "make, needed to build Horovod," make
bring_uv "$environment-uv" # beside the environment, so that syncing never removes it

# The headers go first on the include path: they stand in for those that the TensorFlow wheel no longer ships (include/README.md).
export CXXFLAGS="-I$here/include ${CXXFLAGS:-}"
settings=()
case $variant in
  cpu) lock=$root/requirements.lock ;;
  gpu) lock=$here/requirements-gpu.lock settings=(--config-file "$here/gpu.toml") ;;
  *)
    echo "groundswell: variant '$variant' is neither cpu nor gpu" >&2
    exit 2
    ;;
esac

[ "$variant" = cpu ] || [ -x /usr/local/cuda/bin/nvcc ] || missing "nvcc in /usr/local/cuda" cuda-toolkit
cd "$root" # uv reads the build recipe of Horovod from pyproject.toml
# One that was copied or moved runs the programs of its old place, and one whose Python was removed runs none.
is_whole() { "$environment/bin/python" -c '' && grep -qF "'$environment'" "$environment/bin/activate"; }
if ! is_whole 2>/dev/null; then
  clear=()
  [ ! -e "$environment/pyvenv.cfg" ] || clear=(--clear) # only an environment is removed, and no other folder
  "$uv" venv --quiet "${clear[@]}" --python 3.11 "$environment"
fi
echo "groundswell: installing the locked packages; the first time this compiles Horovod (2 to 5 minutes)"
# Named, because uv takes another Python where UV_SYSTEM_PYTHON or UV_PYTHON is set, and removes what is not in the lock.
into=(--python "$environment/bin/python")
"$uv" "${settings[@]}" pip sync "${into[@]}" --quiet --require-hashes "$lock"
if [ "${3:-}" = --editable ]; then
  # Always compiled again: what it compiles is in this checkout, not in uv's cache.
  "$uv" pip install "${into[@]}" --quiet --no-deps --reinstall-package groundswell --editable .
  for folder in models/compression/kernels pipelines/dataset/gather; do
    compgen -G "$folder/*.so" >/dev/null \
      || echo "groundswell: the C++ of $folder was not compiled: compression or reading takes longer" >&2
  done
fi
