#!/usr/bin/env bash
# What a container of these images runs: the driver or an executor, as Spark on Kubernetes calls it, or any command.
# The contract (first argument, variables SPARK_*) is that of the image that Spark itself builds, which PyPI's pyspark lacks.
set -euo pipefail

classpath="${SPARK_CONF_DIR:+$SPARK_CONF_DIR:}$SPARK_HOME/jars/*${SPARK_EXTRA_CLASSPATH:+:$SPARK_EXTRA_CLASSPATH}"
case ${1:-} in
  driver)
    shift
    exec tini -s -- "$(dirname "$0")/pass-sigterm.sh" "$SPARK_HOME/bin/spark-submit" \
      --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
      --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" \
      --deploy-mode client "$@"
    ;;
  executor)
    shift
    # SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, ...: one option each, in the order of their numbers.
    options=()
    number=0
    while name=SPARK_JAVA_OPT_$number && [ -n "${!name+set}" ]; do
      options+=("${!name}")
      number=$((number + 1))
    done
    exec tini -s -- "$JAVA_HOME/bin/java" "${options[@]}" \
      "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" -cp "$classpath" \
      org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
      --driver-url "$SPARK_DRIVER_URL" \
      --executor-id "$SPARK_EXECUTOR_ID" \
      --cores "$SPARK_EXECUTOR_CORES" \
      --app-id "$SPARK_APPLICATION_ID" \
      --hostname "$SPARK_EXECUTOR_POD_IP" \
      --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
      --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
  *) exec tini -- "$@" ;;
esac
