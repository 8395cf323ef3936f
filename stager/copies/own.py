"""Find what of a user's own a copy holds, which a new stage or an eviction would destroy.

That are files, folders and links which were not staged, and staged files whose contents changed
since. A file with another time but the same contents loses nothing, and one whose bytes alone
differ was damaged by the disk. What programs make again does not count: everything in
``__pycache__``, and in subfolders with a CACHEDIR.TAG.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base.errors import IntegrityError, PolicyRefusal, StageError
from stager.base.linux import born_at
from stager.base.paths import COMPILED_FOLDER
from stager.copies.reading import Reading
from stager.disk.files import opened
from stager.disk.record import is_ours

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stager.disk.cache import Cache
    from stager.disk.record import Record
    from stager.tree.listing import Listing
    from stager.tree.table import Table

#: How a file that marks its folder as a cache begins (https://bford.info/cachedir/).
_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
_TAG = b"/CACHEDIR.TAG"
_COMPILED = COMPILED_FOLDER.encode()
_OPEN_TAG = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NANOSECONDS = 1_000_000_000
#: How often a copy is listed that a program changes meanwhile.
_ATTEMPTS = 3


class HoldsOwnError(PolicyRefusal):
    """The copy of a ``record`` is kept, as it holds the user's own ``files``, or is one itself.

    Or it may hold some, but cannot be looked through: ``unread`` is the reason, and ``remedy`` what
    to do about that. ``why`` says either in a few words. The command in the message has ``option``,
    if that is not empty.
    """

    def __init__(
        self,
        record: Record,
        files: list[str],
        option: str = "",
        *,
        unread: str = "",
        remedy: str = "",
    ) -> None:
        from shlex import quote  # not needed where there are none

        from stager.base.text import listed

        self.files, self.unread, self.remedy = files, unread, remedy
        self.why = "is no longer what was staged there"
        what, whole = f"{self.why}; move it elsewhere", "it"
        if record.tree:
            self.why = f"holds files of the user's own: {listed(files)}"
            what, whole = f"holds {own_text(files)}; move {them(files)} elsewhere", "the whole copy"
        if unread:
            self.why = f"cannot be looked through for files of the user's own: {unread}"
            what = f"{self.why}; {remedy}"
        super().__init__(
            f"{record.destination} {what}, or delete {whole}: stagectl evict{option} --force "
            f"{quote(record.destination)}"
        )


def them(files: list[str]) -> str:
    """Return the pronoun for ``files``."""
    return "it" if len(files) == 1 else "them"


def own_text(files: list[str]) -> str:
    """Return how many ``files`` of a user's own there are, and the first few."""
    from stager.base.text import listed  # not needed where there are none

    return f"{count_text(len(files), files)}: {listed(files)}"


def count_text(count: int, names: Sequence[str]) -> str:
    """Return how many files of a user's own there are, of which ``names`` has the first."""
    from stager.base.text import entries_text

    was = "was" if count == 1 else "were"
    return f"{entries_text(count, names)} that {was} added or changed after staging"


def is_copy(cache: Cache, record: Record, path: str, there: os.stat_result) -> bool:
    """Return whether what is ``there``, at ``path``, is the copy: `is_ours`, and no other folder.

    One that was made after the copy was published, and in which no file is the one that was staged,
    has only got the inode number of the copy, which was deleted.
    """
    if not is_ours(there, record):
        return False
    born = 0
    with suppress(OSError):  # it is gone by now, or statx(2) is forbidden
        born = born_at(path) if record.tree else 0
    if born <= _sealed_at(cache, record):
        return True
    from stager.tree.listing import Kind
    from stager.tree.table import Table
    from stager.tree.walk import walk

    try:
        copy = walk(path, holes=False, specials=True)
    except (OSError, StageError):
        return False
    table = Table.load(cache, record)
    changed = {row for row, _ in table.unlike(copy)} if table else {*range(len(copy))}
    return any(row not in changed for row in copy.rows(Kind.FILE))


