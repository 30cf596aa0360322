# `make train` and `make test` set everything up in .venv first; what is up to date is not done again.
# Python 3.11 takes TensorFlow 2.16 with TFRA (requirements.txt); Python 3.10, 3.12 and 3.13, for which TFRA has no build, take the
# newest TensorFlow that works (requirements-next.txt). STACK=next takes that with Python 3.11 too, in .venv-next.
# DEVICE=gpu adds TensorFlow's CUDA libraries and builds Horovod with NCCL (docs/gpu.md); the environment keeps it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:

STACK ?=
SUFFIX := $(addprefix -,$(STACK))
VENV := .venv$(SUFFIX)
PY := $(VENV)/bin/python
DEVICE ?= $(if $(wildcard $(VENV)/.cuda),gpu)
# The environment's own where there is one; else the first that runs, the last of them so that it is named if none does.
PYTHON ?= $(or $(wildcard $(PY)),$(shell for p in python3.11 python3.13 python3.12 python3.10 python3; do \
  $$p -V >/dev/null 2>&1 && break; done; echo $$p))
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
REQUIREMENTS := requirements$(if $(filter 3.11,$(VERSION)),$(SUFFIX),-next).txt
HOROVOD := 0.28.1
TENSORFLOW := $(shell sed -n 's/^tensorflow==//p' $(REQUIREMENTS))
OPS := ops/_ctr_ops-tf$(TENSORFLOW).so
LOGS := build/test$(SUFFIX)
CLANG ?= clang++-19
export CLANG
export PATH := $(abspath $(VENV))/bin:$(PATH)

# Prerequisites: the first that is missing ends every target in one line. ensurepip is what Debian's Python lacks without -venv.
define MISSING
if ! [[ '$(STACK)' =~ ^(next)?$$ ]]; then echo "STACK: found '$(STACK)'; wanted next, or none";
elif ! [[ '$(DEVICE)' =~ ^(gpu)?$$ ]]; then echo "DEVICE: found '$(DEVICE)'; wanted gpu, or none";
elif [ -n '$(DEVICE)' ] && ! command -v $(CLANG) >/dev/null; then echo '$(CLANG), which compiles for GPUs, is missing; to install it: apt-get install clang-19';
elif ! command -v $(PYTHON) >/dev/null; then echo '$(PYTHON) is missing; to install it: apt-get install python3 python3-venv';
elif ! [[ '$(VERSION)' =~ ^3\.1[0-3]$$ ]]; then echo "PYTHON=$(PYTHON) is $$($(PYTHON) -V 2>&1); wanted Python 3.10 to 3.13";
elif [ -x $(PY) ] && ! $(PY) -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(VERSION)")'; then
  echo "PYTHON=$(PYTHON) is Python $(VERSION), but $(VENV) holds $$($(PY) -V 2>&1); to change it, remove $(VENV)";
elif ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then
  echo '$(PYTHON) has no venv; to install it: apt-get install python$(VERSION)-venv';
elif ! command -v $(CXX) >/dev/null; then echo '$(CXX), the C++ compiler, is missing; to install it: apt-get install g++';
elif ! command -v cmake >/dev/null; then echo 'cmake is missing; to install it: apt-get install cmake'; fi
endef
missing := $(shell $(MISSING))
ifneq ($(missing),)
$(error $(missing))
endif

.PHONY: train data-demo data-flights test test-long setup wheel fresh test-cc test-python test-single test-parallel test-integration lint format bench quality campaign campaign-short clean

# The demo, or another log that lies here or can be installed: make train DATA=flights.
DATA ?= demo
train: setup data-$(DATA)
	launch/local.sh 2 --config configs/$(DATA).yaml --run_dir runs/$(DATA)
	@echo 'ctr-train, ctr-evaluate and so on are found after: source $(VENV)/bin/activate'

test: setup test-cc test-parallel test-python
	@$(call SUM,python parallel-2 parallel-3)

# What the mark `long` keeps out of `make test`: campaigns, many ranks, several hosts, most kills, noise, what is proved in more
# variants; and the C++ suite as the op library is compiled, and under
# ThreadSanitizer.
test-long: setup | $(LOGS)
	timeout -k 10 900 $(MAKE) -j$$(nproc) -C tests/cc plain thread
	$(call PYTEST,long,2400) -m long tests/single tests/integration 2>&1 | tee $(LOGS)/long.log
	@$(call SUM,long)

# Prints the last line of each log of pytest, and their sum. The lines of ranks come behind the launcher's prefix.
SUM = for log in $(1); do sed -nE 's/^(\[[0-9]+\]<std(out|err)>:)?=* ?([0-9]+ .* in [0-9.]+s).*/\3/p' $(LOGS)/$$log.log | tail -n 1; done | \
  tee $(LOGS)/summary.log; awk '{ for (i = 2; i <= NF; i++) n[substr($$i, 1, 4)] += $$(i - 1) } \
  END { printf "tests: %d passed, %d failed, %d skipped\n", n["pass"], n["fail"] + n["erro"], n["skip"] }' $(LOGS)/summary.log

# --- set-up ---

setup: $(OPS) $(VENV)/.horovod $(VENV)/.commands

$(VENV)/.requirements: $(REQUIREMENTS) requirements-dev.txt
	@echo 'Python $(VERSION) with TensorFlow $(TENSORFLOW)$(if $(findstring -next,$<), without TFRA (sparse.store: tfra); TFRA has builds for Python 3.11 only)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -r $(REQUIREMENTS) -r requirements-dev.txt
	touch $@

