#!/usr/bin/env bash
# Says in one sentence what a machine lacks to run Spark here; the compiler is checked by install.sh, which needs it.
set -euo pipefail
java=${JAVA_HOME:+$JAVA_HOME/bin/}java
lacks_java() {
  echo "groundswell: $1. On Debian or Ubuntu: sudo apt-get install openjdk-17-jre-headless" >&2
  exit 1
}
[ -z "${JAVA_HOME:-}" ] || command -v "$java" >/dev/null || lacks_java "JAVA_HOME=$JAVA_HOME has no bin/java: unset it, or name a Java 17 or 21"
command -v "$java" >/dev/null || lacks_java "Java is missing, and Spark needs Java 17 or 21"
version=$("$java" -version 2>&1 | sed -nE 's/.* version "([0-9]+).*/\1/p' | head -n 1)
[ "${version:-0}" -ge 17 ] || lacks_java "Java ${version:-of an unknown version} is too old, Spark needs Java 17 or 21"
# Hadoop, which comes with Spark, asks for a subject in a way that Java has given up since 23.
[ "$version" -lt 23 ] || lacks_java "Java $version is too new, Spark needs Java 17 or 21"
"$java" --list-modules | grep -q jdk.incubator.vector || lacks_java "this Java lacks the module jdk.incubator.vector, which Spark needs"
