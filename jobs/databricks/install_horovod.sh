#!/usr/bin/env bash
# Init script of the job's cluster: installs the prebuilt Horovod, and nothing else. Building it takes minutes on every
# node and at every start.
set -euo pipefail
/databricks/python/bin/pip install --quiet --no-index --no-deps "${GROUNDSWELL_HOROVOD_WHEEL:?is set by the job}"
