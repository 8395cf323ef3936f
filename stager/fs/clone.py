"""Make a file of the node's store one at a destination: share its blocks, link it, or copy it."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import closing, suppress
from enum import StrEnum

from stager.base import linux
from stager.base.extents import SMALLEST_HOLE, Extent
from stager.base.mounts import mount_of
from stager.base.telemetry import count
from stager.fs.partial_file import UnnamedFile, fresh_name, give_name
from stager.fs.reader import data_extents

#: Asks ioctl(2) to let one file share all blocks of another (linux/fs.h).
FICLONE = 0x40049409
#: With what a filesystem refuses a hard link that a copy can stand in for.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
#: Bytes that are copied at a time, and from which on the disk's room is reserved first.
_BLOCK = 1 << 20


class Way(StrEnum):
    """How a file of the store becomes one at a destination."""

    REFLINK = "reflink"
    HARD_LINK = "hard link"
    COPY = "copy"
    LINK = "symbolic link"


def way_between(store: str, folder: str) -> tuple[Way, str]:
    """Return the best way for files from ``store`` to ``folder``, and in few words why no better.

    It is found by a trial that leaves nothing. Both are folders of partial files of this user.
    Raise OSError if no file can be made there.
    """
    with closing(UnnamedFile(store)) as source, closing(UnnamedFile(folder)) as target:
        one, other = source.descriptor, target.descriptor
        try:  # with empty files, as a full disk has no block left
            fcntl.ioctl(other, FICLONE, one)
        except OSError as error:
            refusal = error.errno
        else:
            return Way.REFLINK, ""
        if os.fstat(one).st_dev != os.fstat(other).st_dev:
            return Way.COPY, "another filesystem"
        here, there = mount_of(one), mount_of(other)
        kind = there.kind if there else "filesystem"
        reasons = [] if refusal == errno.EXDEV else [f"this {kind} cannot share blocks"]
        try:
            with fresh_name(folder) as name:
                give_name(one, name)
                os.unlink(name)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            if error.errno == errno.EXDEV:
                reasons.append("another mount" if here != there else "another project quota")
            else:
                reasons.append(f"no hard link: {error.strerror}")
            return Way.COPY, ", ".join(reasons)
        return Way.HARD_LINK, ", ".join(reasons)


def fill(way: Way, source: int, target: int) -> Way:
    """Make the open empty file ``target`` equal to the open file ``source``.

    Holes stay holes, unless they are smaller than SMALLEST_HOLE. Return how it was done: a REFLINK
    that the kernel refuses for this file is made as a COPY, as any other way is. Raise OSError,
    with ENOSPC or EDQUOT where there is no room for the whole file, if possible before a large one
    is copied.
    """
    if way is Way.REFLINK:
        with suppress(OSError):  # if no copy can be made either, it tells why
            fcntl.ioctl(target, FICLONE, source)
            count()
            return way
    size = os.fstat(source).st_size
    if size <= SMALLEST_HOLE:
        _copy(source, target, Extent(0, size))
        return Way.COPY
    os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # read further ahead
    os.ftruncate(target, size)
    extents = list(data_extents(source, size))
    for offset, length in extents:
        if length > _BLOCK:
            linux.reserve(target, offset, length)
            count()
    for extent in extents:
        os.lseek(target, extent.offset, os.SEEK_SET)
        _copy(source, target, extent)
    return Way.COPY


def _copy(source: int, target: int, extent: Extent) -> None:
    """Copy an extent to where ``target`` is."""
    # Not by copy_file_range(2), which shares blocks: who asks for a copy wants none of that.
    at = extent.offset
    while at < extent.end:
        done = os.sendfile(target, source, at, min(_BLOCK, extent.end - at))
        if not done:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        at += done
        count()


def link(source: str | bytes, target: str | bytes) -> bool:
    """Make ``target`` another name of the file ``source``, which is not followed if it is a link.

    Return whether it is: not if the filesystem refuses, as ext4 does the 65,001st name of a file. A
    copy can stand in for it then. Raise OSError for all else.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        return False
    return True
