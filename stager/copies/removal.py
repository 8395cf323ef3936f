"""Remove a copy and its record, but none of the user's own files without being told to."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError
from stager.base.linux import born_at
from stager.copies.own import HoldsOwnError, find_own, is_copy
from stager.copies.reading import Reading
from stager.disk.aside import Aside, rename_if_free, rename_to_free
from stager.disk.files import TICK, facts_beneath, opened_beneath, remove_tree
from stager.disk.parents import remove_parents
from stager.disk.record import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable

    from stager.disk.cache import Cache
    from stager.disk.locks import Locks
    from stager.disk.record import Record


class SetAsideError(DestinationError):
    """What is left of a copy at ``path`` is at ``aside`` now.

    ``others`` says that it is what other users have made there, and not what was written meanwhile.
    """

    def __init__(self, path: str, aside: str, *, others: bool = False) -> None:
        if others:
            super().__init__(
                f"{path} was evicted, but not all that other users have in it: what they alone can "
                f"remove is in {aside}"
            )
            return
        super().__init__(
            f"{path} was to be evicted, but files were written into it meanwhile, and something "
            f"else has its name now; they are in {aside}, with the rest of the copy"
        )


def remove(
    cache: Cache,
    locks: Locks,
    disk: str,
    destination: str,
    job: int = 0,
    *,
    force: bool = False,
    reading: Reading | None = None,
) -> Record | None:
    """Remove a copy and its record, which is returned; None if it is in use, pinned or locked.

    With it go the folders above that stages have made and that are empty then. That ``job`` uses it
    does not count. A folder that the user put in the copy's place is kept. With ``force``, files of
    the user's own are deleted with the copy; without, ``reading`` finds them. Raise HoldsOwnError,
    OSError or DestinationError; after SetAsideError the record is gone.
    """
    if not locks.take(destination):
        return None
    try:
        record, jobs = cache.load(destination), cache.jobs()
        if record is None or record.pinned or set(jobs.get(destination, ())) - {job}:
            return None
        path = f"{disk}{destination}"
        # The copy goes first: a copy without a record would never be found again.
        if _is_on_disk(cache.root, path) and is_removable(cache, record, path):
            try:
                _remove_copy(cache, record, path, None if force else reading or Reading())
            except SetAsideError:
                cache.forget(destination)
                raise
        cache.forget(destination)
        remove_parents(cache, path, jobs)
        return record
    finally:
        locks.release(destination)


def is_removable(cache: Cache, record: Record, path: str) -> bool:
    """Return whether what is at ``path`` is the copy, or what a user made of it.

    A folder that the user put there instead is not removable.
    """
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    if record.tree:
        return is_copy(cache, record, path, there)
    return may_be_removed(record, there)


def may_be_removed(record: Record, there: os.stat_result) -> bool:
    if record.tree:
        return is_ours(there, record)
    is_file = stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)
    return is_file and there.st_uid == record.copy_facts.owner


def _is_on_disk(root: str, path: str) -> bool:
    """Whether ``path`` leads to no other filesystem, where there can be no copy."""
    try:
        facts_beneath(root, path)
    except OSError as error:
        return error.errno != errno.EXDEV
    return True


def _remove_copy(cache: Cache, record: Record, path: str, reading: Reading | None) -> None:
    """Remove the copy at ``path``, unless ``reading`` finds files of the user's own in it.

    A folder is looked through before and, for what was written meanwhile, again under another name.
    Raise HoldsOwnError, SetAsideError or OSError.
    """
    search = _Search(cache, record, reading) if reading else None
    if search:
        search.look(path)
    above, name = os.path.split(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)  # a file where a folder above was: the copy is gone
        with opened_beneath(cache.root, above) as folder:
            there = os.lstat(name, dir_fd=folder)
            if not may_be_removed(record, there):
                return
            if record.tree and search:
                _remove_folder(cache, path, folder, search)
            elif record.tree:
                _remove_all(cache, path, folder)
            else:
                if search and there.st_ctime_ns >= search.begun:
                    search.look(path)
                os.unlink(name, dir_fd=folder)


def _remove_all(cache: Cache, path: str, folder: int) -> None:
    """Remove the copy at ``path``, in the descriptor ``folder``, whatever is in it.

    What this user may not remove is put beside. Raise SetAsideError then, or OSError.
    """
    above, name = os.path.split(path)

    def remove(place: str) -> None:
        remove_tree(place)
        if os.path.lexists(place):
            os.chmod(place, stat.S_IMODE(there.st_mode))
            aside = _put_aside(place, name, folder)
            raise SetAsideError(path, f"{above}/{aside}", others=True)

    there = os.lstat(name, dir_fd=folder)
    cache.discard(name, folder, remove)


class _Search:
    """Looks for the user's own files in the copy of ``record``, at one place or another.

    ``begun`` is when the first look began, in nanoseconds since 1970. ``folders`` has the
    paths of the folders that were there at the last one, by inode.
    """

    def __init__(self, cache: Cache, record: Record, reading: Reading) -> None:
        self.begun = time.time_ns() - TICK
        self.folders: dict[int, bytes] = {}
        self._cache, self._record, self._reading = cache, record, reading

    def look(self, place: str) -> None:
        """Raise HoldsOwnError if there are such files in what is at ``place``."""
        self.folders.clear()
        if files := find_own(self._cache, self._record, place, self._reading, self.folders):
            raise HoldsOwnError(self._record, files)


def _remove_folder(cache: Cache, path: str, folder: int, search: _Search) -> None:
    """Remove the copy at ``path``, in the descriptor ``folder``, in which ``search`` found nothing.

    It is looked through again under another name if it was written into meanwhile. What is written
    later still, by a program in that folder, is moved to ``path``. Raise HoldsOwnError,
    SetAsideError or OSError.
    """
    # Not needed for a file.
    from stager.tree.late import Before, OthersFilesError, late, remove_but_late, was_touched

    above, name = os.path.split(path)
    checked: dict[int, int] = {}  # when the file with an inode was made

    def look_again(place: str) -> None:
        for file in late(place, Before(search.begun, folders=search.folders)):
            with suppress(FileNotFoundError):
                checked[os.lstat(f"{place}/{file}").st_ino] = born_at(f"{place}/{file}")
        if checked or was_touched(place, search.begun):
            search.look(place)

    def remove(place: str) -> None:
        before = Before(search.begun, checked, folders=search.folders)
        try:
            if os.lstat(place).st_ino not in search.folders:  # who may write there put it there
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
            remove_but_late(place, f"/proc/self/fd/{folder}/{name}", before)
        except OSError as error:
            left = rename_to_free(place, aside, folder, Aside.EVICTION)
            others = isinstance(error, OthersFilesError)
            raise SetAsideError(path, f"{above}/{left}", others=others) from None

    aside = _moved_aside(path, folder, look_again)
    cache.discard(aside, folder, remove)


def _moved_aside(path: str, folder: int, check: Callable[[str], object]) -> str:
    """Give the copy at ``path``, in the descriptor ``folder``, another name for the ``check``.

    Return that name. It is in the same folder, where nothing is removed if this process dies. What
    ``check`` raises, by the new path, is raised when the copy has its old name again. Raise
    SetAsideError if that was taken, OSError if the copy cannot be renamed.
    """
    above, name = os.path.split(path)
    aside = _put_aside(f"/proc/self/fd/{folder}/{name}", name, folder)
    try:
        check(f"{above}/{aside}")
    except BaseException:
        try:
            is_back = rename_if_free(f"/proc/self/fd/{folder}/{aside}", name, folder)
        except OSError:
            is_back = False
        if not is_back:
            raise SetAsideError(path, f"{above}/{aside}") from None
        raise
    return aside


def _put_aside(path: str, name: str, folder: int) -> str:
    """Rename ``path`` to a free name in the descriptor ``folder``, and return it. Raise OSError."""
    return rename_to_free(path, Aside.EVICTION.name_of(name), folder, Aside.EVICTION)
