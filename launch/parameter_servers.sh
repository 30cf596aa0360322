#!/usr/bin/env bash
# launch/parameter_servers.sh SERVERS WORKERS [arguments of trainer.run]: a job of parameter servers on this machine, on free
# loopback ports. sync.mode is ps unless given. Lines of worker 0, the chief, are printed as they are, lines of the others with their
# names. The first process that fails ends the others; if a worker is killed, the job itself decides whether it goes on. The exit
# status is the highest of all processes.
# CTR_THREADS: threads of a process. CTR_GRACE_SECONDS (60): the time that the servers have to end after the last worker.
set -euo pipefail
source "$(dirname "$0")/env.sh"
[ $# -ge 2 ] || fail 'wanted SERVERS WORKERS [arguments of trainer.run], as in launch/parameter_servers.sh 1 2 --config configs/demo.yaml'
servers=$1 workers=$2
shift 2
count SERVERS "$servers" 1 "$MOST_SLOTS"
count WORKERS "$workers" 1 "$MOST_SLOTS"
[[ " $* " == *' sync.mode='* || " $* " == *'=sync.mode='* ]] || set -- "$@" --set sync.mode=ps
share=$(($(nproc) / workers))  # servers mostly wait
export CTR_THREADS=${CTR_THREADS:-$((share > 1 ? share : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CTR_THREADS}
grace=${CTR_GRACE_SECONDS:-60}
count CTR_GRACE_SECONDS "$grace" 0 999999

# Free ports below the range of outgoing connections; all are held at the same time, so that they differ.
cluster=$(python - "$servers" "$workers" <<'PY'
import json, random, socket, sys
servers, workers = map(int, sys.argv[1:])
held, addresses = [], []
for port in random.sample(range(10000, 32000), 22000):
  if len(held) == servers + workers:
    break
  s = socket.socket()
  try:
    s.bind(('127.0.0.1', port))
  except OSError:
    s.close()
    continue
  held.append(s)
  addresses.append(f'127.0.0.1:{port}')
print(json.dumps({'ps': addresses[:servers], 'worker': addresses[servers:]}))
PY
)

# The processes run in the caller's directory, as those of the other scripts do.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
cd "$CALLED_FROM"

# The secret of the job's processes. They and this script hold a pipe, at whose end the file is removed: killed or not, they leave none.
CTR_SECRET_FILE=$(mktemp)
export CTR_SECRET_FILE
exec {pipe}> >(
  exec >/dev/null 2>&1
  trap '' HUP INT TERM
  cat
  rm -f "$CTR_SECRET_FILE"
)
head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$CTR_SECRET_FILE"

declare -A name=()  # pid -> name
stop() {  # ends the processes that still run: SIGTERM, up to 10 s, SIGKILL
  local pid waited
  for pid in "${!name[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for ((waited = 0; waited < 100; waited++)); do
    kill -0 "${!name[@]}" 2>/dev/null || break
    sleep 0.1
  done
  for pid in "${!name[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  wait "${!name[@]}" 2>/dev/null || true
}
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM

start() {  # start TYPE INDEX [arguments]
  local type=$1 index=$2 config
  shift 2
  config="{\"cluster\": $cluster, \"task\": {\"type\": \"$type\", \"index\": $index}}"
  show env "TF_CONFIG=$config" python -m trainer.run "$@"
  if [ "$type$index" = worker0 ]; then
    TF_CONFIG=$config python -m trainer.run "$@" &
  else
    TF_CONFIG=$config python -m trainer.run "$@" > >(exec sed -u "s/^/[$type $index] /") 2>&1 &
  fi
  name[$!]="$type $index"
}
for ((i = 0; i < servers; i++)); do start ps "$i" "$@"; done
for ((i = 0; i < workers; i++)); do start worker "$i" "$@"; done

oom_kills() { sed -n 's/^oom_kill //p' /proc/vmstat; }  # the kernel's count for the whole host
oom_kills_before=$(oom_kills)
status=0
worst() { if [ "$1" -gt "$status" ]; then status=$1; fi; }
working=$workers
deadline=
while [ ${#name[@]} -gt 0 ]; do
  if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
    echo "$(basename "$0"): still running ${grace} s after the last worker ended: ${name[*]}; ending them" >&2
    worst 1
    break
  fi
  if [ -z "$deadline" ]; then
    code=0
    wait -n -p pid "${!name[@]}" || code=$?
  else  # `wait` has no time limit
    pid=
    for candidate in "${!name[@]}"; do kill -0 "$candidate" 2>/dev/null || pid=$candidate; done
    [ -n "$pid" ] || { sleep 0.2; continue; }
    code=0
    wait "$pid" || code=$?
  fi
  ended=${name[$pid]}
  unset "name[$pid]"
  worst "$code"
  if [ "$code" -eq 137 ] && [ "$(oom_kills)" != "$oom_kills_before" ]; then
    echo "$(basename "$0"): the kernel of $(uname -n) has killed processes for lack of memory since the job began" >&2
  fi
  if [[ $ended == worker* && $code -gt 128 ]]; then
    echo "$(basename "$0"): $ended ended by a signal, with status $code; waiting for the others" >&2
  elif [ "$code" -ne 0 ]; then
    echo "$(basename "$0"): $ended ended with status $code; ending the rest" >&2
    break
  fi
  [[ $ended != worker* ]] || working=$((working - 1))
  if [ "$working" -eq 0 ] && [ -z "$deadline" ]; then deadline=$((SECONDS + grace)); fi
done
[ ${#name[@]} -eq 0 ] || stop
exit "$status"
