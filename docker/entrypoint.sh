#!/bin/sh
# What a container of this image does, by its first word:
#   bootstrap [OPTION...]   host a swarm: the run file of /run-dir where a directory is mounted, else of /run.toml, else
#                           one made from PRESET
#   node [OPTION...]        join by the invite in /invite-file, or else in the file INVITE_FILE as soon as it is there; on
#                           the text in /text, if there is any
#   export [OPTION...]      write the model of that swarm to /exported/model, the next one to /exported/model-2, ...
#   healthy                 leave with 0 while this container does its work
#   anything else           noloco-node with these words
set -eu
home=/home/noloco/home
shared_invite=/invite/invite
invite_file=${INVITE_FILE:-$shared_invite}

# The first process of a container heeds only signals that it asks for. noloco-node asks for its own.
trap 'echo "noloco-node: interrupted" >&2; exit 130' INT TERM

refuse() {
  echo "noloco-node: $1" >&2
  exit 3
}

# The file may be written anew at any time, so it is read once; and what is an argument shows in every list of processes.
await_invite() {
  told=
  until invite=$(head -n 1 "$invite_file" 2> /dev/null) && [ -n "$invite" ]; do
    [ -n "$told" ] || echo "waiting for the invite in $invite_file" >&2
    told=1
    # By the words of one attempt: between two looks the file may come and go.
    why=$(head -n 1 "$invite_file" 2>&1 > /dev/null) || case $why in
      *"No such file"*) ;;
      *) refuse "user $(id -u) cannot read the invite: ${why#head: }" ;;
    esac
    sleep 1
  done
}

# expect file|directory PATH SETTING: what is another thing would be taken for a setting that was never made. Compose
# mounts /dev/null for those; and, by its version, makes an empty directory of what is not there.
expect() {
  if [ ! -e "$2" ] || [ -c "$2" ]; then return; fi
  case $1 in file) [ -f "$2" ] ;; *) [ -d "$2" ] ;; esac || refuse "$3 in docker/.env names no $1."
  [ -r "$2" ] || refuse "user $(id -u) cannot read what $3 in docker/.env names."
}

role=${1:-}
case $role in
bootstrap)
  shift
  run=/run-file/run.toml
  expect file /run.toml RUN_FILE
  expect directory /run-dir RUN_DIR
  if [ -d /run-dir ]; then
    run=/run-dir/run.toml
    [ -r "$run" ] || refuse "RUN_DIR in docker/.env names a directory without a run.toml that user $(id -u) can read."
  elif [ -f /run.toml ]; then run=/run.toml
  elif [ ! -s "$run" ]; then
    noloco-node init "$run" --preset "${PRESET:-tiny}" & wait $!  # a signal ends waiting, and no program before this shell
  fi
  # A second one would put its invite in the place of the first one's. The lock goes with the program.
  exec 9>> "$shared_invite.lock"
  flock -n 9 || refuse "another bootstrap peer keeps its invite in this volume."
  rm -f "$shared_invite"
  # Its standard output is the invite and nothing else. The log says it too.
  exec noloco-node bootstrap --run "$run" --home "$home" --listen /ip4/0.0.0.0/tcp/4001 "$@" > "$shared_invite"
  ;;
node)
  shift
  expect file "$shared_invite" INVITE_FILE
  expect file /invite-file INVITE_FILE
  expect directory /text TEXT
  # The volume of a swarm on this machine has a file, in time.
  [ ! -c "$shared_invite" ] || refuse "INVITE_FILE names no file: set it in docker/.env, or before the command."
  if [ -f /invite-file ]; then invite_file=/invite-file; fi
  await_invite
  if [ -d /text ]; then set -- --data /text "$@"; fi
  exec noloco-node join - --home "$home" "$@" << INVITE
$invite
INVITE
  ;;
export)
  shift
  await_invite
  out=/exported/model number=1
  while [ -e "$out" ]; do
    number=$((number + 1))
    out=/exported/model-$number
  done
  exec noloco-node export - --out "$out" "$@" << INVITE
$invite
INVITE
  ;;
healthy)
  # A node writes to its journal at every step and whenever it waits; a bootstrap peer answers at its port.
  if [ -s "$home/journal.jsonl" ]; then
    [ -n "$(find "$home/journal.jsonl" -mmin -10)" ]
  else
    python -c 'import socket; socket.create_connection(("127.0.0.1", 4001), 5).close()'
  fi
  ;;
*)
  exec noloco-node "$@"
  ;;
esac
