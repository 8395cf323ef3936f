"""Gather facts of a node's disks beneath staging roots, and of its network: interfaces and fabrics.

Nothing with a name is made there.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stager.base.interfaces import Interface, Kind, interfaces, is_in, known_addresses
from stager.base.mounts import mount_of, mounted_by_stranger
from stager.fs.clone import FICLONE
from stager.fs.partial_file import NO_UNNAMED


@dataclass(frozen=True)
class Disk:
    """The filesystem that holds a folder."""

    path: str
    #: Its type, such as ``ext4``; empty if it cannot be told.
    kind: str
    #: Its bytes, those that users may still take, and likewise files. 0 where it counts no files.
    size: int
    free: int
    files: int
    free_files: int
    #: Why this user cannot make a file in the folder; empty if nothing is known against it.
    fault: str = ""
    #: Whether files can be written past the page cache (O_DIRECT), be without a name while they
    #: are written (O_TMPFILE), and share what they have in common (reflink).
    direct: bool = True
    unnamed: bool = True
    clones: bool = False


def disk_of(path: str) -> Disk | None:
    """Return the facts of the filesystem at ``path``; None if it cannot be looked at."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if mounted_by_stranger(descriptor):  # it may never answer
                return None
            mount, room = mount_of(descriptor), os.fstatvfs(descriptor)
        finally:
            os.close(descriptor)
        fault = _try(path, 0)
        is_open = not fault or fault in NO_UNNAMED
        return Disk(
            path=path,
            kind=mount.kind if mount else "",
            size=room.f_blocks * room.f_frsize,
            free=room.f_bavail * room.f_frsize,
            files=room.f_files,
            free_files=room.f_favail,
            fault="" if is_open else os.strerror(fault),
            direct=bool(fault) or not _try(path, os.O_DIRECT),
            unnamed=fault not in NO_UNNAMED,
            clones=not fault and _can_clone(path),
        )
    return None


def _try(path: str, flags: int) -> int:
    """Open a file without a name in the folder. Return the number of the error, 0 for none."""
    try:
        os.close(_new_file(path, flags))
    except OSError as error:
        return error.errno or 0
    return 0


def _can_clone(path: str) -> bool:
    """Return whether two files in the folder can share their bytes."""
    with suppress(OSError):
        first, second = _new_file(path), _new_file(path)
        try:
            os.write(first, bytes(os.sysconf("SC_PAGESIZE")))
            fcntl.ioctl(second, FICLONE, first)
            return True
        finally:
            os.close(first)
            os.close(second)
    return False


def _new_file(path: str, flags: int = 0) -> int:
    return os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)


#: Where the kernel shows devices by their class.
_CLASSES = Path("/sys/class")
#: The classes of faster fabrics: InfiniBand, RoCE and Omni-Path; Slingshot.
_FABRICS = ("infiniband", "cxi")


@dataclass(frozen=True, slots=True)
class Link(Interface):
    """An interface, and whether other nodes know this one by its address."""

    named: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether other nodes can be reached by it."""
        return not self.is_near and (self.named or self.kind is not Kind.VIRTUAL)


@dataclass(frozen=True)
class Fabric:
    """A device of a fabric, such as ``mlx5_0``; its rate as the kernel writes it, or nothing."""

    name: str
    rate: str


def fits(link: Link, wanted: str) -> bool:
    """Return whether an interface has the ``wanted`` name, or an address in the ``wanted`` network.

    A network that cannot be read is for MPI to judge.
    """
    if "/" not in wanted:
        return link.name == wanted
    try:
        return any(is_in(address, wanted) for address in link.addresses)
    except (OSError, ValueError):
        return True


def links() -> list[Link]:
    """Return the interfaces of this machine that are up, but for the loopback ones."""
    known = known_addresses()
    return [
        Link(
            one.name, one.kind, one.speed, one.addresses,
            named=not set(known).isdisjoint(one.hosts),
        )
        for one in interfaces()
    ]  # fmt: skip


def fabrics() -> list[Fabric]:
    """Return the devices of fabrics."""
    found: list[Fabric] = []
    for kind in _FABRICS:
        with suppress(OSError):
            for name in sorted(os.listdir(_CLASSES / kind)):
                device = _CLASSES / kind / name
                rates = (_read(path) for path in sorted(device.glob("ports/*/rate")))
                speed = _read(device / "device/port/speed")
                found.append(Fabric(name, next(filter(None, rates), speed)))
    return found


def _read(path: Path) -> str:
    """Return what the kernel writes there, nothing if it does not."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
