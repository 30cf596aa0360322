#!/usr/bin/env bash
# tests/fresh/image.sh [ARGUMENT…]: builds the image of Dockerfile with buildah and without a registry of images, as root: on a Debian that
# debootstrap makes. ARGUMENTs are of `buildah build`, such as --build-arg VARIANT=cpu -t ctr-trainer:cpu.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase bookworm "$root"
# How this machine reaches the network, and no more of it.
for file in /etc/apt/apt.conf.d/*proxy*; do
  [ ! -e "$file" ] || install -Dm644 "$file" "$root$file"
done
if [ -n "${PIP_CERT:-}" ]; then
  install -m644 "$PIP_CERT" "$root/certificates.pem"
  printf '[global]\ncert = /certificates.pem\n' >"$root/etc/pip.conf"
fi
container=$(buildah from scratch)
buildah add -q "$container" "$root" / >/dev/null
buildah commit -q --rm "$container" localhost/ctr-bare >/dev/null
buildah build --format docker --isolation chroot --network host --build-arg BASE=localhost/ctr-bare "$@" .
