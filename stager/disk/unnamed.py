"""Create files and folders under construction, which `Cache.sweep` removes if their writer dies.

A file has no name until it is complete, where the filesystem allows that. What has a name holds a
lock as long as its writer runs.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from stager.disk.files import CREATE, OPEN_FOLDER, opened

if TYPE_CHECKING:
    from collections.abc import Iterator

#: With what a filesystem refuses O_TMPFILE if it does not have it.
NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


class UnnamedFile:
    """A new file in ``folder``, without a name if the filesystem has O_TMPFILE.

    Without a name, even a killed writer leaves nothing. With one, `Cache.sweep` removes the file
    once its lock is gone. All methods raise OSError.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._name = ""
        try:
            self.descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._lock()
        except OSError as error:
            if error.errno not in NO_UNNAMED:
                raise
            self._open_named()

    def _open_named(self) -> None:
        with fresh_name(self._folder) as name:
            self.descriptor = os.open(name, CREATE, 0o600)
            self._name = name
            self._lock()

    def _lock(self) -> None:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        except OSError:
            self.close()
            raise

    def rename(self, path: str, folder: int | None = None) -> None:
        """Rename the file to ``path``, relative to ``folder``, in place of any file there."""
        if not self._name:
            name = _new_name(self._folder)
            give_name(self.descriptor, name)
            self._name = name
        os.rename(self._name, path, dst_dir_fd=folder)
        self._name = ""

    def close(self) -> None:
        """Close the file. Unless it was renamed, it is gone."""
        if self._name:
            with suppress(FileNotFoundError):
                os.unlink(self._name)
        os.close(self.descriptor)


def _new_name(folder: str) -> str:
    return f"{folder}/{os.urandom(8).hex()}"


@contextmanager
def fresh_name(folder: str) -> Iterator[str]:
    """Yield an unused path in ``folder``. Until the end, `Cache.sweep` finds nothing there."""
    with opened(folder, OPEN_FOLDER) as parent:
        fcntl.flock(parent, fcntl.LOCK_SH)
        yield _new_name(folder)


def make_partial_folder(folder: str) -> tuple[str, int]:
    """Make a locked folder in ``folder``. Return its path and descriptor. Raise OSError."""
    with fresh_name(folder) as name:
        os.mkdir(name, 0o700)
        descriptor = os.open(name, OPEN_FOLDER)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return name, descriptor


def give_name(descriptor: int, path: str) -> None:
    """Give an unnamed file the name ``path``, by way of /proc, as that needs no privilege.

    Raise OSError.
    """
    # With a folder descriptor, os.link() calls linkat(2), which can follow the link in /proc.
    with opened("/proc/self/fd", OPEN_FOLDER) as descriptors:
        os.link(str(descriptor), path, src_dir_fd=descriptors, follow_symlinks=True)
