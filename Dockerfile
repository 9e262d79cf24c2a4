# syntax=docker/dockerfile:1
# Two images of Segue: `docker build --target cuda -t segue:cuda .`, and the same with `cpu` and a TORCH_INDEX.

FROM python:3.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
COPY deploy/kubernetes ./deploy/kubernetes

# TORCH_INDEX is the package index of torch's builds for CPUs; without it the image gets those for CUDA, which
# work too and take gigabytes more.
FROM base AS built-cpu
ARG TORCH_INDEX=
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/segue \
    && /opt/segue/bin/pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && /opt/segue/bin/pip install -c constraints.txt . \
    && /opt/segue/bin/python -m segue.kernels.cpu.build

# PyPI's torch brings CUDA's libraries; the driver's come from the host.
FROM base AS built-cuda
RUN python -m venv /opt/segue \
    && /opt/segue/bin/pip install -c constraints.txt torch \
    && /opt/segue/bin/pip install -c constraints.txt .

FROM python:3.12-slim-bookworm AS runtime
# The user of the manifests. Its files are models and compiled kernels, in the volume of /cache.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /cache segue \
    && install -d -o segue -g segue /cache /run/segue
ENV PATH=/opt/segue/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
EXPOSE 30000 8000
USER 10001:10001
ENTRYPOINT ["segue"]
CMD ["serve", "--host", "0.0.0.0"]

FROM runtime AS cpu
COPY --from=built-cpu /opt/segue /opt/segue

FROM runtime AS cuda
# Triton compiles a small C program for each kernel at its first launch.
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=built-cuda /opt/segue /opt/segue
