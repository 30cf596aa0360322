#!/bin/sh
# launch/rank.sh DIRECTORY COMMAND…: runs a rank with the variables in DIRECTORY/environment, which launch/ranks.py writes on its host.
if ! [ -r "$1/environment" ]; then
  echo "rank $HOROVOD_RANK: $1 is not there: the launcher has ended" >&2
  exit 3
fi
. "$1/environment"
shift
[ "$(uname -n)" != "$CTR_LAUNCHED_FROM" ] || exec "$@"
"$@"  # ssh tells a shell's status; of a rank that a signal has ended, it would say 255
exit
