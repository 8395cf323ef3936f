"""Tell how much memory this process may still take where it is limited, as Slurm does for a job."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.mounts import mount_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS = "/sys/fs/cgroup"
#: The filesystems whose files take memory.
_IN_MEMORY = ("tmpfs", "ramfs")
#: The files of a control group of version 2 and of version 1: the limit in bytes, the bytes in use;
#: and which of these the kernel gives back when they are needed, by their names in memory.stat.
_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "memory.limit_in_bytes", "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)  # fmt: skip
#: Version 1 writes a greater number for no limit.
_NO_LIMIT = 1 << 60


def is_in_memory(path: str) -> bool:
    """Return whether files at ``path`` take memory. Raise OSError."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mount = mount_of(descriptor)
        return mount is not None and mount.kind in _IN_MEMORY
    finally:
        os.close(descriptor)


def memory_left() -> int | None:
    """Return the bytes that this process and those of its job may still take; None for no limit."""
    found: list[int] = []
    for folder in _groups():
        for files in _FILES:
            with suppress(OSError, ValueError):  # of the other version; or there is no limit
                found.append(_left_in(folder, *files))
    return min(found, default=None)


def room_in_memory(path: str) -> int | None:
    """Return the bytes that files at ``path`` may still take of the memory of this process' job.

    It is None if they take none, or if there is no limit. Raise OSError.
    """
    return memory_left() if is_in_memory(path) else None


def _groups() -> Iterator[str]:
    """Yield the folders of the control groups of memory that this process is in."""
    with suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, kinds, path = line.rstrip("\n").split(":", 2)
            if not kinds or "memory" in kinds.split(","):
                top = f"{_GROUPS}/memory" if kinds else _GROUPS
                folder = f"{top}{path}".rstrip("/")
                while folder.startswith(top):
                    yield folder
                    folder = os.path.dirname(folder)


def _left_in(folder: str, limit: str, usage: str, given_back: tuple[str, ...]) -> int:
    """Return the bytes left in one group. Raise OSError, ValueError if it has no limit."""
    most = int(_read(f"{folder}/{limit}"))
    if most > _NO_LIMIT:
        raise ValueError("there is no limit")
    stat = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
    used = int(_read(f"{folder}/{usage}")) - sum(int(stat.get(name, 0)) for name in given_back)
    return max(0, most - max(0, used))


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
