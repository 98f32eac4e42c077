#!/bin/bash
# The first process of a node of the test bed, inside the node's own namespaces. When it ends, so does all of the node.
#   node-init.sh DIRECTORY NAME ADDRESS/PREFIX
# The line on stdin comes when eth0 has been moved in here; a line "ready" on stdout says that sshd is up.
set -eu
directory=$1 name=$2 address=$3

echo "$name" >/proc/sys/kernel/hostname
mount --all --fstab "$directory/fstab"
mkdir -p /run/sshd /run/lock
cd /

read -r _
ip link set lo up
ip address add "$address" dev eth0
ip link set eth0 up
/usr/sbin/sshd -E "$directory/log/sshd.log"
echo ready
exec <&- >"$directory/log/init.log" 2>&1

trap 'exit 0' TERM
# bash as process 1 also reaps what loses its parent.
while :; do
    sleep infinity &
    wait "$!" || true
done
