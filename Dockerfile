# Everything for a machine with NVIDIA GPUs: torch with CUDA, Horovod with NCCL, a compiler. docs/machines.md says
# how it is run. From the slowest and most stable layer to the quickest: a change of code installs nothing again.
#
#   docker build -t federated .
#   docker run --rm --gpus all --ipc=host -v "$PWD/data:/home/fl/project/data" \
#     -v "$PWD/runs:/home/fl/project/runs" federated make flair-fl
#
# Without GPUs, in a third of the room:
#
#   docker build -t federated-cpu --build-arg BASE=ubuntu:24.04 \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .

# The release of CUDA that torch's wheels are made for; nvcc, its headers and NCCL's are what Horovod is built with.
ARG BASE=nvidia/cuda:13.2.1-devel-ubuntu24.04
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git make python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

# Ubuntu's image has a user of this number already. Other users (docker run --user) may read everything, and
# write data, runs and what is compiled or downloaded.
ARG USER_ID=1000
RUN if id ubuntu > /dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --no-log-init --create-home --shell /bin/bash --uid "$USER_ID" fl \
    && install -d -m 755 -o fl -g fl /home/fl /home/fl/project \
    && install -d -m 1777 /home/fl/.cache /home/fl/project/data /home/fl/project/runs
USER ${USER_ID}
WORKDIR /home/fl/project
ENV HOME=/home/fl \
    LOGNAME=fl \
    XDG_CACHE_HOME=/home/fl/.cache \
    MPLCONFIGDIR=/home/fl/.cache/matplotlib \
    PATH=/home/fl/project/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# torch alone, several GB: these are the pins of requirements.txt, of which any other may change without this layer.
ARG TORCH=2.15.0
ARG TORCHVISION=0.29.2
ARG TORCH_INDEX=
RUN python3 -m venv .venv \
    && PIP_INDEX_URL=$TORCH_INDEX pip install "torch==$TORCH" "torchvision==$TORCHVISION"

# The versions of requirements.lock, without its hashes, since torch may be another build here.
COPY --chown=fl:fl requirements.txt requirements.lock ./
RUN pip install -r requirements.txt -c <(sed -n 's/^\([a-z].*==[^\\]*\).*/\1/p' requirements.lock) && touch .venv/.ready

# What `make horovod` reads, and no more. Without BASE's toolkit it is built for CPUs; HOROVOD=0 leaves it out.
ARG HOROVOD=1
COPY --chown=fl:fl Makefile ./
COPY --chown=fl:fl dataset/__init__.py dataset/files.py dataset/
COPY --chown=fl:fl pfl_ext/__init__.py pfl_ext/processor.py pfl_ext/
COPY --chown=fl:fl pfl_ext/workers/__init__.py pfl_ext/workers/build_horovod.py pfl_ext/workers/
RUN if [ "$HOROVOD" = 1 ]; then make horovod; fi

# The code. What was installed above is newer than the files that make compares it with.
COPY --chown=fl:fl . ./
RUN touch .venv/.ready && if [ -e .venv/.horovod ]; then touch .venv/.horovod; fi

# tini hands SIGTERM (docker stop) on: a run finishes its round, is saved and ends with 75.
ENTRYPOINT ["tini", "--"]
CMD ["make", "help"]
