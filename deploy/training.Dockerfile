# A training's image. From the root of the source tree: docker build -f deploy/training.Dockerfile -t zeus-training .
#
# The base brings PyTorch for your GPUs; it must have Python 3.11 or newer, and pip. Put your own script where the examples are.
ARG BASE=docker.io/pytorch/pytorch:2.7.1-cuda12.8-cudnn9-runtime

FROM ${BASE}
# What the examples need; of your own training perhaps "lightning" or "transformers" alone.
ARG EXTRAS=demo,transformers
# A mirror of PyPI, where there is one.
ARG PIP_INDEX_URL
WORKDIR /src
COPY . .
# The package without a version is this source tree.
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir --prefer-binary ".[${EXTRAS}]" \
    && install --directory --owner=10001 --group=0 --mode=0770 /state /workspace \
    && cp --recursive examples /workspace/
# Results that wait for a server that is away, on a volume: they must outlive the container.
ENV HOME=/workspace \
    PYTHONUNBUFFERED=1 \
    ZEUS_STATE_DIR=/state
USER 10001:0
WORKDIR /workspace
VOLUME /state
ENTRYPOINT ["python3"]
CMD ["examples/lightning_digits.py"]
