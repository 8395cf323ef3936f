#!/bin/bash
# PID 1 of a test cluster's namespaces: those of the site, which is also the login node, and those
# of each node. Builds that machine's view of the files and its network, then runs until the site's
# standard input closes.
#
# usage: namespaces.sh site BASE NODES         (started by cluster.py, in fresh namespaces)
#        namespaces.sh node NAME ADDRESS/BITS  (started by the site, in fresh namespaces)
set -euo pipefail

site() {
    local index
    build_root "$1"
    mount_shared
    mount_private login
    start_network
    for ((index = 1; index <= $2; index++)); do
        # Descriptor 9 is the site's network, into which the node plugs its cable.
        unshare --mount --net --uts --ipc --pid --fork --kill-child --mount-proc \
            bash /cluster/namespaces.sh node "n$index" "10.0.0.$index/24" \
            </dev/null 9</proc/self/ns/net &
    done
    touch /cluster/ready/login
    # While it waits, bash also reaps the orphans of its PID namespace.
    cat <&0 >/dev/null &
    wait $!
}

node() {
    plug_in "$1" "$2"
    mount_private "$1"
    mount --bind "/cluster/nodes/$1/nvme" /nvme
    touch "/cluster/ready/$1"
    sleep infinity &
    wait $!
}

# Mounts the host's top-level entries in a new root, so that /shared and /nvme can exist beside
# them without being made on the host. It is unbindable: otherwise it would contain itself.
build_root() {
    local root=$1/root entry name
    mkdir "$root"
    mount -t tmpfs -o mode=755 tmpfs "$root"
    mount --make-unbindable "$root"
    for entry in /*; do
        name=${entry#/}
        if [ -L "$entry" ]; then
            cp -a "$entry" "$root/$name"
        elif [ -d "$entry" ]; then
            mkdir "$root/$name"
            [ "$name" = proc ] || mount --rbind "$entry" "$root/$name"
        else
            touch "$root/$name"
            mount --bind "$entry" "$root/$name"
        fi
    done
    mkdir -p "$root/cluster" "$root/shared" "$root/nvme" "$root/.host"
    mount --bind "$1" "$root/cluster"
    mount -t proc proc "$root/proc"
    cd "$root"
    pivot_root . .host
    cd /
    mount --make-private /
    umount --lazy /.host
    rmdir /.host
}

# Mounts what all machines share. The host's packages stay readable in /opt, where pip finds them.
mount_shared() {
    local entry
    for entry in /opt/*/; do
        [ -d "$entry" ] || continue
        mkdir "/cluster$entry"
        mount --rbind "$entry" "/cluster$entry"
        mount -o remount,bind,ro "/cluster$entry"
    done
    mount --rbind /cluster/opt /opt
    mount --bind /cluster/shared /shared
    mount --bind /cluster/home /home
    for entry in passwd shadow group hosts slurm; do
        mount --bind "/cluster/etc/$entry" "/etc/$entry"
    done
}

# Mounts a /tmp in which only the checkout is to be seen, if it is there: servers run from it.
mount_tmp() {
    case "$CHECKOUT" in
    /tmp/*)
        mkdir -p /cluster/checkout
        mount --bind "$CHECKOUT" /cluster/checkout
        mount -t tmpfs -o mode=1777 tmpfs /tmp
        mkdir -p "$CHECKOUT"
        mount --bind /cluster/checkout "$CHECKOUT"
        umount /cluster/checkout
        ;;
    *) mount -t tmpfs -o mode=1777 tmpfs /tmp ;;
    esac
}

# Mounts what each machine has of its own.
mount_private() {
    hostname "$1"
    mount_tmp
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir -p /run/munge /run/lock
    mount --bind /cluster/munge/run /run/munge
    mount --bind "/cluster/nodes/$1/spool" /var/spool
}

start_network() {
    ip link set lo up
    ip link add br0 type bridge
    ip address add 10.0.0.254/24 dev br0
    ip link set br0 up
}

plug_in() {
    ip link set lo up
    nsenter --net=/proc/self/fd/9 ip link add "$1" master br0 type veth peer name eth0 netns $$
    nsenter --net=/proc/self/fd/9 ip link set "$1" up
    exec 9<&-
    ip address add "$2" dev eth0
    ip link set eth0 up
}

"$@"
