# The MLflow server of compose.yaml: tracking, registry and artifacts, on PostgreSQL.
# docker build --file docker/mlflow.Dockerfile --tag groundswell-mlflow:0.2.0.dev0 .      (the context is the repository)
FROM python:3.11.11-slim-bookworm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /srv/mlflow
COPY docker/mlflow/requirements.lock ./
RUN pip install --no-cache-dir --require-hashes --requirement requirements.lock \
    && useradd --uid 10001 --create-home --shell /bin/bash mlflow \
    && install --directory --owner mlflow --group mlflow /srv/mlflow/artifacts
COPY docker/mlflow/entrypoint.sh ./
LABEL org.opencontainers.image.title="groundswell-mlflow" \
    org.opencontainers.image.version="0.2.0.dev0" \
    org.opencontainers.image.licenses="Apache-2.0" \
    groundswell.python="3.11.11" \
    groundswell.mlflow="3.17.2"
USER 10001:10001
EXPOSE 5000
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://localhost:5000/health', timeout=4)"]
ENTRYPOINT ["bash", "/srv/mlflow/entrypoint.sh"]
CMD ["mlflow", "server", "--host", "0.0.0.0", "--port", "5000", "--workers", "2"]