def _sealed_at(cache: Cache, record: Record) -> int:
    """Return when the copy of a folder was whole, in nanoseconds since 1970.

    Its table is written then, just before it is published.
    """
    try:
        return os.stat(cache.table_path(record.destination)).st_mtime_ns
    except OSError:
        return (record.staged_at + 1) * _NANOSECONDS


def find_own(
    cache: Cache,
    record: Record,
    path: str,
    reading: Reading | None = None,
    folders: dict[int, bytes] | None = None,
) -> list[str]:
    """Return the user's own files in the copy at ``path``, as paths in it; of a file, its name.

    So too if something else is in the copy's place. A folder in it that cannot be read counts as
    one file, unless it is in a cache. What has another time, and is beyond the limit of
    ``reading``, counts too. ``folders`` gets the path in the copy of each folder, by inode, as
    `tree.late.Before` has them. Raise HoldsOwnError if the copy itself cannot be listed.
    """
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    if not stat.S_ISDIR(there.st_mode):
        return [] if is_same_file(path, there, record, reading) else [os.path.basename(path)]
    try:
        copy, found, closed = _list(path)
    except (OSError, StageError) as error:
        if isinstance(error, StageError):
            reason, _, remedy = error.message.partition("; ")
        else:
            reason, remedy = error.strerror or "", ""
        remedy = remedy or "see that you can read all of it (chmod -R u+rwX)"
        raise HoldsOwnError(record, [], unread=reason, remedy=remedy) from error
    if folders is not None:
        folders.update(found)
    own = own_in_listing(cache, record, path, copy, reading)
    if closed:
        from stager.tree.listing import text_of  # not needed for a file
        from stager.tree.table import Table

        search = _Search(record, path, copy, Table.load(cache, record), reading or Reading())
        own += [f"{text_of(one)}/" for one in search.without_caches(closed)]
    return sorted(own)


