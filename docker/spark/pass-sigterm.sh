#!/usr/bin/env bash
# Runs spark-submit, and passes SIGTERM on to the Python program that its JVM has started. The JVM alone would stop Spark at
# once and end: the program, which gives the ranks time for a checkpoint, would never hear of the signal.
set -euo pipefail

"$@" &
submit=$!

# shellcheck disable=SC2329 # the trap calls it
pass_on() {
  local passed=
  for child in $(pgrep --parent "$submit"); do
    # The workers of a local master are children of the JVM too, and the program still needs them.
    if ! tr '\0' ' ' < "/proc/$child/cmdline" 2> /dev/null | grep --quiet pyspark.daemon; then
      kill -TERM "$child" && passed=yes
    fi
  done
  [ -n "$passed" ] || kill -TERM "$submit" || true
}
trap pass_on TERM

# A signal ends the wait, but not what is waited for.
while true; do
  code=0
  wait "$submit" || code=$?
  kill -0 "$submit" 2> /dev/null || break
done
exit "$code"
