# Makes a site of this root: a real Slurm of one node, node1, without slurm-stage. Sourced by bash.
# There is no systemd: its systemctl is played, as far as the documents use it.
# shellcheck shell=bash
export DEBIAN_FRONTEND=noninteractive
echo 'APT::Get::Assume-Yes "true";' >/etc/apt/apt.conf.d/yes

hostname node1
printf '127.0.0.1 localhost\n10.9.0.1 node1\n' >/etc/hosts
ip link set lo up
ip link add d0 type veth peer d1
ip addr add 10.9.0.1/24 dev d0
ip link set d1 up
ip link set d0 up

mkdir -p /nvme
mount -t tmpfs -o mode=755 none /nvme
mkdir -p /run/munge /run/lock /run/mount /shared /var/spool/slurmd /var/spool/slurmctld
[ -e /etc/munge/munge.key ] || mungekey -c
chown munge /etc/munge/munge.key /run/munge
runuser -u munge munged
cat >/etc/slurm/slurm.conf <<END
ClusterName=site
SlurmctldHost=node1
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdSpoolDir=/var/spool/slurmd
StateSaveLocation=/var/spool/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ReturnToService=2
MpiDefault=none
NodeName=node1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
cat >/usr/local/bin/systemctl <<'END'
#!/bin/sh
set -eu
[ "$*" != 'is-active --quiet slurmd' ] || exit 0
[ "$*" = 'restart slurmd' ]
pid=$(cat /run/slurmd.pid)
kill "$pid"
while [ -e "/proc/$pid" ]; do sleep 0.1; done
slurmd
END
chmod 755 /usr/local/bin/systemctl
useradd --create-home bob
head -c 30000000 /dev/urandom >/shared/some-file
slurmctld
slurmd

# Waits until the node takes jobs again: else srun says that it waits.
idle() {
	until sinfo --noheader --format %T | grep -qx idle; do sleep 0.1; done
}

# Runs a command as a user does, from a login shell.
as_bob() {
	runuser -l bob -c "$*"
}

# Prints what is on the disk and beneath /run, with the contents of configuration. What programs
# of the system keep for themselves is left out.
files() {
	find / /run /nvme -xdev \( -path /var/cache -o -path /var/log -o -path /var/spool -o -path /var/lib/apt \
		-o -path /var/lib/dpkg -o -path /var/lib/rpm -o -path /var/lib/dnf -o -path /home -o -path /proc \) \
		-prune -o -printf '%p %y %m %u %l\n' | sort -u
	find /etc -type f ! -name ld.so.cache -exec md5sum {} + | sort
}

idle
as_bob srun true
files >/tmp/before
