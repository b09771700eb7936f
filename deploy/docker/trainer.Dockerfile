# The trainer on GPUs: PyTorch's CUDA image, and over it a venv with DeepSpeed and the rest, at the lock's versions.
# BASE may name a digest (--build-arg BASE=pytorch/pytorch@sha256:...).
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

FROM ${BASE} AS packages
# A compiler for the few packages that come as source; it stays in this stage.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/trainer.txt /requirements.txt
# No operator is compiled: the trainer uses torch's own optimizer.
RUN python3 -m venv --without-pip --system-site-packages /opt/trivet \
    && DS_BUILD_OPS=0 python3 -m pip --python /opt/trivet/bin/python install --no-cache-dir --no-deps -r /requirements.txt

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin trivet \
    && install --directory --owner trivet --group trivet \
        /srv/trivet/models /srv/trivet/data /srv/trivet/runs /srv/trivet/extensions /var/cache/trivet
WORKDIR /srv/trivet
COPY --from=packages /opt/trivet /opt/trivet
COPY proto/trivet proto/trivet
COPY services services
COPY examples examples
COPY deploy/docker/healthcheck.py deploy/docker/prepare.py ./
ENV PATH=/opt/trivet/bin:$PATH \
    PYTHONPATH=/srv/trivet:/srv/trivet/proto:/srv/trivet/extensions \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/trivet \
    HF_HOME=/var/cache/trivet/huggingface \
    TRITON_CACHE_DIR=/var/cache/trivet/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/trivet/inductor \
    TORCH_EXTENSIONS_DIR=/var/cache/trivet/torch_extensions \
    TRIVET__TRAINER__SERVER__GRPC_PORT=50051 \
    TRIVET__TRAINER__SERVER__HTTP_PORT=8080
USER 10001:10001
EXPOSE 8080 50051
HEALTHCHECK --interval=5s --timeout=10s --start-period=15m --retries=6 CMD ["python", "healthcheck.py"]
ENTRYPOINT ["python", "-m", "services.trainer"]
CMD ["--config", "/etc/trivet/run.yaml"]
