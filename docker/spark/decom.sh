#!/usr/bin/env bash
# What Kubernetes runs in the pod of an executor before it ends it, where spark.decommission.enabled=true: Spark learns that
# this executor will go, so that the driver lets the ranks write a checkpoint. Spark looks for it at /opt/decom.sh.
set -euo pipefail

executor=$(pgrep --oldest --exact java)
kill -PWR "$executor"
while kill -0 "$executor" 2> /dev/null; do
  sleep 0.5
done
