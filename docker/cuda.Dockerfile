# beheld on NVIDIA GPUs. Build it in the root of the repository:
#
#   docker build -f docker/cuda.Dockerfile -t beheld:cuda .
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 beheld:cuda
#
# torch's wheels bring CUDA's libraries; of the system only the driver is needed, which `--gpus all` brings in. A C
# compiler is there for Triton, which builds its launchers with it.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/torch/inductor \
    TRITON_CACHE_DIR=/cache/torch/triton

RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

RUN pip install torch torchvision

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY beheld beheld
RUN pip install .

# Bytecode now, so that no start has to compile thousands of modules.
RUN python -m compileall -q -j 0 "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true

RUN useradd --create-home --uid 1000 beheld && mkdir -p /cache && chown beheld /cache
USER beheld
WORKDIR /home/beheld
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=300s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=9)"]
ENTRYPOINT ["beheld"]
CMD ["serve", "--host", "0.0.0.0"]
