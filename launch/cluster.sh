#!/usr/bin/env bash
# launch/cluster.sh [--restarts N] [--min_ranks M] [-i NIC] HOSTSFILE [COMMAND] [arguments]: Horovod ranks on the hosts of a file, started over ssh.
# COMMAND: run (the default, trainer.run), evaluate, predict, inspect or doctor.
# The file has a line `host slots=n` for each host; n is its number of ranks, 1 by default; # begins a comment. The project, its
# environment and its data are at the same path on every host, and ssh reaches each without a password.
# --restarts: when a rank or a host is lost, the job starts again from its last checkpoint, N times at most, on the hosts that then answer.
# --min_ranks: it does not start again with fewer ranks than this; by default, with fewer than all of the file.
# NIC: the network interface by which the hosts reach one another; it has the same name on all of them. By default, the one that ssh uses.
# CTR_STRICT_HOST_KEYS: ssh's StrictHostKeyChecking: no (the default), yes or accept-new.
# CTR_EXPORT: names of variables that ranks get besides those that launch/ranks.py lists.
set -euo pipefail
here=$PWD
source "$(dirname "$0")/env.sh"
usage='[--restarts N] [--min_ranks M] [-i NIC] HOSTSFILE [COMMAND] [arguments]'
nic=
while [[ ${1:-} = -* ]]; do
  [ $# -ge 2 ] || fail "$1: wanted a value"
  case $1 in
    -i) nic=$2 ;;
    --restarts) count "$1" "$2" 0 && restarts=$2 ;;
    --min_ranks) count "$1" "$2" && min_ranks=$2 ;;
    *) fail "unknown option $1; wanted $usage" ;;
  esac
  shift 2
done
[ $# -ge 1 ] || fail "wanted $usage"
file=$1
shift
[[ $file = /* ]] || file=$here/$file
[ -r "$file" ] || fail "$file: no such file; wanted lines 'host slots=n'"

hosts=
ranks=0
number=0
while read -r host slots rest || [ -n "$host" ]; do
  number=$((number + 1))
  [ -n "$host" ] || continue
  [ -z "$rest" ] && [[ $host =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ && ${slots:=slots=1} =~ ^slots=[1-9][0-9]{0,3}$ && ${slots#*=} -le $MOST_SLOTS ]] ||
    fail "$file:$number: found '$host $slots${rest:+ $rest}'; wanted 'host slots=n' with n from 1 to $MOST_SLOTS"
  [[ ,$hosts != *,"$host":* ]] || fail "$file:$number: found the host '$host' again; wanted each host once"
  hosts+=${hosts:+,}$host:${slots#*=}
  ranks=$((ranks + ${slots#*=}))
done < <(sed 's/\r$//; s/#.*//' "$file")
[ "$ranks" -gt 0 ] || fail "$file: found no host; wanted lines 'host slots=n'"

[[ ${CTR_STRICT_HOST_KEYS:=no} =~ ^(yes|no|accept-new)$ ]] ||
  fail "CTR_STRICT_HOST_KEYS: found '$CTR_STRICT_HOST_KEYS'; wanted yes, no or accept-new"
for entry in ${hosts//,/ }; do
  host=${entry%:*}
  case $host in localhost | 127.0.0.1 | "$(hostname)") continue ;; esac
  why=$(ssh -n -o BatchMode=yes -o ConnectTimeout=10 -o StrictHostKeyChecking="$CTR_STRICT_HOST_KEYS" -- "$host" true 2>&1) ||
    fail "host '$host' of $file: ssh without a password failed: $(tail -n 1 <<<"$why")"
done
run_ranks "$ranks" "$hosts" "$nic" "$@"
