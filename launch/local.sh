#!/usr/bin/env bash
# launch/local.sh RANKS [arguments of trainer.run]: RANKS Horovod ranks on this machine, its cores split among them.
# CTR_THREADS sets the threads of a rank yourself.
set -euo pipefail
source "$(dirname "$0")/env.sh"
[ $# -ge 1 ] || fail 'wanted RANKS [arguments of trainer.run], as in launch/local.sh 2 --config configs/demo.yaml'
ranks=$1
shift
count RANKS "$ranks"
share=$(($(nproc) / ranks))
export CTR_THREADS=${CTR_THREADS:-$((share > 1 ? share : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CTR_THREADS}
run_ranks horovodrun --gloo -np "$ranks" -H "localhost:$ranks" python -m trainer.run "$@"
