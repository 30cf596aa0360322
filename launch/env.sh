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

count() {  # count NAME VALUE [LEAST] [MOST]: VALUE must be a whole number between these
  local least=${3:-1} most=${4:-9999}
  [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] && [ "$2" -ge "$least" ] && [ "$2" -le "$most" ] ||
    fail "$1: found '$2'; wanted a whole number from $least to $most"
}
MOST_SLOTS=1024  # the most processes of a kind on one host

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
run_ranks() {  # run_ranks RANKS HOSTS NIC [COMMAND] [arguments of COMMAND]
  local ranks=$1 hosts=$2 nic=$3 command=run launcher=$PWD/launch/restarts.py
  shift 3
  if [[ ${1:--} != -* ]]; then
    [[ $1 =~ ^(run|evaluate|predict|inspect|doctor)$ ]] || fail "found '$1'; wanted an option, or run, evaluate, predict, inspect or doctor"
    command=$1
    shift
  fi
  [ "$command" = run ] || command=cli.$command
  set -- python -m "trainer.$command" "$@"
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  [ "${min_ranks:=$ranks}" -le "$ranks" ] || fail "--min_ranks: found $min_ranks; wanted at most the $ranks ranks of the job"
  show horovodrun --gloo -np "$ranks" -H "$hosts" ${nic:+--network-interfaces "$nic"} "$@"
  cd "$CALLED_FROM"
  exec python "$launcher" "$restarts" "$min_ranks" "$hosts" "$nic" "$@"
}
