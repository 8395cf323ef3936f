"""Count how often files are opened and read by any process on this machine, with inotify."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

# From linux/inotify.h.
_IN_ACCESS, _IN_OPEN, _IN_NONBLOCK = 0x1, 0x20, os.O_NONBLOCK
_IN_ISDIR = 0x40000000
_EVENT = struct.Struct("iIII")


class Watch:
    """Counts within ``with Watch(path) as watch: …``, in ``watch.opened`` and ``watch.read``.

    For a folder, files in it are counted, and not listings of the folder itself.

    All nodes of the test cluster share one kernel, so the accesses of every node are counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fsencode(path)
        self.opened = self.read = 0

    def __enter__(self) -> Self:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(_IN_NONBLOCK)
        assert self._descriptor >= 0
        watched = libc.inotify_add_watch(self._descriptor, self._path, _IN_ACCESS | _IN_OPEN)
        assert watched >= 0, os.strerror(ctypes.get_errno())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            events = os.read(self._descriptor, 1 << 20)
        except BlockingIOError:
            events = b""
        os.close(self._descriptor)
        at = 0
        while at < len(events):
            _, mask, _, name = _EVENT.unpack_from(events, at)
            at += _EVENT.size + name
            if not mask & _IN_ISDIR:
                self.opened += bool(mask & _IN_OPEN)
                self.read += bool(mask & _IN_ACCESS)
