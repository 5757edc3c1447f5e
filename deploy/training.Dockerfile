# A training's image. From the root of the source tree: docker build -f deploy/training.Dockerfile -t zeus-training .
#
# PyTorch comes from its package, in the version that is tested, with the libraries of CUDA; the machine needs only a driver.
# Put your own script where the examples are.
ARG BASE=docker.io/library/python:3.13.15-slim-trixie@sha256:7c61056e61ac89e852de05f3dc6fa51a6dd2181797bceed46aa725dd7cb2cd3b

FROM ${BASE}
# What the examples need; of your own training perhaps "lightning" or "transformers" alone.
ARG EXTRAS=demo,transformers
# A mirror of PyPI, where there is one.
ARG PIP_INDEX_URL
WORKDIR /src
# Dependencies in the versions that are tested. The package itself is empty until the next step, so that a change of the
# source keeps this layer, which has gigabytes.
COPY pyproject.toml constraints-dev.txt ./
RUN mkdir zeus_plugins bso_server \
    && touch README.md LICENSE \
    && python3 -m pip install --no-cache-dir --prefer-binary --constraint constraints-dev.txt ".[${EXTRAS}]"
COPY . .
RUN python3 -m pip install --no-cache-dir --no-deps --force-reinstall . \
    && install --directory --owner=10001 --group=0 --mode=0770 /state /workspace \
    && cp --recursive examples /workspace/
# Results that wait for a server that is away, on a volume: they must outlive the container.
# NVIDIA's container runtime gives CUDA and NVML (for energy) to containers that ask for them.
ENV HOME=/workspace \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ZEUS_STATE_DIR=/state
USER 10001:0
WORKDIR /workspace
VOLUME /state
ENTRYPOINT ["python3"]
CMD ["examples/lightning_digits.py"]
