# beheld on a CPU. Build it in the root of the repository:
#
#   docker build -f docker/cpu.Dockerfile -t beheld:cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 beheld:cpu
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    HF_HOME=/cache/huggingface

# The wheels of torch for CPUs alone are a tenth as large as those with CUDA.
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch torchvision

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
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=9)"]
ENTRYPOINT ["beheld"]
CMD ["serve", "--host", "0.0.0.0"]
