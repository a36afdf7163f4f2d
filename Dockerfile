# Images of pretrax, one per accelerator:
#
#   docker build --target cpu -t pretrax .
#   docker build --target cuda -t pretrax:cuda .
#   docker build --target tpu -t pretrax:tpu .
#
# Packages are those of uv.lock. The user of the image is not root, and can write to /workspace.

FROM docker.io/library/debian:trixie-slim AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /uv && /uv/bin/pip install --no-cache-dir uv
ENV PATH=/uv/bin:$PATH UV_PYTHON=/usr/bin/python3 UV_PROJECT_ENVIRONMENT=/opt/pretrax \
    UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1
WORKDIR /source
COPY pyproject.toml uv.lock README.md LICENSE ./
# The packages of all targets come before the source, so that a change of the source does not install them again.
RUN uv sync --locked --no-dev --no-install-project --extra cloud --extra tensorboard

FROM build AS build-cpu
COPY . .
RUN uv sync --locked --no-dev --no-editable --extra cloud --extra tensorboard

FROM build AS build-cuda
RUN uv sync --locked --no-dev --no-install-project --extra cloud --extra tensorboard --extra cuda
COPY . .
RUN uv sync --locked --no-dev --no-editable --extra cloud --extra tensorboard --extra cuda

FROM build AS build-tpu
RUN uv sync --locked --no-dev --no-install-project --extra cloud --extra tensorboard --extra tpu
COPY . .
RUN uv sync --locked --no-dev --no-editable --extra cloud --extra tensorboard --extra tpu

FROM python AS run
RUN useradd --uid 1000 --create-home pretrax && install -d -o pretrax -g pretrax /workspace
ENV PATH=/opt/pretrax/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /workspace
CMD ["pretrax", "--help"]

FROM run AS cuda
COPY --from=build-cuda /opt/pretrax /opt/pretrax

FROM run AS tpu
COPY --from=build-tpu /opt/pretrax /opt/pretrax

# The last target is what a build without --target makes.
FROM run AS cpu
COPY --from=build-cpu /opt/pretrax /opt/pretrax
