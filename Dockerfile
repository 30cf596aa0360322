# syntax=docker/dockerfile:1
# For GPUs (NCCL):  docker build -t ctr-trainer .
# For CPUs:         docker build -t ctr-trainer:cpu --build-arg VARIANT=cpu .
# The newest TensorFlow, without TFRA:  --build-arg STACK=next
# TensorFlow's own extra brings the CUDA libraries, cuDNN and NCCL; Horovod is compiled with these (docs/gpu.md). The driver is the host's.
ARG BASE=debian:bookworm
FROM ${BASE}
ARG VARIANT=gpu
# Empty: requirements.txt; next: requirements-next.txt.
ARG STACK=
ARG HOROVOD=0.28.1
# Compute capabilities that Horovod's kernels are compiled for.
ARG CUDA_ARCHITECTURES="70 75 80 86 89 90"

RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      python3.11 python3.11-venv g++ cmake make ca-certificates openssh-client openssh-server $([ "$VARIANT" != gpu ] || echo clang-19) && \
    rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* && mkdir -p /run/sshd

ENV PATH=/opt/venv/bin:$PATH TF_USE_LEGACY_KERAS=1 PYTHONUNBUFFERED=1
COPY requirements.txt requirements-next.txt /tmp/
RUN mv /tmp/requirements${STACK:+-$STACK}.txt /tmp/pins.txt
RUN python3.11 -m venv /opt/venv && pip install --no-cache-dir -r /tmp/pins.txt
RUN if [ "$VARIANT" = gpu ]; then \
      pip install --no-cache-dir -c /tmp/pins.txt "tensorflow[and-cuda]==$(sed -n 's/^tensorflow==//p' /tmp/pins.txt)"; \
    fi

COPY launch/horovod_wheel.sh /tmp/
RUN CUDA_ARCHITECTURES="$CUDA_ARCHITECTURES" /tmp/horovod_wheel.sh "$HOROVOD" /tmp/wheel "$VARIANT" && \
    pip install --no-cache-dir --no-deps /tmp/wheel/*.whl && rm -r /tmp/wheel

WORKDIR /app
COPY pyproject.toml setup.py README.md LICENSE ./
COPY ops ops
COPY trainer trainer
COPY configs configs
COPY examples/synthetic_log examples/synthetic_log
COPY launch launch
RUN python -m ops.build && rm -rf build

# Runs as anybody: nothing under /app is written to. The user below also serves Kubernetes' MPIJob, whose workers run sshd
# without root, on a port of their own (launch/kubernetes/mpijob.yaml).
RUN useradd --create-home --uid 1000 ctr && mkdir -p /home/ctr/.ssh /runs && chown -R ctr:ctr /home/ctr /runs && \
    printf 'Port 2222\nPidFile /home/ctr/sshd.pid\nHostKey /home/ctr/.ssh/id_rsa\nStrictModes no\n' >/home/ctr/.sshd_config && \
    printf 'Host *\n  Port 2222\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' >/etc/ssh/ssh_config.d/ctr.conf
USER ctr

# Each entry point by itself, for each defines its own flags.
RUN horovodrun --check-build && \
    python -c "from ops import library; library.load()" && \
    if [ "$STACK" != next ]; then python -c "import tensorflow_recommenders_addons"; fi && \
    python -c 'import examples.synthetic_log' && \
    for module in run evaluate predict export publish serve prepare synthesize inspect report doctor; do python -c "import trainer.$module" || exit 1; done
CMD ["python", "-m", "trainer.run", "--help"]
