"""Sites that give their jobs a disk in another way than as a folder that stays.

Each is made as such sites make it, by a SPANK plugin, by scripts of root or by a setting of Slurm,
and is taken away after its block.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.site import PLUGSTACK, POLICY, remove_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
#: Where the site keeps its own plugins and scripts.
_LIBRARY = "/opt/site/lib"
#: Without it, Prolog does not run again on the other nodes of a job that is requeued.
_ALLOC = "PrologFlags=Alloc\n"

_QUOTA_PROLOG = """
folder=/lscratch/$SLURM_JOB_ID image=/lscratch/.$SLURM_JOB_ID
asked='TresPerNode=\\S*lscratch:\\K\\d+'
size=$(scontrol show job -o "$SLURM_JOB_ID" | grep -oP "$asked") || exit 0
truncate --size="${size}M" "$image"
mkfs.ext4 -q -m 0 -O ^has_journal -E lazy_itable_init=0 "$image"
mkdir "$folder"
mount -o loop "$image" "$folder"
rmdir "$folder/lost+found"
chmod 700 "$folder"
chown "$SLURM_JOB_UID:$SLURM_JOB_GID" "$folder"
"""
_QUOTA_EPILOG = """
folder=/lscratch/$SLURM_JOB_ID image=/lscratch/.$SLURM_JOB_ID
[ -d "$folder" ] || exit 0
umount --lazy "$folder"
rmdir "$folder"
rm "$image"
"""
_MEMORY_PROLOG = """
folder=/ramdisk/$SLURM_JOB_ID
mkdir "$folder"
mount -t tmpfs -o "mode=700,uid=$SLURM_JOB_UID,gid=$SLURM_JOB_GID" ramdisk "$folder"
"""
_MEMORY_EPILOG = """
umount --lazy "/ramdisk/$SLURM_JOB_ID"
rmdir "/ramdisk/$SLURM_JOB_ID"
"""
#: Each job of a user has a file in a folder that is locked meanwhile.
_USER = """
folder=/lscratch/$SLURM_JOB_USER jobs=/lscratch/.jobs/$SLURM_JOB_USER
exec 9</lscratch/.jobs
flock 9
"""
_USER_PROLOG = f"""{_USER}
mkdir -p "$jobs"
touch "$jobs/$SLURM_JOB_ID"
[ -d "$folder" ] || install -d -m 700 -o "$SLURM_JOB_UID" -g "$SLURM_JOB_GID" "$folder"
"""
_USER_EPILOG = f"""{_USER}
rm -f "$jobs/$SLURM_JOB_ID"
if rmdir "$jobs" 2>/dev/null; then rm -rf "$folder"; fi
"""
#: Slurm's plugin binds a job's mount namespace, which the kernel allows if its number is higher
#: than the node's. Since Linux 6.18 each core takes numbers from a block of its own: this uses up
#: what is lower. (0x8008B705 is NS_GET_MNTNS_ID, 0x20000 CLONE_NEWNS.)
_HIGHER_NAMESPACES = """
import ctypes, fcntl, os
def number(process):
    with open(f"/proc/{process}/ns/mnt") as namespace:
        return int.from_bytes(fcntl.ioctl(namespace, 0x8008B705, bytes(8)), "little")
try:
    node = number("self")
except OSError:  # an older kernel
    raise SystemExit(0)
for core in os.sched_getaffinity(0):
    os.sched_setaffinity(0, [core])
    ctypes.CDLL(None).unshare(0x20000)
    while number("self") <= node:
        ctypes.CDLL(None).unshare(0x20000)
"""


@dataclass(frozen=True)
class Shape:
    """What an administrator writes into stage.toml, and what a user writes and finds."""

    #: The site's name of the folder that it gives to a job.
    variable: str
    #: The path of that folder, with patterns.
    root: str
    #: Where the site keeps these folders, for root.
    disk: str
    #: Whether jobs have that path in common, each with other contents.
    private: bool = False
    #: What a job asks for, and what stage.toml says of that.
    request: tuple[str, ...] = ()
    hint: str = ""

    def policy(self) -> str:
        """Return stage.toml."""
        lines = ["[[roots]]", f'path = "{self.root}"']
        if self.private:
            lines.append("private = true")
        if self.hint:
            lines.append(f'hint = "{self.hint}"')
        lines += ["[variables]", f'{self.variable} = "{self.root}"']
        return "".join(f"{line}\n" for line in lines)

    def folder(self, job: Job, user: str) -> str:
        """Return the path of a job's folder."""
        letters = {"%u": user, "%j": job.id, "%r": job.info()["Restarts"]}
        return re.sub("%.", lambda found: letters[found[0]], self.root)

    def contents(self, site: Site) -> list[str]:
        """Return what root sees on the nodes' disks, with owners and modes."""
        show = f"find {self.disk} /tmp /dev/shm -printf '%p %u %m\\n'"
        shown = (site.run(show, user="root", on=node).stdout for node in site.nodes)
        return [line for text in shown for line in sorted(text.splitlines())]


# -------------------------------------------------------------------- the sites


@contextmanager
def alliance(site: Site, *, first: bool = False) -> Iterator[Shape]:
    """A folder by user, job and restart count, of a SPANK plugin above or below ours."""
    shape = Shape("SLURM_TMPDIR", "/localscratch/%u.%j.%r", "/localscratch")
    plugstack = _plugstack(site, "job_folder", shape.disk, first=first)
    with _disk(site, shape.disk), _slurm(site, _ALLOC, plugstack):
        yield shape


