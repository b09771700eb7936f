# The rollout on GPUs: vLLM's own image, and over it a venv with what else the service needs, at the lock's versions.
# BASE may name a digest (--build-arg BASE=vllm/vllm-openai@sha256:...).
ARG BASE=vllm/vllm-openai:v0.32.0

FROM ${BASE} AS packages
COPY requirements/rollout.txt /requirements.txt
RUN python3 -m venv --without-pip --system-site-packages /opt/trivet \
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
    HF_HOME=/var/cache/trivet/huggingface \
    VLLM_CACHE_ROOT=/var/cache/trivet/vllm \
    TRITON_CACHE_DIR=/var/cache/trivet/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/trivet/inductor \
    TRIVET__ROLLOUT__SERVER__GRPC_PORT=50051 \
    TRIVET__ROLLOUT__SERVER__HTTP_PORT=8080
USER 10001:10001
EXPOSE 8080 50051
HEALTHCHECK --interval=5s --timeout=10s --start-period=15m --retries=6 CMD ["python", "healthcheck.py"]
ENTRYPOINT ["python", "-m", "services.rollout"]
CMD ["--config", "/etc/trivet/run.yaml"]
