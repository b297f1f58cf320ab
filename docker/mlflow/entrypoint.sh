#!/usr/bin/env bash
# Runs a command (the MLflow server) that may open its database.
# The password goes from its secret file to libpq's own variable: it is in no argument, in no address and in no log line.
set -euo pipefail
file=${MLFLOW_DATABASE_PASSWORD_FILE:?set it to the file that holds the password of the database}
[ -r "$file" ] || {
  echo "groundswell: $file is missing or not readable by user $(id -u); docker/README.md says how to make it" >&2
  exit 1
}
PGPASSWORD=$(<"$file")
export PGPASSWORD
exec "$@"
