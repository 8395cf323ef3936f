"""How each kind of fault of a campaign is done to the test cluster, and undone.

`prepared` gives the victim what its fault needs before the job is submitted. `inflicted` does the
fault and, at the end of its with block, undoes it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.cluster import USERS
from tests.cluster.faults import Moment
from tests.cluster.processes import is_gate, is_helper, is_rank, is_srun, is_step, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.cluster.cluster import Job
    from tests.cluster.faults import Fault
    from tests.cluster.processes import Process
    from tests.cluster.site import Site

#: The sources, and the same as the nodes see them: each answer takes `LATENCY` microseconds, so
#: that a transfer of some MiB lasts for a second or two.
SOURCES, SLOW = "/shared/campaign", "/shared/campaign-slow"
LATENCY = 15_000
PROGRAM = "/shared/slow_folder"
#: What slurm.conf needs for "job preempted": a partition whose jobs displace others.
URGENT = "urgent"
PREEMPTION = (
    "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
    f"PartitionName={URGENT} Nodes=ALL PriorityTier=10 OverSubscribe=NO MaxTime=INFINITE State=UP\n"
)
#: The size of a disk that is to fail, and the bytes of memory that "memory short" leaves a rank.
DISK_SIZE, MEMORY = "64M", 1 << 20
#: Seconds: how long a pause and a missing link last that a stage must survive; a link that flaps is
#: down and up for so long, and so is a disk that stutters.
PAUSE, FLAP, STUTTER = 1.5, 0.3, 0.4
FLAPS = 4
#: Kinds of faults that hit a process which the victim has only once its rank has begun.
NEED_RANK = (
    "rank killed",
    "slurmstepd killed",
    "srun killed",
    "rank stopped",
    "rank paused",
    "memory short",
)
#: Seconds that a node needs to boot, at least: for so long after a job's start, slurmctld takes its
#: batch host for one on which it is still to begin (BatchStartTimeout and MessageTimeout, 10 each).
_BATCH_START = 21.0
_MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")


class MissedError(Exception):
    """The fault came too late: what it was to hit was not there."""


@dataclass(frozen=True)
class Scene:
    """A fault, and where it happens. ``job`` is that of its first user, unless it comes before."""

    site: Site
    fault: Fault
    job: Job | None
    #: Gives the source of the first user a new version.
    replace_source: Callable[[], None]

    @property
    def victim(self) -> str:
        """The node that is hit."""
        return self.fault.victim

    def as_root(self, command: str) -> str:
        """Run a shell command on the victim; return what it printed."""
        return self.site.run(command, user="root", on=self.victim).stdout.strip()

    def slurm(self, command: str) -> None:
        """Run a command of Slurm's on the job."""
        assert self.job
        self.site.run(f"{command} {self.job.id}", user="root", check=False)

    def one(self, kind: Callable[[Process], bool], *, on_victim: bool = True) -> Process:
        """Return the job's process of that kind; raise MissedError if there is none."""
        for process in processes(self.site):
            here = process.node == self.victim or not on_victim
            if here and kind(process) and self._is_of_job(process):
                return process
        raise MissedError

    def _is_of_job(self, process: Process) -> bool:
        assert self.job
        if process.words[0].startswith("slurmstepd: "):
            return process.words[0].startswith(f"slurmstepd: [{self.job.id}.")
        return process.user() == USERS[self.fault.users[0]]


# Preparations


def install(site: Site) -> None:
    """Show all nodes the sources with latency; the program is built already."""
    site.run(f"mkdir -p {SOURCES} {SLOW}; chmod 755 {SOURCES} {SLOW}", user="root")
    for node in site.nodes:
        mount_source(site, node)


def remove(site: Site) -> None:
    """Undo `install`, and remove what the jobs of a campaign staged from."""
    for node in site.nodes:
        site.run(["umount", "--lazy", SLOW], user="root", on=node)
    site.run(f"rm -r {SOURCES} {SLOW} {PROGRAM}", user="root")


