#!/usr/bin/env bash
# Tells Spark which GPUs a worker has (spark.worker.resource.gpu.discoveryScript): {"name": "gpu", "addresses": ["0", "1"]}
set -euo pipefail
addresses=$(nvidia-smi --query-gpu=index --format=csv,noheader | sed 's/.*/"&"/' | paste --serial --delimiters=,)
echo "{\"name\": \"gpu\", \"addresses\": [$addresses]}"
