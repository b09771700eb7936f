# The reward service: no torch and no GPU, so this image serves everywhere.
# BASE may name a digest (--build-arg BASE=python@sha256:...).
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS packages
# A compiler for the few packages that come as source; it stays in this stage.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/reward.txt /requirements.txt
RUN python3 -m venv --without-pip /opt/trivet \
    && python3 -m pip --python /opt/trivet/bin/python install --no-cache-dir --no-deps -r /requirements.txt

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin trivet \
    && install --directory --owner trivet --group trivet \
        /srv/trivet/models /srv/trivet/data /srv/trivet/runs /srv/trivet/extensions /var/cache/trivet
WORKDIR /srv/trivet
COPY --from=packages /opt/trivet /opt/trivet
COPY proto/trivet proto/trivet
COPY services services
COPY deploy/docker/healthcheck.py ./
ENV PATH=/opt/trivet/bin:$PATH \
    PYTHONPATH=/srv/trivet:/srv/trivet/proto:/srv/trivet/extensions \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/trivet \
    TRIVET__REWARD__SERVER__GRPC_PORT=50051 \
    TRIVET__REWARD__SERVER__HTTP_PORT=8080
USER 10001:10001
EXPOSE 8080 50051
HEALTHCHECK --interval=5s --timeout=10s --start-period=5m --retries=6 CMD ["python", "healthcheck.py"]
ENTRYPOINT ["python", "-m", "services.reward"]
CMD ["--config", "/etc/trivet/run.yaml"]
