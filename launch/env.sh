# Sourced by the launch scripts: the project's root, its environment and how a command is shown and run.
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# What is on PATH wins; else the environment that `make setup` made.
command -v horovodrun >/dev/null || PATH=$PWD/.venv/bin:$PATH
export PATH
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}  # horovodrun imports TensorFlow to see what Horovod was built with
export TF_USE_LEGACY_KERAS=1  # before TensorFlow is imported, or Horovod's wrappers train without any allreduce

fail() {  # a user's mistake
  echo "$(basename "$0"): $*" >&2
  exit 2
}

count() {  # count NAME VALUE: VALUE must be a whole number >= 1
  [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1: found '$2'; wanted a whole number >= 1"
}

show() {  # a command as one would type it
  local word line=+
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  echo "$line" >&2
}

# Shows a command of horovodrun, then becomes it, where the script was called; it can be stopped, and ends with the job's own status.
run_ranks() {
  show "$@"
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  local ranks=$PWD/launch/ranks.py
  cd "$CALLED_FROM"
  exec python "$ranks" "$@"
}
