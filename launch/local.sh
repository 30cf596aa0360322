#!/usr/bin/env bash
# launch/local.sh [--restarts N] RANKS [COMMAND] [arguments]: RANKS Horovod ranks on this machine, its cores split among them.
# COMMAND: run (the default, trainer.run), evaluate, predict, inspect or doctor.
# --restarts: when a rank is lost, the job starts again from its last checkpoint, N times at most.
# CTR_THREADS: the threads of a rank, in place of its share of the cores.
set -euo pipefail
source "$(dirname "$0")/env.sh"
if [ "${1:-}" = --restarts ]; then
  count --restarts "${2:-}" 0
  restarts=$2
  shift 2
fi
[ $# -ge 1 ] || fail 'wanted RANKS [COMMAND] [arguments], as in launch/local.sh 2 --config configs/demo.yaml'
ranks=$1
shift
count RANKS "$ranks" 1 "$MOST_SLOTS"
share=$(($(nproc) / ranks))
export CTR_THREADS=${CTR_THREADS:-$((share > 1 ? share : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CTR_THREADS}
run_ranks "$ranks" "localhost:$ranks" '' "$@"
