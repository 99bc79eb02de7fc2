# docker build -t evenload .                                                            CPUs, Megatron-Core
# docker build -t evenload --build-arg TORCH=cu128 --build-arg EXTRAS=megatron,data .   NVIDIA GPUs
# docker run --rm -v "$PWD:/work" evenload evenload train quickstart
#
# TORCH is a folder of https://download.pytorch.org/whl: cpu, or CUDA by its version. EXTRAS are those of pyproject.toml.
FROM python:3.12-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG TORCH=cpu
ARG EXTRAS=megatron
# Triton and DeepSpeed compile kernels as they run.
RUN apt-get update && apt-get install -y --no-install-recommends g++ ninja-build && rm -rf /var/lib/apt/lists/*
# torch first: else another package would bring the index's build of it.
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/$TORCH" "torch>=2.9,<3"
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/evenload-*.whl)[$EXTRAS]"
WORKDIR /work
CMD ["evenload", "--help"]
