# syntax=docker/dockerfile:1
# For GPUs (NCCL):  docker build -t ctr-trainer:0.2.0 .
# For CPUs:         docker build -t ctr-trainer:0.2.0-cpu --build-arg VARIANT=cpu .
# The newest TensorFlow, without TFRA:  --build-arg STACK=next
# TensorFlow's own extra brings the CUDA libraries, cuDNN and NCCL; Horovod is compiled with these (docs/gpu.md). The driver is the host's.
# The first stage compiles; the second has no compiler, and /opt/venv/share/sbom.cdx.json lists the Python packages in it (docs/operations.md).
ARG BASE=debian:bookworm-slim@sha256:96e378d7e6531ac9a15ad505478fcc2e69f371b10f5cdf87857c4b8188404716

FROM ${BASE} AS build
ARG VARIANT=gpu
# Empty: requirements.txt; next: requirements-next.txt.
ARG STACK=
ARG HOROVOD=0.28.1
# Compute capabilities that Horovod's kernels are compiled for.
ARG CUDA_ARCHITECTURES="70 75 80 86 89 90"
SHELL ["/bin/bash", "-eo", "pipefail", "-c"]

# Versions of Debian's packages are those of its stable release: an image that is built again has its security fixes.
# hadolint ignore=DL3008
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      python3.11 python3.11-venv g++ cmake make ca-certificates && \
    if [ "$VARIANT" = gpu ]; then DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends clang-19; fi && \
    rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH TF_USE_LEGACY_KERAS=1
COPY requirements.txt requirements-next.txt requirements-dev.txt /tmp/
RUN mv "/tmp/requirements${STACK:+-$STACK}.txt" /tmp/pins.txt && \
    grep '^confluent-kafka==' /tmp/requirements-dev.txt >>/tmp/pins.txt && \
    python3.11 -m venv /opt/venv && pip install --no-cache-dir -r /tmp/pins.txt && \
    if [ "$VARIANT" = gpu ]; then \
      pip install --no-cache-dir -c /tmp/pins.txt "tensorflow[and-cuda]==$(sed -n 's/^tensorflow==//p' /tmp/pins.txt)"; \
    fi

COPY launch/horovod_wheel.sh /tmp/
RUN CUDA_ARCHITECTURES="$CUDA_ARCHITECTURES" /tmp/horovod_wheel.sh "$HOROVOD" /tmp/wheel "$VARIANT" && \
    pip install --no-cache-dir --no-deps /tmp/wheel/*.whl

# The project with its op library and the commands ctr-*.
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY ops ops
COPY trainer trainer
COPY configs configs
COPY examples/synthetic_log examples/synthetic_log
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

RUN python3.11 -m venv /opt/sbom && /opt/sbom/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0 && \
    /opt/sbom/bin/cyclonedx-py environment --output-reproducible -o /opt/venv/share/sbom.cdx.json /opt/venv/bin/python

FROM ${BASE}
ARG STACK=
# hadolint ignore=DL3008
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      python3.11 libstdc++6 ca-certificates openssh-client openssh-server && \
    rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* && mkdir -p /run/sshd

ENV PATH=/opt/venv/bin:$PATH TF_USE_LEGACY_KERAS=1 PYTHONUNBUFFERED=1
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY configs configs
COPY launch launch

# Runs as anybody: nothing under /app is written to. The user below also serves Kubernetes' MPIJob, whose workers run sshd
# without root, on a port of their own (launch/kubernetes/mpijob.yaml).
RUN useradd --create-home --uid 1000 ctr && mkdir -p /home/ctr/.ssh /runs && chown -R ctr:ctr /home/ctr /runs && \
    printf 'Port 2222\nPidFile /home/ctr/sshd.pid\nHostKey /home/ctr/.ssh/id_rsa\nStrictModes no\n' >/home/ctr/.sshd_config && \
    printf 'Host *\n  Port 2222\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n' >/etc/ssh/ssh_config.d/ctr.conf
USER 1000

# Each entry point by itself, for each defines its own flags.
RUN horovodrun --check-build && \
    python -c "from ops import library; library.load()" && \
    if [ "$STACK" != next ]; then python -c "import tensorflow_recommenders_addons"; fi && \
    for command in train evaluate predict export publish serve prepare synthesize inspect report doctor; do "ctr-$command" --help >/dev/null || exit 1; done
CMD ["ctr-train", "--help"]
