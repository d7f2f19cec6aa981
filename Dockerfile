# GPT-2 from scratch with all that training needs. For CPUs, or with BASE for GPUs:
#   docker build -t gpt2lab .
#   docker build -t gpt2lab --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm -v "$PWD/checkpoints:/gpt2lab/checkpoints" gpt2lab
# Without a command it runs the quickstart.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /gpt2lab
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements.txt ./
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -r requirements.txt \
    && touch /opt/venv/.installed
COPY . .
RUN pip install --no-cache-dir --no-deps --editable .

CMD ["make", "quickstart", "VENV=/opt/venv"]