@contextmanager
def gres(site: Site) -> Iterator[Shape]:
    """A folder by job, for jobs that ask for it, with as much room as they ask for."""
    asked, hint = ("--gres=lscratch:40",), "--gres=lscratch:MB"
    shape = Shape("LSCRATCH", "/lscratch/%j", "/lscratch", request=asked, hint=hint)
    conf = _scripts(site, shape, _QUOTA_PROLOG, _QUOTA_EPILOG)
    with _disk(site, shape.disk), _slurm(site, conf):
        yield shape


@contextmanager
def job_container(site: Site) -> Iterator[Shape]:
    """Slurm's own plugin: each job has its own /tmp."""
    shape = Shape("TMPDIR", "/tmp", "/private", private=True)
    own = ("job_container.conf", f"AutoBasePath=true\nBasePath={shape.disk}/base\n")
    for node in site.nodes:
        site.run(["/usr/bin/python3", "-c", _HIGHER_NAMESPACES], user="root", on=node)
    conf = "JobContainerType=job_container/tmpfs\nPrologFlags=Contain\n"
    with _disk(site, shape.disk), _config(site, *own), _slurm(site, conf):
        yield shape


@contextmanager
def auto_tmpdir(site: Site, *, first: bool = False) -> Iterator[Shape]:
    """A SPANK plugin, above or below ours, that binds a job's folders over /tmp and /dev/shm."""
    shape = Shape("TMPDIR", "/tmp", "/private", private=True)
    plugstack = _plugstack(site, "bind_tmp", shape.disk, first=first)
    with _disk(site, shape.disk), _slurm(site, "PrologFlags=Contain\n", plugstack):
        yield shape


@contextmanager
def ram(site: Site) -> Iterator[Shape]:
    """A folder by job in memory, which counts as the job's own."""
    shape = Shape("RAMDISK", "/ramdisk/%j", "/ramdisk", request=("--mem=300M",))
    conf = _scripts(site, shape, _MEMORY_PROLOG, _MEMORY_EPILOG)
    conf += "TaskPlugin=task/cgroup\nSelectTypeParameters=CR_Core_Memory\n"
    own = ("cgroup.conf", "ConstrainRAMSpace=yes\n")
    with _disk(site, shape.disk), _config(site, *own), _slurm(site, conf, restart=True):
        yield shape
    groups = "find /sys/fs/cgroup/memory/slurm_n* -depth -type d -exec rmdir {} +"
    site.run(groups, user="root", check=False)


@contextmanager
def user(site: Site) -> Iterator[Shape]:
    """A folder by user, which stays until the user's last job on the node ends."""
    shape = Shape("L_SCRATCH", "/lscratch/%u", "/lscratch")
    conf = _scripts(site, shape, _USER_PROLOG, _USER_EPILOG)
    with _disk(site, shape.disk):
        for node in site.nodes:
            site.run(["mkdir", "/lscratch/.jobs"], user="root", on=node)
        with _slurm(site, conf):
            yield shape


# -------------------------------------------------------------------- what they are made of


@contextmanager
def _slurm(
    site: Site, conf: str, plugstack: str = PLUGSTACK, *, restart: bool = False
) -> Iterator[None]:
    """Add lines to slurm.conf and have another plugstack.conf within a with block."""
    site.write_plugstack(plugstack)
    site.reconfigure(conf, restart=restart)
    try:
        yield
    finally:
        site.run("squeue --noheader --format=%A | xargs --no-run-if-empty scancel", user="root")
        site.assert_healthy(60)
        site.write_policy(POLICY)
        site.write_plugstack(PLUGSTACK)
        site.reconfigure(restart=restart)


@contextmanager
def _config(site: Site, name: str, text: str) -> Iterator[None]:
    """Have one more file in /etc/slurm within a with block."""
    site.write_config(name, text)
    try:
        yield
    finally:
        site.path("login", f"/etc/slurm/{name}").unlink()


@contextmanager
def _disk(site: Site, place: str) -> Iterator[None]:
    """Mount a disk on each node, where root alone can make folders, within a with block."""
    for node in site.nodes:
        backing = f"/cluster/nodes/{node}{place}"
        make = f"mkdir -p {place} {backing} && mount --bind {backing} {place}"
        site.run(make, user="root", on=node)
    try:
        yield
    finally:
        for node in site.nodes:
            # Slurm's plugin has mounted a part of it once more.
            site.run(["umount", "--recursive", place], user="root", on=node)
            remove_all([site.base / f"nodes/{node}{place}"])
        site.run(["rmdir", place], user="root")


def _plugstack(site: Site, name: str, argument: str, *, first: bool) -> str:
    """Compile a plugin of the site's; return plugstack.conf with it above or below ours."""
    source = Path(__file__).parent / "shapes" / f"{name}.c"
    built = _in_library(site, f"{name}.so")
    subprocess.run(["gcc", *_FLAGS, "-o", built, source], check=True)
    line = f"required {_LIBRARY}/{name}.so {argument}\n"
    return line + PLUGSTACK if first else PLUGSTACK + line


def _scripts(site: Site, shape: Shape, prolog: str, epilog: str) -> str:
    """Write the site's scripts; return the lines of slurm.conf that name them.

    TaskProlog tells a job the path of its folder.
    """
    folder = shape.root.replace("%u", "$SLURM_JOB_USER").replace("%j", "$SLURM_JOB_ID")
    task = f'echo "export {shape.variable}={folder}"'
    for name, text in (("Prolog", prolog), ("Epilog", epilog), ("TaskProlog", task)):
        path = _in_library(site, name)
        path.write_text(f"#!/bin/bash\nset -e\n{text}")
        path.chmod(0o755)
    lines = (f"{name}={_LIBRARY}/{name}\n" for name in ("Prolog", "Epilog", "TaskProlog"))
    return _ALLOC + "".join(lines)


def _in_library(site: Site, name: str) -> Path:
    """Return the host's path of a file in the site's library."""
    folder = site.base / _LIBRARY.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name
