#!/bin/sh
# on_quick_disk.sh COMMAND [ARGUMENT...]
#
# Runs a command whose temporary files lie on a disk in memory: an ext4 like others, for whose answers nobody waits.
# The command and what it starts see it, and nobody else; it ends with them. Where that cannot be had, the command is
# run as it is, and why is said.

plainly() {
  echo "$0: temporary files lie where they always do: $why" >&2
  exec "$@"
}

why="that takes root"; [ "$(id -u)" = 0 ] || plainly "$@"
why="there is no unshare"; command -v unshare > /dev/null || plainly "$@"
why="there is no mkfs.ext4"; command -v mkfs.ext4 > /dev/null || plainly "$@"
free_kib=$(df --output=avail -k /dev/shm 2> /dev/null | tail -n 1)
why="less than 8 GiB of /dev/shm are free"; [ "${free_kib:-0}" -gt 8388608 ] || plainly "$@"

image=$(mktemp /dev/shm/tests-XXXXXX)
point=$(mktemp -d /tmp/tests-XXXXXX)
trap 'rm -f "$image"; rmdir "$point"' EXIT
truncate -s 16G "$image"
why="nothing can be mounted"
unshare -m sh -c 'mkfs.ext4 -q -F -N 262144 "$0" && mount -o loop "$0" "$1" && umount "$1"' "$image" "$point" ||
  { trap - EXIT; rm -f "$image"; rmdir "$point"; plainly "$@"; }

# The file is gone with the last that uses it. What is deleted on the disk is free in memory at once.
unshare -m sh -c 'mount -o loop,discard,noatime "$0" "$1" && rm "$0" && export TMPDIR="$1" && shift && exec "$@"' \
  "$image" "$point" "$@"
