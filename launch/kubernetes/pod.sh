#!/usr/bin/env bash
# launch/kubernetes/pod.sh COMMAND…: the first process of a pod; runs a command and, where Kubernetes takes the pod away, has the job saved.
# SIGTERM becomes SIGINT, for the ranks of this pod or, if it has none, for the command. A job so saves its state and ends with 130, which
# is no success even of an endless one: whoever started it starts it again, elsewhere. sshd alone would end at once, and its ranks unsaved.
set -m  # else a command in the background ignores SIGINT
"$@" &
command=$!
ranks() {  # of this pod alone: without a process namespace of its own there may be others
  [ $$ != 1 ] || grep -lsz '^CTR_JOB=' /proc/[0-9]*/environ | xargs -r grep -lsz '^HOROVOD_RANK=' | tr -dc '0-9\n'
}
above() {  # processes, and those that wait for their status: shells, and sessions of sshd
  local pid
  for pid in "$@"; do
    while [ "${pid:-0}" -gt 1 ] && [ "$pid" != "$command" ]; do
      echo "$pid"
      pid=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null)
    done
  done
}
stop() {
  local found all
  found=$(ranks)
  if [ -n "$found" ]; then
    all=$(above $found)
    kill -INT $found 2>/dev/null
    while kill -0 $all 2>/dev/null; do sleep 0.2; done
  fi
  kill -INT "$command"  # at SIGTERM, sshd would end with status 0: a worker that has done its work
}
trap stop TERM
while kill -0 "$command" 2>/dev/null; do wait "$command"; done
wait "$command"
