# syntax=docker/dockerfile:1

# The image of the proxy. One stage builds the wheel and installs it into a virtual environment; the other one has Python and that
# environment only. It runs as an unprivileged user, writes no file, and works with a read-only root.
#
#     docker build --tag tokencache .
#     docker run --read-only --publish 8100:8100 --env TOKENCACHE_UPSTREAM=http://engine:8000 --env TOKENCACHE_ADMIN_KEY tokencache
#
# Extras of the package that the proxy needs: --build-arg EXTRAS=local,experts. What it depends on has the versions of requirements.lock,
# which the tests ran with.

ARG PYTHON=3.11-slim-bookworm
ARG VLLM=v0.32.0

FROM python:${PYTHON} AS build
ARG EXTRAS=""
WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY harness_adapters harness_adapters
COPY tokencache tokencache
COPY vllm_plugin vllm_plugin
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && pip wheel --no-cache-dir --no-deps --wheel-dir /plugin ./vllm_plugin \
    && sed -e '/^ *--hash/d' -e 's/ \\$//' requirements.lock > /pins.txt \
    && python -m venv --without-pip /opt/tokencache \
    && pip --python /opt/tokencache install --no-cache-dir --constraint /pins.txt "$(ls /wheels/*.whl)${EXTRAS:+[${EXTRAS}]}"

# vLLM's own image with the plugin (docs/prefixes.md):
#
#     docker build --target engine --build-arg VLLM=v0.32.0 --tag vllm-tokencache .
#
# vLLM has all that the plugin imports. Its documentation installs additions with uv, too ("Using Docker").
FROM vllm/vllm-openai:${VLLM} AS engine
COPY --from=build /plugin /plugin
RUN uv pip install --system --no-cache --no-deps /plugin/*.whl
ENV VLLM_PLUGINS=tokencache

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="tokencache" \
    org.opencontainers.image.description="A session-aware reverse proxy in front of vLLM that keeps the exact tokens of agents" \
    org.opencontainers.image.licenses="Apache-2.0"
RUN python -m pip uninstall --yes --quiet setuptools wheel pip
COPY --from=build /opt/tokencache /opt/tokencache
COPY --chmod=755 deploy/health.py /usr/local/bin/tokencache-health
# Bytecode is compiled at installation, and never written later. Nothing outside can reach a container's loopback, so listen on all.
# (The linter takes every name that starts with TOKEN for a secret.)
# hadolint ignore=DL3064
ENV PATH=/opt/tokencache/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TOKENCACHE_HOST=0.0.0.0 \
    TOKENCACHE_PORT=8100
USER 65532:65532
WORKDIR /
EXPOSE 8100
# Alive, not ready: a restart of the engine must not replace the container.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["tokencache-health", "/healthz"]
ENTRYPOINT ["tokencache"]
CMD ["serve"]
