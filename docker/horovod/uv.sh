#!/usr/bin/env bash
# Sourced by the scripts beside it. `bring_uv FOLDER` sets $uv to a new enough uv: the one on the PATH, or one in FOLDER.
set -euo pipefail

missing() {
  echo "groundswell: $1 is missing. On Debian or Ubuntu: sudo apt-get install $2" >&2
  exit 1
}
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case $scripts in
  *" "*)
    echo "groundswell: Horovod does not build in a path with spaces: $scripts" >&2
    exit 2
    ;;
esac
uv_lock=$scripts/requirements-uv.lock
uv_version=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' "$uv_lock") # the version that these scripts were tried with
# uv compares what builds a package with the hashes of these files, as it does with what is installed.
export UV_BUILD_CONSTRAINT="$scripts/../../requirements.lock $scripts/requirements-gpu.lock $scripts/requirements-build.lock"
lacks_compiler() { # CXX may have arguments, or a launcher before it, such as "ccache g++"
  local compiler=${CXX:-g++}
  ! command -v "${compiler%% *}" >/dev/null
}
newer_or_equal() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }
bring_uv() {
  local python
  python=$(command -v python3.11 || command -v python3) || missing "Python 3.11" "python3.11 python3.11-venv"
  uv=$(command -v uv || true)
  if [ -z "$uv" ] || ! newer_or_equal "$uv_version" "$("$uv" --version | cut -d ' ' -f 2)"; then
    uv=$1/bin/uv
    if [ ! -x "$uv" ] || ! newer_or_equal "$uv_version" "$("$uv" --version | cut -d ' ' -f 2)"; then
      echo "groundswell: bringing uv $uv_version"
      "$python" -m venv "$1" || missing "Python's venv module" python3.11-venv
      "$1/bin/pip" install --quiet --disable-pip-version-check --require-hashes --requirement "$uv_lock"
    fi
  fi
}
