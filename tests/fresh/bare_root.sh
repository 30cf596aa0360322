#!/usr/bin/env bash
# tests/fresh/bare_root.sh SUITE [GOAL…]: does what README.md says on a bare Debian, such as bookworm or trixie: installs the packages that
# it names and runs `make train`, then `make wheel` and the wheel in a bare environment; or the GOALs of make. Run it before a release, as root.
# debootstrap makes the root in build/fresh/SUITE, which is kept: remove it to start afresh.
set -euo pipefail
suite=${1:?wanted a suite of Debian, such as trixie}
shift
cd "$(dirname "$0")/../.."
root=$PWD/build/fresh/$suite
packages=$(sed -n 's/^apt-get install \([a-z0-9+ -]*\).*/\1/p' README.md)
[ -n "$packages" ] || { echo 'README.md names no packages' >&2; exit 1; }

if [ ! -e "$root/bare" ]; then
  rm -rf "$root"
  mkdir -p "$root"
  debootstrap --variant=minbase "$suite" "$root"
  touch "$root/bare"
fi
# How this machine reaches the network, and no more of it.
for file in /etc/resolv.conf /etc/hosts /etc/apt/apt.conf.d/*proxy*; do
  [ ! -e "$file" ] || install -Dm644 "$file" "$root$file"
done
certificates=${PIP_CERT:+/root/certificates.pem}
[ -z "$certificates" ] || install -m644 "$PIP_CERT" "$root$certificates"
project=$root/root/ctr-trainer
mkdir -p "$project"
git ls-files -z --cached --others --exclude-standard | xargs -0 sh -c 'for f; do [ ! -e "$f" ] || printf "%s\0" "$f"; done' sh |
  tar -c --null -T - | tar -x -C "$project"

# Mounts and processes are the namespace's own and end with it.
exec unshare --mount --pid --fork bash -euc '
  root=$1 packages=$2 certificates=$3
  shift 3
  mount --rbind /dev "$root/dev"
  mount -t proc proc "$root/proc"
  exec env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive ${certificates:+PIP_CERT="$certificates"} \
    chroot "$root" bash -euxc "
      apt-get -q update
      apt-get -qy install $packages
      cd /root/ctr-trainer
      make $*"
' bash "$root" "$packages" "$certificates" "${@:-train fresh}"