$(VENV)/.cuda: $(VENV)/.requirements
	$(PY) -m pip install -q --disable-pip-version-check -c $(REQUIREMENTS) 'tensorflow[and-cuda]==$(TENSORFLOW)'
	touch $@

# Horovod is compiled against TensorFlow and the compiler's library: the wheel is kept per user, keyed by these.
WHEELS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ctr-trainer/horovod-$(HOROVOD)-tf$(TENSORFLOW)-cp$(subst .,,$(VERSION))-gcc$(shell $(CXX) -dumpfullversion)-$(shell uname -m)$(addprefix -,$(DEVICE))
CUDA := $(if $(DEVICE),$(VENV)/.cuda)

$(WHEELS): | $(VENV)/.requirements $(CUDA)
	@echo 'Building Horovod $(HOROVOD) for TensorFlow $(TENSORFLOW): some minutes, once; the wheel is kept in $@'
	mkdir -p $(dir $@)
	work=$$(mktemp -d $(dir $@)build.XXXX); trap 'rm -rf $$work' EXIT; \
	  launch/horovod_wheel.sh $(HOROVOD) $$work/wheel $(DEVICE); mv -T $$work/wheel $@

$(VENV)/.horovod: $(VENV)/.requirements $(CUDA) | $(WHEELS)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --force-reinstall $(WHEELS)/*.whl
	TF_CPP_MIN_LOG_LEVEL=3 horovodrun --check-build | grep '\[X\] $(if $(DEVICE),NCCL,TensorFlow)'  # not -q, which leaves before all is written
	touch $@

# Folders are listed so that a source which is gone counts as a change.
$(OPS): ops/build.py $(wildcard ops/cc/* ops/cc/*/*) $(VENV)/.requirements
	$(PY) -m ops.build

# ctr-train and the other commands, of this very tree.
$(VENV)/.commands: pyproject.toml setup.py $(VENV)/.requirements | $(OPS)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# A wheel for this Python and its TensorFlow, without Horovod. The folders hold modules of earlier builds, which may be gone since.
DIST := dist$(SUFFIX)
wheel: $(OPS)
	rm -rf build/lib.* build/bdist.*
	$(PY) -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w $(DIST) .

# The wheel in a bare environment; tests/fresh/bare_root.sh tries this and the demo on a bare Debian.
fresh: wheel
	tests/fresh/wheel.sh $(abspath $(PY)) $(DIST)/ctr_trainer-*-cp$(subst .,,$(VERSION))-*.whl

build/demo_log/truth.json: | setup  # written last
	$(PY) -m trainer.cli.synthesize --out $(dir $@) --days 5 --samples_per_day 250000

data-demo: build/demo_log/truth.json

data-flights: build/flights/flights_2013-12-31.csv

build/flights/flights_2013-12-31.csv: | setup  # written last
	$(PY) examples/flights/prepare.py --out $(dir $@)

# --- tests ---

$(LOGS):
	mkdir -p $@

test-cc: setup
	timeout -k 10 900 $(MAKE) -j$$(nproc) -C tests/cc address

# A file more at a time than two cores, because many tests wait; those that take longest first (tests/conftest.py). $(1) names the files that are kept in $(LOGS), and $(2) is the limit in seconds.
PYTEST = timeout -k 10 $(2) $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=60 --junitxml=$(LOGS)/$(1).xml
SHORT := -m 'not long'

# test-single and test-integration in one queue
test-python: setup | $(LOGS)
	$(call PYTEST,python,1800) $(SHORT) tests/single tests/integration 2>&1 | tee $(LOGS)/python.log

test-single test-integration: test-%: setup | $(LOGS)
	$(call PYTEST,$*,1800) $(SHORT) tests/$* 2>&1 | tee $(LOGS)/$*.log

test-parallel: setup | $(LOGS)
	tests/parallel.sh 2 tests/parallel -k 'communicator or traffic or uneven' 2>&1 | tee $(LOGS)/parallel-2.log
	tests/parallel.sh 3 2>&1 | tee $(LOGS)/parallel-3.log

PAGES := $(filter-out docs/config.md,$(wildcard *.md docs/*.md docs/*/*.md examples/*/*.md))  # config.md is generated

lint: setup
	ruff format --check .
	ruff check .
	mdformat --check $(PAGES)
	clang-format --dry-run -Werror $$(find ops tests/cc -name '*.h' -o -name '*.cc')

format: setup
	ruff format .
	mdformat $(PAGES)
	clang-format -i $$(find ops tests/cc -name '*.h' -o -name '*.cc')

# --- measurements ---

bench: setup
	$(PY) -m benchmarks.run

quality: setup
	$(PY) -m benchmarks.quality
	$(PY) -m benchmarks.defaults
	$(PY) -m benchmarks.dtypes
	$(PY) -m benchmarks.tasks_quality
	$(PY) -m benchmarks.numbers

# --- faults (docs/reliability.md): some hours; interrupted, it goes on where it was, in build/campaign ---

campaign: setup
	$(PY) -m campaigns.faults --seed $(SEED)

# One unit of each kind, from the beginning: 34 units, of which those that fault jobs take minutes each on busy cores.
campaign-short: setup
	rm -f build/campaign/short.jsonl
	$(PY) -m campaigns.faults --seed $(SEED) --share 0.01 --out build/campaign/short.jsonl

SEED ?= 0

clean:
	rm -rf build ops/_ctr_ops*.so
