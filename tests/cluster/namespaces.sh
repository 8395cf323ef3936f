#!/bin/bash
# PID 1 of a test cluster's namespaces: those of the site, which is also the login node, and those
# of each node. Builds that machine's view of the files and its network, then runs until the site's
# standard input closes.
#
# usage: namespaces.sh site BASE NODES         (started by cluster.py, in fresh namespaces)
#        namespaces.sh node NAME ADDRESS/BITS  (started by the site, in fresh namespaces)
#        namespaces.sh reboot                  (on a node, by cluster.py)
# CHECKOUT is the folder from which servers run on the machines.
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
# them without being made on the host. No file of the host can be changed there. The root is
# unbindable: otherwise it would contain itself.
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
            case "$name" in
            dev | home | proc | run | tmp) ;; # the machines have their own
            sys) mount --rbind /sys "$root/sys" ;;
            *) show "$entry" "$root/$name" ;;
            esac
        else
            touch "$root/$name"
            show "$entry" "$root/$name"
        fi
    done
    make_devices "$root/dev"
    mkdir -p "$root/cluster" "$root/shared" "$root/nvme" "$root/.host"
    mount --bind "$1" "$root/cluster"
    mkdir "$root/cluster/checkout"
    show "$CHECKOUT" "$root/cluster/checkout"
    mount -t proc proc "$root/proc"
    cd "$root"
    pivot_root . .host
    cd /
    mount --make-private /
    umount --lazy /.host
    rmdir /.host
}

# Mounts a folder or file of the host, and what is mounted in it, read-only. What cannot be made
# read-only, such as a user's filesystem that is closed to root, is left out.
show() {
    local place
    mount --rbind "$1" "$2"
    findmnt --noheadings --raw --output=TARGET --submounts "$2" | while read -r place; do
        place=$(printf %b "$place")
        mount -o remount,bind,ro "$place" || umount --lazy "$place"
    done
}

# Makes the host's device files anew: whoever removes one there, or listens on /dev/log, does so on
# the cluster alone. The kernel adds the file of a further loop device to the host's /dev only.
make_devices() {
    local number
    mount -t tmpfs -o mode=755 tmpfs "$1"
    cp --archive --one-file-system /dev/. "$1"
    rm -f "$1/log"
    ln -s /run/dev-log "$1/log"
    for ((number = 0; number < 128; number++)); do
        [ -e "$1/loop$number" ] || mknod -m 660 "$1/loop$number" b 7 "$number"
    done
    mkdir -p "$1/shm" "$1/pts"
    mount --bind /dev/pts "$1/pts"
}

# Mounts what all machines share. The host's packages stay readable in /opt, where pip finds them.
mount_shared() {
    local entry
    for entry in /opt/*/; do
        [ -d "$entry" ] || continue
        mkdir "/cluster$entry"
        mount --rbind "$entry" "/cluster$entry"
    done
    mount --rbind /cluster/opt /opt
    mount --bind /cluster/shared /shared
    mount --bind /cluster/home /home
    for entry in passwd shadow group hosts slurm; do
        mount --bind "/cluster/etc/$entry" "/etc/$entry"
    done
    show_checkout
}

# Servers run from the checkout: mounts it where it is on the host, if a mount has hidden it.
show_checkout() {
    [ "$CHECKOUT" -ef /cluster/checkout ] && return
    mkdir -p "$CHECKOUT"
    mount --rbind /cluster/checkout "$CHECKOUT"
}

# Mounts what each machine has of its own.
mount_private() {
    hostname "$1"
    mount -t tmpfs -o mode=1777 tmpfs /var/tmp
    mount_volatile
    mount --bind "/cluster/nodes/$1/spool" /var/spool
}

# Mounts what a machine loses when it is rebooted.
mount_volatile() {
    mount -t tmpfs -o mode=1777 tmpfs /tmp
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir -p /run/munge /run/lock
    mount --bind /cluster/munge/run /run/munge
    show_checkout
}

# Does to a node's files what a reboot does; its processes have been ended.
reboot() {
    umount --lazy --recursive /tmp /dev/shm /run
    mount_volatile
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
