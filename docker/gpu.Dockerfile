# Driver and executors on NVIDIA GPUs: Horovod on NCCL.
# docker build --file docker/gpu.Dockerfile --tag groundswell-gpu:0.2.0.dev0 .      (the context is the repository)
# The CUDA image gives the compiler and the NCCL headers only. Python is the one of the CPU image (Ubuntu 22.04 packages a
# release candidate of 3.11), and at run time CUDA, cuDNN and NCCL are the wheels of requirements-gpu.lock: what this
# TensorFlow asks for, once. The driver comes from the NVIDIA container runtime (docker run --gpus all).
FROM nvidia/cuda:12.9.1-devel-ubuntu22.04 AS cuda
RUN mkdir --parents /nccl/include /nccl/lib \
    && cp --archive /usr/include/nccl*.h /nccl/include/ \
    && cp --archive /usr/lib/x86_64-linux-gnu/libnccl.so* /nccl/lib/

FROM python:3.11.11-slim-bookworm AS builder
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
# Where docker/horovod/gpu.toml expects them.
COPY --from=cuda /usr/local/cuda-12.9 /usr/local/cuda
COPY --from=cuda /nccl /usr

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
    bash docker/horovod/install.sh /opt/groundswell gpu

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
COPY docker/spark/discover-gpus.sh docker/spark/entrypoint.sh docker/spark/pass-sigterm.sh /opt/spark/
COPY docker/spark/decom.sh /opt/decom.sh
# Horovod is linked to libnccl.so.2. The loader's own list finds the wheel's whatever environment a worker is started with.
RUN echo /opt/groundswell/lib/python3.11/site-packages/nvidia/nccl/lib > /etc/ld.so.conf.d/groundswell.conf \
    && ldconfig

ENV PATH=/opt/groundswell/bin:$PATH \
    JAVA_HOME=/usr/lib/jvm/java-17-openjdk-amd64 \
    SPARK_HOME=/opt/groundswell/lib/python3.11/site-packages/pyspark \
    SPARK_LOCAL_DIRS=/var/lib/spark/local \
    SPARK_WORKER_DIR=/var/lib/spark/work \
    PYSPARK_PYTHON=/opt/groundswell/bin/python \
    PYSPARK_DRIVER_PYTHON=/opt/groundswell/bin/python \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Equal to the locks, which a test compares.
LABEL org.opencontainers.image.title="groundswell-gpu" \
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