def mount_source(site: Site, node: str) -> None:
    """Show a node the sources with latency. No answer is remembered."""
    options = "allow_other,default_permissions,ro,entry_timeout=0,attr_timeout=0"
    line = [PROGRAM, SOURCES, SLOW, str(LATENCY), options]
    site.run(line, user="root", on=node)


@contextmanager
def prepared(scene: Scene) -> Iterator[None]:
    """Give the victim another disk if that is to fail, for a with block."""
    kinds = {"disk full", "disk read-only", "disk stutters"}
    with ExitStack() as stack:
        if scene.fault.kind in kinds:
            stack.enter_context(scene.site.nvme(scene.victim, "loop", DISK_SIZE))
            scene.as_root("mount -o remount,errors=remount-ro /nvme")
        elif scene.fault.kind == "disk errors":
            stack.enter_context(_served_disk(scene))
        yield


@contextmanager
def _served_disk(scene: Scene) -> Iterator[None]:
    """Mount a disk whose image is served by a program: once that is killed, each access fails."""
    scene.as_root(
        "set -e; mkdir -p /run/disk /run/served\n"
        f"truncate --size={DISK_SIZE} /run/disk/image\n"
        "mkfs.ext4 -q -m 0 -O ^has_journal -E lazy_itable_init=0 /run/disk/image\n"
        f"{PROGRAM} /run/disk /run/served 0 allow_other\n"
        "mount -o loop /run/served/image /nvme; chmod 1777 /nvme"
    )
    try:
        yield
    finally:
        scene.as_root("umount --lazy /nvme /run/served; rm -r /run/disk /run/served")


# Faults


def inflicted(scene: Scene) -> AbstractContextManager[None]:
    """Do the fault; undo it at the end of the with block. Raise MissedError on entering."""
    return _FAULTS[scene.fault.kind](scene)


def _killed(
    kind: Callable[[Process], bool], *, on_victim: bool = True
) -> Callable[[Scene], AbstractContextManager[None]]:
    @contextmanager
    def fault(scene: Scene) -> Iterator[None]:
        if not scene.one(kind, on_victim=on_victim).kill():
            raise MissedError
        yield

    return fault


@contextmanager
def _rank_stopped(scene: Scene) -> Iterator[None]:
    rank = scene.one(is_rank)
    rank.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        rank.signal(signal.SIGCONT)


@contextmanager
def _rank_paused(scene: Scene) -> Iterator[None]:
    with _rank_stopped(scene):
        time.sleep(PAUSE)
    yield


@contextmanager
def _link_down(scene: Scene) -> Iterator[None]:
    line = ["ip", "link", "set", scene.victim]
    scene.site.run([*line, "down"], user="root")
    try:
        if scene.fault.moment is Moment.SCRIPT:
            time.sleep(PAUSE)
        yield
    finally:
        scene.site.run([*line, "up"], user="root")


@contextmanager
def _link_flaps(scene: Scene) -> Iterator[None]:
    link = f"ip link set {scene.victim}"
    once = f"{link} down; sleep {FLAP}; {link} up; sleep {FLAP}"
    scene.site.run("; ".join([once] * FLAPS), user="root")
    yield


@contextmanager
def _disk_full(scene: Scene) -> Iterator[None]:
    fill = "dd if=/dev/zero of=/nvme/fill bs=1M; true"
    scene.site.run(fill, user="root", on=scene.victim)
    yield


@contextmanager
def _disk_read_only(scene: Scene) -> Iterator[None]:
    """Have the kernel find an error in the filesystem, which it then makes read-only."""
    device = scene.as_root("df --output=source /nvme | tail -1")
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("1")
    yield


@contextmanager
def _disk_errors(scene: Scene) -> Iterator[None]:
    _kill_server(scene.site, scene.victim, "/run/served")
    yield


