# Rollout and trainer for machines without a GPU: docker build --target rollout (or trainer). The reward image is the
# same everywhere. TORCH_INDEX may name the index of PyTorch's CPU builds; without it pip's own index serves, whose
# build carries CUDA and is some GB larger.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS torch
# A compiler for the few packages that come as source; it stays in this stage.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=""
COPY requirements/torch.txt /torch.txt
RUN python3 -m venv --without-pip /opt/trivet \
    && python3 -m pip --python /opt/trivet/bin/python install --no-cache-dir \
        ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r /torch.txt

FROM torch AS rollout-packages
COPY requirements/rollout-cpu.txt /requirements.txt
RUN python3 -m pip --python /opt/trivet/bin/python install --no-cache-dir --no-deps -r /requirements.txt

FROM torch AS trainer-packages
COPY requirements/trainer.txt /requirements.txt
RUN DS_ACCELERATOR=cpu DS_BUILD_OPS=0 \
    python3 -m pip --python /opt/trivet/bin/python install --no-cache-dir --no-deps -r /requirements.txt

FROM ${BASE} AS service
# libnuma: vLLM's kernels are linked to it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin trivet \
    && install --directory --owner trivet --group trivet \
        /srv/trivet/models /srv/trivet/data /srv/trivet/runs /srv/trivet/extensions /var/cache/trivet
WORKDIR /srv/trivet
ENV PATH=/opt/trivet/bin:$PATH \
    PYTHONPATH=/srv/trivet:/srv/trivet/proto:/srv/trivet/extensions \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache/trivet \
    HF_HOME=/var/cache/trivet/huggingface \
    VLLM_CACHE_ROOT=/var/cache/trivet/vllm \
    OMP_NUM_THREADS=1
USER 10001:10001
EXPOSE 8080 50051
HEALTHCHECK --interval=5s --timeout=10s --start-period=15m --retries=6 CMD ["python", "healthcheck.py"]

FROM service AS rollout
COPY --from=rollout-packages /opt/trivet /opt/trivet
COPY proto/trivet proto/trivet
COPY services services
COPY deploy/docker/healthcheck.py ./
# vLLM compiles one small helper on CPUs, which would need a C++ compiler here; it runs as well without.
ENV TORCH_COMPILE_DISABLE=1 \
    TRIVET__ROLLOUT__SERVER__GRPC_PORT=50051 \
    TRIVET__ROLLOUT__SERVER__HTTP_PORT=8080
ENTRYPOINT ["python", "-m", "services.rollout"]
CMD ["--config", "/etc/trivet/run.yaml"]

FROM service AS trainer
COPY --from=trainer-packages /opt/trivet /opt/trivet
COPY proto/trivet proto/trivet
COPY services services
COPY examples examples
COPY deploy/docker/healthcheck.py deploy/docker/prepare.py ./
ENV DS_ACCELERATOR=cpu \
    TRIVET__TRAINER__SERVER__GRPC_PORT=50051 \
    TRIVET__TRAINER__SERVER__HTTP_PORT=8080
ENTRYPOINT ["python", "-m", "services.trainer"]
CMD ["--config", "/etc/trivet/run.yaml"]
