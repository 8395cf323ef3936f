"""TODO."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from stager.disk.files import CREATE, OPEN_FOLDER, opened

if TYPE_CHECKING:
    from collections.abc import Iterator


class UnnamedFile:
    """A new file for writing in ``folder``, without a name where the filesystem allows that.

    So not even a kill leaves a part of it. It is locked, which tells `Cache.sweep` that it lives.
    Raises OSError.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._name = ""
        try:
            self.descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            self._open_named()

    def _open_named(self) -> None:
        with fresh_name(self._folder) as name:
            self.descriptor = os.open(name, CREATE, 0o600)
            self._name = name
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def rename(self, path: str, folder: int | None = None) -> None:
        """Put the file at ``path``, seen from ``folder``, in one step in place of what is there."""
        if not self._name:
            name = _new_name(self._folder)
            _give_name(self.descriptor, name)
            self._name = name
        os.rename(self._name, path, dst_dir_fd=folder)
        self._name = ""

    def close(self) -> None:
        """Let go of the file; unless it was renamed, its bytes are gone."""
        if self._name:
            with suppress(FileNotFoundError):
                os.unlink(self._name)
        os.close(self.descriptor)


def _new_name(folder: str) -> str:
    return f"{folder}/{os.urandom(8).hex()}"


@contextmanager
def fresh_name(folder: str) -> Iterator[str]:
    """A fresh name in ``folder``, where nothing is swept while it is made and locked."""
    with opened(folder, OPEN_FOLDER) as parent:
        fcntl.flock(parent, fcntl.LOCK_SH)
        yield _new_name(folder)


def make_partial_folder(folder: str) -> tuple[str, int]:
    """A new folder in ``folder``, locked as partial files are; its descriptor. Raises OSError."""
    with fresh_name(folder) as name:
        os.mkdir(name, 0o700)
        descriptor = os.open(name, OPEN_FOLDER)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return name, descriptor


def _give_name(descriptor: int, path: str) -> None:
    """Link an unnamed file to ``path``, which an unprivileged process can do by way of /proc."""
    # A folder descriptor makes os.link() call linkat(2), which can follow /proc's symlink.
    with opened("/proc/self/fd", OPEN_FOLDER) as descriptors:
        os.link(str(descriptor), path, src_dir_fd=descriptors, follow_symlinks=True)
