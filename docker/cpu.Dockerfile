# Driver, executors and MLflow client on CPUs.
# docker build --file docker/cpu.Dockerfile --tag groundswell-cpu:0.2.0.dev0 .      (the context is the repository)
FROM python:3.11.11-slim-bookworm AS builder
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

# Byte code is written here: the user of the final image may not write it, and every process would compile TensorFlow anew.
ENV PATH=/opt/groundswell-uv/bin:$PATH \
    UV_BUILD_CONSTRAINT=/src/docker/horovod/requirements-build.lock \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_PYTHON_DOWNLOADS=never \
    VIRTUAL_ENV=/opt/groundswell
WORKDIR /src
COPY pyproject.toml requirements.lock ./
COPY docker/horovod docker/horovod
# The cache keeps the compiled Horovod between builds.
RUN --mount=type=cache,target=/root/.cache/uv \
    bash docker/horovod/install.sh /opt/groundswell cpu
# requirements.lock holds the development tools too: this resolves to the same versions without them, so it only removes.
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip compile --quiet pyproject.toml --extra cpu --extra local --extra petastorm --extra s3 --group environment \
    --constraints requirements.lock --generate-hashes --output-file /tmp/runtime.txt \
    && uv pip sync --quiet --require-hashes /tmp/runtime.txt

COPY README.md hatch_build.py groundswell.py ./
COPY jobs jobs
COPY pipelines pipelines
COPY models models
COPY conf conf
RUN --mount=type=cache,target=/root/.cache/uv \
    uv build --quiet --wheel --out-dir /tmp/wheel \
    && python -m zipfile --list /tmp/wheel/*.whl | grep groundswell_kernels_ \
    && uv pip install --quiet --no-deps /tmp/wheel/*.whl
# TensorFlow's headers have built Horovod, and nothing reads them afterwards: 290 MB.
RUN rm --recursive /opt/groundswell/lib/python3.11/site-packages/tensorflow/include

FROM python:3.11.11-slim-bookworm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# libexpat1: rasterio's wheel leaves it to the system. procps: Spark's scripts call ps.
# /opt/jobs: a short path for spark-submit. /data: named volumes take over its owner when they are first used.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libexpat1 openjdk-17-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --shell /bin/bash groundswell \
    && install --directory --owner groundswell --group groundswell /data/datasets /data/artifacts /var/lib/spark \
    && ln --symbolic /opt/groundswell/lib/python3.11/site-packages/jobs /opt/jobs
# The same path as in the builder: the scripts of an environment name it in their first line.
COPY --from=builder /opt/groundswell /opt/groundswell
COPY docker/spark/entrypoint.sh docker/spark/pass-sigterm.sh /opt/spark/
COPY docker/spark/decom.sh /opt/decom.sh

ENV PATH=/opt/groundswell/bin:$PATH \
    JAVA_HOME=/usr/lib/jvm/java-17-openjdk-amd64 \
    SPARK_HOME=/opt/groundswell/lib/python3.11/site-packages/pyspark \
    SPARK_LOCAL_DIRS=/var/lib/spark/local \
    SPARK_WORKER_DIR=/var/lib/spark/work \
    PYSPARK_PYTHON=/opt/groundswell/bin/python \
    PYSPARK_DRIVER_PYTHON=/opt/groundswell/bin/python
# Equal to the locks, which a test compares.
LABEL org.opencontainers.image.title="groundswell-cpu" \
    org.opencontainers.image.version="0.2.0.dev0" \
    org.opencontainers.image.licenses="Apache-2.0" \
    groundswell.python="3.11.11" \
    groundswell.java="17" \
    groundswell.pyspark="4.0.5" \
    groundswell.tensorflow="2.21.0" \
    groundswell.keras="3.15.1" \
    groundswell.horovod="0.28.1" \
    groundswell.mlflow="3.17.2"
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /home/groundswell
# Runs any command, and what Spark on Kubernetes asks for.
ENTRYPOINT ["/opt/spark/entrypoint.sh"]
CMD ["groundswell", "--help"]
