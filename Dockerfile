# caddie on a CPU:         docker build -t caddie .
# on NVIDIA GPUs:          docker build -t caddie --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# what a run leaves:       docker run --rm -v "$PWD:/data" caddie run tiny --seconds 60     (GPUs: add --gpus all)
FROM python:3.12-slim

# PyTorch's own index has a build for CPUs, a tenth of the size of the one for CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Extras of pyproject.toml, as in: --build-arg EXTRAS=hub,wandb
ARG EXTRAS=hub,tokenizers

# The compiler makes kernels: Triton's launchers on a GPU, C++ on a CPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/caddie
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch>=2.9"
COPY pyproject.toml README.md LICENSE ./
COPY caddie caddie
RUN pip install --no-cache-dir ".[$EXTRAS]"

# The folder that runs/ and data/ are made in. Files there belong to whom --user names.
WORKDIR /data
ENV HOME=/tmp
ENTRYPOINT ["caddie"]
CMD ["--help"]