@contextmanager
def _disk_stutters(scene: Scene) -> Iterator[None]:
    freeze = f"fsfreeze --freeze /nvme; sleep {STUTTER}; fsfreeze --unfreeze /nvme; sleep {FLAP}"
    scene.as_root("; ".join([freeze] * FLAPS))
    yield


@contextmanager
def _source_errors(scene: Scene) -> Iterator[None]:
    readers = [
        process.node
        for process in processes(scene.site)
        if is_rank(process) and process.has_open_beneath(SLOW)
    ]
    node = readers[0] if readers else scene.victim
    _kill_server(scene.site, node, SLOW)
    try:
        yield
    finally:
        scene.site.run(["umount", "--lazy", SLOW], user="root", on=node)
        mount_source(scene.site, node)


def _kill_server(site: Site, node: str, mountpoint: str) -> None:
    for process in processes(site):
        serves = process.words[:1] == (PROGRAM,) and process.words[2] == mountpoint
        if process.node == node and serves:
            process.kill()


@contextmanager
def _source_replaced(scene: Scene) -> Iterator[None]:
    scene.replace_source()
    yield


@contextmanager
def _slurmctld_restarted(scene: Scene) -> Iterator[None]:
    scene.site.restart_slurmctld()
    yield


@contextmanager
def _slurmd_restarted(scene: Scene) -> Iterator[None]:
    scene.site.restart_slurmd(scene.victim)
    yield


@contextmanager
def _node_rebooted(scene: Scene) -> Iterator[None]:
    with scene.site.rebooting(scene.victim):
        scene.as_root(f"umount --lazy {SLOW}")
        mount_source(scene.site, scene.victim)
        time.sleep(_BATCH_START)
    yield


@contextmanager
def _job_preempted(scene: Scene) -> Iterator[None]:
    options = ["--partition", URGENT, "--exclusive", "-N1", "-w", scene.victim]
    urgent = scene.site.sbatch("true", *options, user="root")
    try:
        yield
    finally:
        urgent.wait()


@contextmanager
def _job_requeued(scene: Scene) -> Iterator[None]:
    scene.slurm("scontrol requeue")
    yield


@contextmanager
def _job_cancelled(scene: Scene) -> Iterator[None]:
    scene.slurm("scancel")
    yield


@contextmanager
def _memory_short(scene: Scene) -> Iterator[None]:
    """Let the rank have `MEMORY` bytes more than it has: what it needs beyond that kills it."""
    rank = scene.one(is_rank)
    group = _MEMORY_CGROUPS / f"slurm-stage-{os.getpid()}"
    before = _MEMORY_CGROUPS / Path(_cgroup_of(os.getpid())).relative_to("/")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(MEMORY))
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(rank.pid))
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (before / "cgroup.procs").write_text(pid)
        group.rmdir()


def _cgroup_of(pid: int) -> str:
    """Return the path of a process' cgroup of memory, beneath that of all."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory")


_FAULTS: dict[str, Callable[[Scene], AbstractContextManager[None]]] = {
    "rank killed": _killed(is_rank),
    "slurmstepd killed": _killed(is_step),
    "gate killed": _killed(is_gate, on_victim=False),
    "helper killed": _killed(is_helper, on_victim=False),
    "srun killed": _killed(is_srun, on_victim=False),
    "rank stopped": _rank_stopped,
    "rank paused": _rank_paused,
    "link down": _link_down,
    "link flaps": _link_flaps,
    "disk full": _disk_full,
    "disk read-only": _disk_read_only,
    "disk errors": _disk_errors,
    "disk stutters": _disk_stutters,
    "source errors": _source_errors,
    "source replaced": _source_replaced,
    "slurmctld restarted": _slurmctld_restarted,
    "slurmd restarted": _slurmd_restarted,
    "node rebooted": _node_rebooted,
    "job preempted": _job_preempted,
    "job requeued": _job_requeued,
    "job cancelled": _job_cancelled,
    "memory short": _memory_short,
}
