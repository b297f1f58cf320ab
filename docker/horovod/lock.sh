#!/usr/bin/env bash
# Resolves pyproject.toml into requirements.lock and the images' locks: hashed, no server named.
# usage: docker/horovod/lock.sh [--check]     --check only says whether requirements.lock still fits pyproject.toml
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
uv=.venv-uv/bin/uv
[ -x "$uv" ] || uv=uv
command='make lock'
extras=(--extra local --extra petastorm --extra s3 --group environment)
compile() { # [uv option...] SOURCE... -o LOCK; versions that LOCK holds are kept where they still fit
  "$uv" pip compile --quiet --generate-hashes --python-version 3.11 --custom-compile-command "$command" "$@"
}
if [ "${1:-}" = --check ]; then
  fresh=$(mktemp)
  trap 'rm -f "$fresh"' EXIT
  cp requirements.lock "$fresh"
  compile pyproject.toml --extra cpu "${extras[@]}" --group dev -o "$fresh"
  cmp -s requirements.lock "$fresh" || {
    echo "requirements.lock does not fit pyproject.toml: run make lock and commit it" >&2
    diff requirements.lock "$fresh" | grep -E '^[<>] [a-z]' | head >&2 || true
    exit 1
  }
  echo "requirements.lock fits pyproject.toml"
  exit 0
fi
compile pyproject.toml --extra cpu "${extras[@]}" --group dev -o requirements.lock
compile --config-file docker/horovod/gpu.toml pyproject.toml --extra gpu "${extras[@]}" docker/horovod/gpu.in \
  --constraints requirements.lock -o docker/horovod/requirements-gpu.lock
compile docker/horovod/build.in --constraints requirements.lock -o docker/horovod/requirements-build.lock
uv_lock=docker/horovod/requirements-uv.lock # for another version of uv, change it there first
compile - -o "$uv_lock" <<<"$(grep -oE '^uv==[0-9.]+' "$uv_lock")"
compile docker/mlflow/requirements.in --constraints requirements.lock -o docker/mlflow/requirements.lock
