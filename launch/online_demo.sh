#!/usr/bin/env bash
# launch/online_demo.sh [--topic] [PASSES]: shows the whole loop on this machine: a log that grows, a trainer on 2 ranks that follows it, a publisher, a
# scorer, and a client that shows how a click changes a score. With --topic the log is a topic of librdkafka's own cluster. It ends after PASSES passes (12) and leaves all files in build/online.
set -euo pipefail
source "$(dirname "$0")/env.sh"
topic=
[ "${1:-}" != --topic ] || { topic=1; shift; }
passes=${1:-12}
count PASSES "$passes"
folder=build/online
rm -rf "$folder"
mkdir -p "$folder/passes"
jobs=()
trap 'kill -TERM "${jobs[@]}" 2>/dev/null || true; wait' EXIT
start() {  # start NAME COMMAND…: starts it in the background, with its output in build/online/NAME.log
  local log=$folder/$1.log
  shift
  show "$@"
  "$@" >"$log" 2>&1 &
  jobs+=($!)
}
log=()
if [ -n "$topic" ]; then
  start cluster python launch/online_demo.py cluster "$folder/brokers"
  until [ -f "$folder/brokers" ]; do
    kill -0 "${jobs[0]}" 2>/dev/null || fail "the cluster has ended; see $folder/cluster.log"
    sleep 0.1
  done
  log=(--set data.watch=null --set data.day_pattern=null --set export.base=false
    --set "data.topic={brokers: '$(<"$folder/brokers")', topic: clicks, pass: {records: 10100}}")
fi
start trainer launch/local.sh 2 --config configs/online.yaml --run_dir "$folder/run" "${log[@]}"
until [ -f "$folder/run/config.yaml" ]; do
  kill -0 "${jobs[-1]}" 2>/dev/null || fail "the trainer has ended; see $folder/trainer.log"
  sleep 0.2
done
start publisher python -m trainer.cli.publish --run_dir "$folder/run" --to "$folder/store"
start scorer python -m trainer.cli.serve --store "$folder/store" --port 0
python launch/online_demo.py "$folder" "$passes"
