"""Read the files of copies to find out whether their contents changed: each once, and not too many.

`own` asks for the digest of each file that has another time than was recorded.
"""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

from stager.disk.files import TICK, read_back

if TYPE_CHECKING:
    from typing import TypeAlias

#: Device, inode, size, and times of the last change of a file, in nanoseconds since 1970.
_State: TypeAlias = tuple[int, int, int, int, int]


class Reading:
    """Computes digests of files, for at most ``limit`` bytes in all. One that is known already is
    not read again: whoever writes to a file changes its ctime.
    """

    def __init__(self, limit: float = math.inf) -> None:
        #: How many files were beyond the limit.
        self.skipped = 0
        self._left = limit
        self._known: dict[_State, str] = {}

    def digest(self, path: str | bytes) -> str:
        """Return the xxh3-128 of a file in hexadecimal; nothing if it is beyond the limit.

        Raise OSError if it cannot be read or is not a plain file.
        """
        there = os.lstat(path)
        state = there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns
        if state in self._known:
            return self._known[state]
        if there.st_size > self._left:
            self.skipped += 1
            return ""
        self._left -= there.st_size
        # Within a tick a file may be written to twice and have the same ctime.
        is_still = time.time_ns() - there.st_ctime_ns > TICK
        digest = read_back(path)
        if is_still:
            self._known[state] = digest
        return digest
