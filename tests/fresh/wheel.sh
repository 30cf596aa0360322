#!/usr/bin/env bash
# tests/fresh/wheel.sh PYTHON WHEEL: installs a wheel of the project in a bare environment of PYTHON and trains, exports and predicts there, in
# one process without Horovod.
set -euo pipefail
python=$1
wheel=$(realpath "$2")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$python" -m venv venv
PATH=$folder/venv/bin:$PATH
pip install -q --disable-pip-version-check "$wheel"
ctr-synthesize --out build/demo_log --days 2 --samples_per_day 2000
ctr-train --config venv/share/ctr-trainer/configs/demo.yaml --run_dir run
ctr-export --run_dir run --kind base
ctr-predict --run_dir run --data build/demo_log/test_day_02.csv --out predictions.txt
test "$(wc -l <predictions.txt)" -ge 1000
echo "the wheel $(basename "$wheel") works"
