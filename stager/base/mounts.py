"""Find out where filesystems are mounted, and by whom."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The option in which FUSE has the user who mounted a filesystem, who also answers for it.
_USER = re.compile(r"(?:^|,)user_id=(\d+)")

#: Filesystems whose servers decide by lists or identities of their own.
_OWN_RULES = frozenset({"afs", "auristorfs", "cifs", "smb3", "9p", "coda"})

#: Network filesystems, as the kernel names them.
_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
        "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
    }
)  # fmt: skip
#: Filesystems with this prefix may be network filesystems too, but for mounted images.
_FUSE = "fuse."
_IMAGES = frozenset({"fuse.squashfuse", "fuse.squashfuse_ll", "fuse.erofsfuse"})


class Mount(NamedTuple):
    """One mount, as in /proc/self/mountinfo (proc(5))."""

    number: str
    #: The device as ``major:minor``.
    device: str
    point: str
    #: The type of the filesystem, such as ``tmpfs``, and its options.
    kind: str
    options: str

    @property
    def is_fuse(self) -> bool:
        """Whether a user's process answers for it."""
        return self.kind.startswith("fuse")


def is_network(kind: str) -> bool:
    """Return whether several nodes may see one filesystem of that kind."""
    return kind in _NETWORK or (kind.startswith(_FUSE) and kind not in _IMAGES)


def mounts() -> Iterator[Mount]:
    """Return what is mounted in this process's namespace. Raise OSError."""
    return map(_parse, _lines())


def mount_of(descriptor: int) -> Mount | None:
    """Return the mount that an open file is on, None if it cannot be told. Raise OSError.

    The kernel answers, and not the filesystem: one of a user's may never do.
    """
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
        number = next((line.split()[1] for line in file if line.startswith(b"mnt_id:")), b"")
    # A node has hundreds of mounts, and a stage may look at thousands of files: parse one line.
    found = (line for line in _lines() if number and line.startswith(number + b" "))
    return next(map(_parse, found), None)


def _lines() -> list[bytes]:
    # Only spaces, tabs and newlines of names are escaped there. Other white space may be a user's.
    with open("/proc/self/mountinfo", "rb") as file:
        return file.read().split(b"\n")[:-1]


def _parse(line: bytes) -> Mount:
    mount, _, filesystem = line.partition(b" - ")
    number, _, device, _, point, *_ = map(os.fsdecode, mount.split(b" "))
    kind, *_, options = map(os.fsdecode, filesystem.split(b" "))
    return Mount(number, device, point, kind, options)


def mounted_by_stranger(descriptor: int) -> int:
    """Return the user who mounted the filesystem of an open file, if that is a stranger; else 0.

    Root and the user of this process are none. What is seen on a stranger's filesystem is made up
    by that user's process: inodes and permissions too. Raise OSError.
    """
    mount = mount_of(descriptor)
    found = _USER.search(mount.options) if mount and mount.is_fuse else None
    uid = int(found[1]) if found else 0
    return 0 if uid == os.getuid() else uid


def is_on_fuse(descriptor: int) -> bool:
    """Return whether a user's process answers for the filesystem of an open file. Raise OSError."""
    mount = mount_of(descriptor)
    return mount is not None and mount.is_fuse


def has_own_rules(descriptor: int) -> bool:
    """Return whether the modes on an open file's filesystem do not say who may read. Raise OSError.

    FUSE lets in nobody but the user who mounted it, unless it was mounted with allow_other.
    """
    mount = mount_of(descriptor)
    if mount is None:
        return False
    is_private = mount.is_fuse and "allow_other" not in mount.options.split(",")
    return is_private or mount.kind in _OWN_RULES


def stranger_at(path: str) -> int:
    """Return the user who mounted the filesystem at ``path``, if that is a stranger; else 0.

    Raise OSError.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return mounted_by_stranger(descriptor)
    finally:
        os.close(descriptor)
