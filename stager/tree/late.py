"""Keep what was written into a folder while the one that has taken its place was made.

The survey has refused to replace what is the user's own; this is about what came later.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError
from stager.base.paths import COMPILED_FOLDER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

#: What the name of a file gets that is in the way of a staged one.
_ASIDE = ".before-staging"


def keep_late(old: str, new: str, since: int, shared: Collection[int]) -> None:
    """Move the files that were written in the folder ``old`` since then to the same places in
    ``new``; beside a file that is there already.

    ``since`` is in nanoseconds since 1970. ``shared`` has the inodes of ``new``: a hard link, by
    which it took a file over, changes that file's time. Raise DestinationError if files cannot be
    moved; then ``old`` is beside ``new``.
    """
    try:
        for path in list(late(old, since, shared)):
            _move(f"{old}/{path}", f"{new}/{path}")
    except OSError as error:
        aside = _free_name(new)
        os.rename(old, aside)
        raise DestinationError(
            f"{new} was staged, but files that were written into it meanwhile could not be moved "
            f"over ({error.strerror}); they are in {aside}, with the rest of the old folder"
        ) from None


def late(old: str, since: int, shared: Collection[int] = ()) -> Iterator[str]:
    """Yield the paths of the entries that were written since then and are not ``shared``."""
    folders = [""]
    for folder in folders:  # grows while it is read
        try:
            with os.scandir(f"{old}/{folder}") as found:
                entries = list(found)
        except PermissionError:  # nobody can have written there
            continue
        for entry in entries:
            path = f"{folder}{entry.name}"
            there = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(there.st_mode):
                if entry.name != COMPILED_FOLDER:
                    folders.append(f"{path}/")
            elif there.st_ctime_ns >= since and there.st_ino not in shared:
                yield path


def _move(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with _writable(os.path.dirname(path)), _writable(os.path.dirname(target)):
        os.rename(path, _free_name(target) if os.path.lexists(target) else target)


@contextmanager
def _writable(folder: str) -> Iterator[None]:
    """Let the user write in a ``folder``, which its copy may forbid."""
    mode = stat.S_IMODE(os.lstat(folder).st_mode)
    if mode & stat.S_IWUSR:
        yield
        return
    os.chmod(folder, mode | stat.S_IWUSR)
    try:
        yield
    finally:
        os.chmod(folder, mode)


def _free_name(path: str) -> str:
    name, number = f"{path}{_ASIDE}", 1
    while os.path.lexists(name):
        name, number = f"{path}{_ASIDE}-{number}", number + 1
    return name
