# The lab with the GPU stack. Build, then run with every GPU, on this machine's loopback only:
#   docker build -t distributed-lab .
#   docker run --rm -it --gpus all --shm-size 8g -p 127.0.0.1:8888:8888 distributed-lab
# The base is of the CUDA version that torch is built for. It is the -devel image since Triton needs a C compiler and
# FlashInfer needs nvcc when they build a kernel.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

ARG HARDWARE=gpu

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates git iproute2 make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --shell /bin/bash learner \
    && install --directory --owner learner /home/learner/lab

USER learner
WORKDIR /home/learner/lab
ENV PIP_NO_CACHE_DIR=1

# What decides the packages comes first, so that an edited notebook does not install them again.
COPY --chown=learner constraints.txt pyproject.toml ./
COPY --chown=learner deploy deploy
COPY --chown=learner labsupport labsupport
RUN python3 deploy/install.py --venv .venv --hardware ${HARDWARE}
COPY --chown=learner . .

ENV PATH=/home/learner/lab/.venv/bin:$PATH \
    JUPYTER_PREFER_ENV_PATH=1
EXPOSE 8888
HEALTHCHECK --start-period=30s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8888/api', timeout=5)"]

# 0.0.0.0 is the container's own network: `-p 127.0.0.1:8888:8888` above decides who can reach it. The token stays on.
CMD ["python", "-m", "jupyterlab", "--ip=0.0.0.0", "--port=8888", "--ServerApp.port_retries=0", "--no-browser", \
     "--ServerApp.root_dir=/home/learner/lab/notebooks"]