def _list(path: str) -> tuple[Listing, dict[int, bytes], list[bytes]]:
    """List the copy at ``path``, its folders by inode, and those that cannot be read.

    Raise OSError or StageError.

    If a program removes or replaces files there meanwhile, list it again.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(IntegrityError):
            return _list_once(path)
    return _list_once(path)


def _list_once(path: str) -> tuple[Listing, dict[int, bytes], list[bytes]]:
    from stager.tree.walk import walk  # not needed for a file

    folders: dict[int, bytes] = {}
    closed: list[bytes] = []
    copy = walk(path, holes=False, specials=True, folders=folders, closed=closed)
    for one in closed:
        with suppress(OSError):
            folders[os.lstat(os.fsencode(path) + b"/" + one).st_ino] = one + b"/"
    return copy, folders, closed


def is_same_file(
    path: str, there: os.stat_result, record: Record, reading: Reading | None = None
) -> bool:
    """Return whether what is ``there`` has the bytes of the staged file, whatever its time."""
    if is_ours(there, record):
        return True
    copy = record.copy_facts
    alike = (there.st_size, there.st_uid) == (copy.size, copy.owner)
    if record.tree or not alike or not stat.S_ISREG(there.st_mode):
        return False
    with suppress(OSError):
        return (reading or Reading()).digest(path) == record.digest
    return False


def own_in_listing(
    cache: Cache, record: Record, path: str, copy: Listing, reading: Reading | None = None
) -> list[str]:
    """Return what `find_own` does of a folder, by a new listing of the ``copy``."""
    from stager.tree.table import Table, as_copy

    if record.tree and as_copy(copy).digest() == record.tree.copy_digest:
        return []
    table = Table.load(cache, record)  # None for the record of a file
    return _Search(record, path, copy, table, reading or Reading()).files()


def has_new_caches_alone(cache: Cache, record: Record, path: str) -> bool:
    """Return whether the folder at ``path`` is as it was staged but for what does not count.

    That is what programs have added in ``__pycache__`` and in subfolders with a CACHEDIR.TAG.
    """
    from stager.tree.table import Table, as_copy

    table = Table.load(cache, record)
    if table is None or record.tree is None:
        return False
    try:
        copy, _, closed = _list(path)
    except (OSError, StageError):
        return False
    search = _Search(record, path, copy, table, Reading())
    if closed and search.without_caches(closed):
        return False
    added = {row for row, before in table.unlike(copy) if before < 0}
    if added:
        caches = search.caches()
        dropped = {row for row in added if _lies_in(copy.paths[row], caches)}
        copy = copy.part(row for row in range(len(copy)) if row not in dropped)
    return as_copy(copy).digest() == record.tree.copy_digest


class _Search:
    """Looks for a user's own files in the listing of one ``copy``.

    Without the ``table`` of what was staged, all files of a copy that changed are taken for those.
    """

    def __init__(
        self, record: Record, path: str, copy: Listing, table: Table | None, reading: Reading
    ) -> None:
        self._reading = reading
        self._copy = copy
        self._table = table
        self._above = os.fsencode(path) + b"/"

    def files(self) -> list[str]:
        """Return the files' paths, sorted; the path of a folder ends in a slash.

        A folder counts if there is nothing in it, or nothing that counts.
        """
        from stager.tree.listing import Kind, text_of

        caches: set[bytes] | None = None
        parents: set[bytes] | None = None
        found: list[str] = []
        for row, before in self._candidates():
            path, is_folder = self._copy.paths[row], self._copy.kinds[row] == Kind.FOLDER
            if caches is None:  # only now, as there is something to look for
                caches = self.caches()
                parents = {
                    one.rpartition(b"/")[0]
                    for one in self._copy.paths
                    if not (caches and _lies_in(one, caches))
                }
            assert parents is not None
            if _lies_in(path, caches) or (is_folder and path in parents):
                continue  # what else is in the folder is looked at itself
            if not self._is_staged(row, before):
                found.append(text_of(path) + "/" * is_folder)
        return found

    def _candidates(self) -> Iterator[tuple[int, int]]:
        if self._table is None:
            return ((row, -1) for row in range(1, len(self._copy)))
        return self._table.unlike(self._copy)

    def caches(self) -> set[bytes]:
        """Return the subfolders of which nothing counts."""
        from stager.tree.listing import Kind

        return {
            path.removesuffix(_TAG) if path.endswith(_TAG) else path
            for path, kind in zip(self._copy.paths, self._copy.kinds, strict=True)
            if (kind == Kind.FOLDER and path.rpartition(b"/")[2] == _COMPILED)
            or (kind == Kind.FILE and path.endswith(_TAG) and self._is_tag(path))
        }

    def without_caches(self, folders: Iterable[bytes]) -> list[bytes]:
        """Return those of the ``folders`` that are not, and do not lie in, what does not count."""
        caches = self.caches()
        return [
            one
            for one in folders
            if one.rpartition(b"/")[2] != _COMPILED and not _lies_in(one, caches)
        ]

    def _is_tag(self, path: bytes) -> bool:
        with suppress(OSError), opened(self._above + path, _OPEN_TAG) as tag:
            return os.read(tag, len(_SIGNATURE)) == _SIGNATURE
        return False

    def _is_staged(self, row: int, before: int) -> bool:
        """Whether a row whose stat is not as recorded was staged all the same."""
        from stager.tree.listing import Kind

        if before < 0 or self._table is None:
            return False
        copy, staged = self._copy, self._table.source
        if copy.kinds[row] == staged.kinds[before] == Kind.LINK:
            return copy.targets[row] == staged.targets[before]
        now, then = copy.file_of(row), staged.file_of(before)
        if now < 0 or then < 0:
            return False
        if copy.sizes[now] != self._table.sizes[then]:
            return False
        with suppress(OSError):
            digest = self._reading.digest(self._above + copy.paths[row])
            return bytes.fromhex(digest) == self._table.digest(then)
        return False


def _lies_in(path: bytes, folders: set[bytes]) -> bool:
    """Return whether ``path`` is one of these folders, or lies in one."""
    while path:
        if path in folders:
            return True
        path = path.rpartition(b"/")[0]
    return False
