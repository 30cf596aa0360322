# Sourced by the launch scripts: goes to the project's root, sets the environment, and shows and runs commands.
case ${1:-} in
  -h | --help)  # the comment at the head of the script
    sed -n '2,/^[^#]/ s/^# //p' "$0"
    exit 0
    ;;
esac
CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# A horovodrun on PATH goes before the environment that `make setup` made.
command -v horovodrun >/dev/null || PATH=$PWD/.venv/bin:$PATH
export PATH
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}  # horovodrun imports TensorFlow to check how Horovod was built
export TF_USE_LEGACY_KERAS=1  # before TensorFlow is imported, or Horovod's wrappers train without any allreduce

fail() {  # a user's mistake
  echo "$(basename "$0"): $*" >&2
  exit 2
}

count() {  # count NAME VALUE: VALUE must be a whole number >= 1
  [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1: found '$2'; wanted a whole number >= 1"
}

show() {  # prints a command as one would type it
  local word line=+
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  echo "$line" >&2
}

restarts=0  # the most times that the ranks are started again
min_ranks=  # they are not started again with fewer ranks than this; by default, with fewer than the job began with
# Shows a command of horovodrun, then runs it in the caller's directory by launch/restarts.py: it can be stopped, it is started again when
# a rank is lost, and its exit status is the job's.
run_ranks() {  # run_ranks RANKS HOSTS [arguments of horovodrun and the command]
  local ranks=$1 hosts=$2 launcher=$PWD/launch/restarts.py
  shift 2
  set -- horovodrun --gloo -np "$ranks" -H "$hosts" "$@"
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  [ "${min_ranks:=$ranks}" -le "$ranks" ] || fail "--min_ranks: found $min_ranks; wanted at most the $ranks ranks of the job"
  show "$@"
  cd "$CALLED_FROM"
  exec python "$launcher" "$restarts" "$min_ranks" "$@"
}
