#!/usr/bin/env bash
# tests/parallel.sh N [pytest arguments]: every one of N ranks runs pytest on tests/parallel, in one job.
# Rank 0's output is shown; another rank's only where it failed. The status is not 0 where any rank failed.
set -euo pipefail
if [ -n "${HOROVOD_RANK:-}" ]; then  # one rank of the job started below
  [ "$HOROVOD_RANK" = 0 ] && exec python -m pytest -x --durations=20 "$@"
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  python -m pytest -x "$@" >"$log" 2>&1 && exit
  status=$?
  tail -n 100 "$log"
  exit "$status"
fi
cd "$(dirname "$0")/.."
ranks=$1
shift
command -v horovodrun >/dev/null || PATH=$PWD/.venv/bin:$PATH
export TF_CPP_MIN_LOG_LEVEL=3
command=(horovodrun --gloo -np "$ranks" -H "localhost:$ranks" "$PWD/tests/parallel.sh" "${@:-tests/parallel}")
echo "+ ${command[*]}"
timeout -k 10 "${PARALLEL_TEST_SECONDS:-900}" "${command[@]}"
