"""Find, make and use one user's folder of records beneath one cache root.

The folder is ``ROOT/.slurm-stage/UID``, mode 0700, on the filesystem of the copies: an erased disk
has no records, and a copy is published by one rename. Its parent belongs to root, so what is in the
folder was written by this user or by root.

======================  =====================================================================
function                what it does with the folder
======================  =====================================================================
`look_for_cache`        Check that it exists and that nobody else can write to it.
`open_cache`            Make it, if the user owns the root; check it; prepare it for writing.
`plan_cache`            Check it as it is, or as `open_cache` would make it; change nothing.
======================  =====================================================================
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from stager.base import linux
from stager.base.errors import DestinationError, SpaceError, StageError
from stager.base.extents import ALIGNMENT
from stager.base.mounts import stranger_at
from stager.base.paths import RECORDS_FOLDER
from stager.base.users import user_name
from stager.fs.files import (
    OPEN_FOLDER,
    OVERWRITE,
    READ_FILE,
    check_disk,
    existing_folder_above,
    facts_beneath,
    kind_of,
    name_of,
    opened,
    remove_tree,
    stage_errors,
    sync_folder,
    who_could_replace,
    write_all,
)
from stager.fs.partial_file import LOCK, UnnamedFile, fresh_name
from stager.fs.reader import BLOCK
from stager.store.leases import jobs_are_known, jobs_in, jobs_using
from stager.store.record import Record, TornError, is_ours

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Bytes of a record: some 600 and two paths. A larger file is not a record.
RECORD_LIMIT = 64 * 1024
#: How often a record is read that is not whole, and the seconds between two tries.
_READ_TRIES, _READ_PAUSE = 10, 0.002
#: Records that are looked at: they take some 100 MiB.
_MOST_RECORDS = 100_000
#: The folders for the records of copies, and the tables of folders; for those of folders that are
#: about to be published; and of those that are about to be changed in place, with what is new.
_PUBLISHED, _ANNOUNCED, _UPDATES = "records", "announced", "updates"
#: How the file with the last turn is opened.
_TURN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
#: Bytes of a table: a million files take some 200 MiB.
_TABLE_LIMIT = 1 << 32


class _Saved(NamedTuple):
    """The paths of a copy's record, and of the table of its files (`stager.tree.table`)."""

    record: str
    table: str

    def remove(self) -> None:
        """Remove both, if they are there. Raise DestinationError."""
        for path in self:
            with stage_errors(path), suppress(FileNotFoundError):
                os.unlink(path)


@dataclass(frozen=True, slots=True)
class Cache:
    """One user's folder beneath one cache root of this node.

    A ``shared`` cache belongs to the site's account for shared files, and all users may read its
    records. ``disk`` is where this process sees the disk of a simulated node.
    """

    folder: str
    shared: bool = False
    disk: str = ""

    @property
    def root(self) -> str:
        """The cache root above the folder."""
        return os.path.dirname(os.path.dirname(self.folder))

    @property
    def uid(self) -> int:
        """The user that the folder belongs to."""
        return int(os.path.basename(self.folder))

    @property
    def partial(self) -> str:
        """The folder of partial files and trees: what is under construction, or to be removed."""
        return f"{self.folder}/partial"

    def identity(self) -> str:
        """Return what tells this cache from all others, on whatever node; empty if never used."""
        with suppress(OSError):
            return hashlib.sha256(os.fsencode(os.readlink(self.secret))).hexdigest()[:32]
        return ""

    @property
    def secret(self) -> str:
        """The link that leads to the cache's secret (`stager.store.locks`)."""
        return f"{self.folder}/secret"

    def take_turn(self, turn: str) -> bool:
        """Return whether nobody called this with that ``turn`` before, on whatever node.

        If that cannot be noted, as on a full disk, nobody did.
        """
        with suppress(OSError), opened(f"{self.folder}/turn", _TURN) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            if os.pread(file, len(turn), 0) == turn.encode():
                return False
            write_all(file, turn.encode(), 0)
        return True

    def path_of(self, destination: str) -> str:
        """Return where this process sees the copy."""
        return f"{self.disk}{destination}"

    def jobs(self) -> dict[str, list[int]]:
        """Return the jobs that use each destination: of this node, and of all for what they see."""
        found = jobs_using(None if self.shared else self.uid, self.root)
        for destination, jobs in jobs_in(self.folder).items():
            found[destination] = sorted({*found.get(destination, ()), *jobs})
        return found

    def record_path(self, destination: str) -> str:
        """Return the path of the record of ``destination``."""
        return self._saved(destination).record

    def load(self, destination: str) -> Record | None:
        """Return the record of ``destination``, or None if there is none that can be trusted."""
        with suppress(OSError, ValueError):
            return self.read(self.record_path(destination))
        return None

    def read(self, path: str) -> Record:
        """Return the record in the file ``path`` of this cache, or one that has replaced it.

        Raise OSError if the file cannot be read, ValueError if it cannot be trusted.
        """
        return self._published(os.path.basename(path)) or self._read(path)

    def _published(self, name: str) -> Record | None:
        """Return the announced record in the file ``name``, if its folder has been published."""
        with suppress(OSError, ValueError):
            record = self._read(f"{self.folder}/{_ANNOUNCED}/{name}")
            # A record may name any path: nothing is asked of what a user has mounted there.
            there = facts_beneath(self.root, self.path_of(record.destination))
            return record if is_ours(there, record) else None
        return None

    def _read(self, path: str) -> Record:
        record = self._read_whole(path)
        if os.path.basename(self.record_path(record.destination)) != os.path.basename(path):
            raise ValueError(f"it is the record of {record.destination} under another name")
        root, path = self.root.removeprefix(self.disk).rstrip("/"), record.destination
        if not path.startswith(f"{root}/") or "/../" in f"{path}/":
            raise ValueError(f"it is the record of {path}, which is not in {root}")
        if self.shared and record.copy_facts.owner != self.uid:
            raise ValueError(f"its copy does not belong to uid {self.uid}")
        return record

    def _read_whole(self, path: str) -> Record:
        """Read a record again while it is written over, which takes no time but on a busy node."""
        for _ in range(_READ_TRIES):
            with suppress(TornError):
                return Record.from_json(_read_trusted(path, self._writers()))
            time.sleep(_READ_PAUSE)
        return Record.from_json(_read_trusted(path, self._writers()))

    def _writers(self) -> tuple[int, ...]:
        """The owners of files here that can be trusted."""
        return (self.uid,) if self.shared else (0, os.getuid())

    def record_paths(self) -> list[str]:
        """Return the paths of all files that may be records, up to a limit. Raise OSError."""
        folders = f"{self.folder}/{_PUBLISHED}", f"{self.folder}/{_ANNOUNCED}"
        names = dict.fromkeys(name for folder in folders for name in _names_in(folder))
        return [f"{folders[0]}/{name}" for name in names]

    def records(self) -> Iterator[Record]:
        """Yield every record that can be trusted, in no order."""
        for path in self.record_paths():
            with suppress(OSError, ValueError):
                yield self.read(path)

    def save(self, record: Record) -> None:
        """Replace the destination's record in one step. Raise SpaceError or DestinationError.

        On a full disk, write the new record over the old one if it fits there, which is not one
        step: to pin a copy needs no room. The caller holds the destination's lock.
        """
        path, text = self.record_path(record.destination), record.to_json().encode()
        try:
            self._replace(path, text)
        except SpaceError:
            if not self._overwrite(path, text):
                raise

    def note_use(self, record: Record) -> None:
        """Save what may be lost in a power failure, and is not worth a wait for the disk.

        Raise as `save` does, and hold the same lock.
        """
        text = record.to_json().encode()
        if not self._overwrite(self.record_path(record.destination), text):
            self.save(record)

    def _overwrite(self, path: str, text: bytes) -> bool:
        """Write ``text`` over the record at ``path``. Return False if it does not fit there."""
        if len(text) > ALIGNMENT:  # more than one block might be written in part
            return False
        with suppress(OSError, ValueError), opened(path, OVERWRITE) as record:
            facts = _check_trusted(record, self._writers())
            room = max(facts.st_size, facts.st_blocks * BLOCK)
            if facts.st_size <= ALIGNMENT and len(text) <= room:
                # Blanks after a record do no harm, so that it gets no shorter.
                write_all(record, text.ljust(facts.st_size), 0)
                return True
        return False

    def _replace(self, path: str, text: bytes) -> None:
        with stage_errors(self.partial), closing(UnnamedFile(self.partial)) as fresh:
            write_all(fresh.descriptor, text, 0)
            if self.shared:
                os.fchmod(fresh.descriptor, 0o644)
            # Else a name may outlive a power failure without what is in the file.
            os.fdatasync(fresh.descriptor)
            fresh.rename(path)
            with opened(os.path.dirname(path), OPEN_FOLDER) as folder:
                sync_folder(folder)

    def forget(self, destination: str) -> None:
        """Remove the destination's record and table, if any. Raise DestinationError."""
        self._saved(destination).remove()
        self._saved(destination, _ANNOUNCED).remove()
        self.drop_update(destination)

    def load_table(self, record: Record) -> bytes | None:
        """Return the table that belongs to the record of a folder, or None if it is gone."""
        for place in (_PUBLISHED, _ANNOUNCED, _UPDATES):
            with suppress(OSError, ValueError):
                path = self._saved(record.destination, place).table
                text = _read_trusted(path, self._writers(), limit=_TABLE_LIMIT)
                if record.tree and xxhash.xxh3_128_hexdigest(text) == record.tree.table_digest:
                    return text
        return None

    def announce_table(self, destination: str, text: bytes, *, update: bool = False) -> str:
        """Save the table for `announce`, and return its digest. Raise as `save` does."""
        path = self._saved(destination, _UPDATES if update else _ANNOUNCED).table
        _make_folder(os.path.dirname(path), 0o755 if self.shared else 0o700)
        self._replace(path, text)
        return xxhash.xxh3_128_hexdigest(text)

    def announce(self, record: Record, *, update: bool = False) -> None:
        """Save the record of a folder that is about to be published. Raise as `save` does.

        It counts from the moment at which the folder is at its destination, also if this process
        dies then. Until then, the one of what is there counts; with ``update``, until
        `finish_update`. The caller has saved its table, and holds the destination's lock.
        """
        saved = self._saved(record.destination, _UPDATES if update else _ANNOUNCED)
        self._replace(saved.record, record.to_json().encode())

    def promote(self, destination: str, place: str = _ANNOUNCED) -> None:
        """Replace the record by the announced one, whose folder is in place now.

        The caller holds the destination's lock. Raise DestinationError.
        """
        announced, published = self._saved(destination, place), self._saved(destination)
        # The table first: it is looked for at all places.
        for old, new in zip(announced[::-1], published[::-1], strict=True):
            with stage_errors(new), suppress(FileNotFoundError):
                os.rename(old, new)

    def settle(self, destination: str) -> None:
        """Replace the record by the announced one if its folder is in place, else remove that.

        Of an update, remove what was written before it could begin. The caller holds the
        destination's lock. Raise DestinationError.
        """
        announced = self._saved(destination, _ANNOUNCED)
        if any(map(os.path.lexists, announced)):
            if self._published(os.path.basename(announced.record)):
                self.promote(destination)
            else:
                announced.remove()
        if not self.is_updating(destination):
            self._saved(destination, _UPDATES).remove()

    def is_updating(self, destination: str) -> bool:
        """Return whether the folder there was being changed in place, and that was not finished."""
        return os.path.lexists(self.update_path(destination))

    def update_path(self, destination: str) -> str:
        """Return where what is new in a folder is while it is changed in place.

        As long as it is there, the change has to be finished: `store.removal` does that.
        """
        return f"{self._saved(destination, _UPDATES).table}.new"

    def updated(self, destination: str) -> Record | None:
        """Return the record of a folder that is being changed in place, None if there is none."""
        with suppress(OSError, ValueError):
            return self._read(self._saved(destination, _UPDATES).record)
        return None

    def finish_update(self, destination: str) -> None:
        """Replace the record by that of the folder that was changed. Raise DestinationError."""
        with stage_errors(self.folder), opened(self.folder, OPEN_FOLDER) as folder:
            linux.sync_filesystem(folder)  # else the record may outlive a power failure alone
        self.promote(destination, _UPDATES)
        self.drop_update(destination)

    def drop_update(self, destination: str) -> None:
        """Remove what is left of an update. Raise DestinationError."""
        if self.is_updating(destination):
            with stage_errors(self.partial):
                with fresh_name(self.partial) as path:
                    os.rename(self.update_path(destination), path)
                remove_tree(path)
        self._saved(destination, _UPDATES).remove()

    def _saved(self, destination: str, place: str = _PUBLISHED) -> _Saved:
        """Return where the record and the table of a copy are in one of the three folders."""
        key = xxhash.xxh3_128_hexdigest(os.fsencode(destination))
        return _Saved(f"{self.folder}/{place}/{key}.json", f"{self.folder}/{place}/{key}")

    def sweep(self) -> None:
        """Remove partial files and trees whose writer has ended; a running one holds a lock."""
        with opened(self.partial, OPEN_FOLDER) as parent:
            for name in os.listdir(self.partial):
                path = f"{self.partial}/{name}"
                with suppress(OSError, StageError), _abandoned(path, parent):
                    remove_tree(path)


@contextmanager
def _abandoned(path: str, parent: int) -> Iterator[None]:
    """Lock the partial file or tree at ``path`` for the body, which removes it.

    The folder ``parent`` is locked for a moment only: a removal may take long, and meanwhile others
    make files there. Raise BlockingIOError if the writer runs, or if a process has made a file and
    not locked it yet.
    """
    with ExitStack() as stack:
        fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            _lock_now(path, stack)
            with suppress(FileNotFoundError):
                _lock_now(path + LOCK, stack)
        finally:
            fcntl.flock(parent, fcntl.LOCK_UN)
        yield


def _lock_now(path: str, stack: ExitStack) -> None:
    try:  # NFS locks only what is open for writing
        entry = stack.enter_context(opened(path, READ_FILE | os.O_RDWR))
    except (IsADirectoryError, PermissionError):
        entry = stack.enter_context(opened(path, READ_FILE))
    fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)


def look_for_cache(root: str, uid: int, *, shared: bool = False, disk: str = "") -> Cache:
    """Return the cache of user ``uid`` beneath ``root``, which is on the ``disk`` of `Cache`.

    Raise DestinationError if it is missing, if its disk is read-only, or if somebody else can write
    to it; for a ``shared`` cache, also if somebody else can write to the root. Raise SpaceError if
    it is missing because the disk is full.
    """
    _check_mounter(root)
    if shared:
        _check_folder(root or "/", (0, uid), root)
    _check_folder(_parent(root), (0, uid), root)
    _check_folder(_folder(root, uid), (uid,), root)
    return Cache(_folder(root, uid), shared, disk)


def caches_in(
    roots: Iterable[str], uid: int, *, shared: bool = False, disk: str = ""
) -> Iterator[Cache]:
    """Yield the cache of user ``uid`` beneath each of the ``roots`` that has one."""
    for root in roots:
        with suppress(StageError):  # this user never staged anything there
            yield look_for_cache(f"{disk}{root}", uid, shared=shared, disk=disk)


@dataclass(frozen=True, slots=True)
class RootFacts:
    """What the site says of a cache root.

    A ``private`` one is there for a job or a user alone, and root's part makes nothing there. The
    ``hint`` is how a job asks for it. Where root's part does not run, the user makes the folders of
    other ones, too, if they are to be made ``by_user``.
    """

    private: bool = False
    hint: str = ""
    by_user: bool = False

    @property
    def is_made_by_user(self) -> bool:
        """Whether the user makes the folders there."""
        return self.private or (self.by_user and not jobs_are_known())


_FIXED = RootFacts()


def open_cache(
    root: str,
    uid: int,
    *,
    shared: bool = False,
    of_root: RootFacts = _FIXED,
    disk: str = "",
) -> Cache:
    """Return the cache that `look_for_cache` returns, ready for writing.

    Make it first if the user owns ``root``, or makes the folders there; elsewhere root has made it.
    Then make the folders in it, and remove the partial files of writers that have ended. A
    ``shared`` cache is written by ``uid`` alone; all others get it as it is, empty if nothing was
    ever staged there.
    """
    if shared and uid != os.getuid():
        _check_mounter(root)
        if not os.path.lexists(_folder(root, uid)):
            return Cache(_folder(root, uid), True, disk)
        return look_for_cache(root, uid, shared=True, disk=disk)
    mode = 0o755 if shared else 0o700
    if of_root.is_made_by_user:
        _make_by_user(root, uid, mode, of_root)
    facts = _facts_of(root, uid, of_root)
    if facts.st_uid == uid:
        # Of a root that belongs to root, all users pass through the first folder to theirs.
        _make_folder(_parent(root), 0o755)
        _check_folder(_parent(root), (0, uid), root)
        _make_folder(_folder(root, uid), mode)
    cache = look_for_cache(root, uid, shared=shared, disk=disk)
    _make_inner_folders(cache, mode)
    with stage_errors(cache.folder):
        cache.sweep()
    return cache


def _make_by_user(root: str, uid: int, mode: int, of_root: RootFacts) -> None:
    """Make what is missing of a root and its folders, as far as an ordinary user may.

    A private root itself is the site's to make. Raise DestinationError if somebody else can.
    """
    if of_root.private:
        _facts_of(root, uid, of_root)
    with suppress(OSError, StageError):  # `look_for_cache` tells what is missing then
        if not os.path.lexists(root or "/"):
            os.mkdir(root, 0o755)
        if not os.path.lexists(_parent(root)):
            _make_folder(_parent(root), 0o755)
        if os.lstat(_parent(root)).st_uid == uid:
            _make_folder(_folder(root, uid), mode)


def _facts_of(root: str, uid: int, of_root: RootFacts) -> os.stat_result:
    """Return the facts of a root. Raise DestinationError if it cannot be used.

    A private one belongs to the user or to root, and nobody else can put another in its place.
    """
    try:
        if of_root.private and (who := _who_could_replace(root, (0, uid))):
            raise DestinationError(
                f"{root}: {who} could replace what is staged there; tell the administrator"
            )
        return os.stat(root or "/")
    except OSError as error:
        if error.errno == errno.ENOENT and (of_root.hint or of_root.private):
            remedy = "this site makes it for its jobs; tell the administrator"
            if of_root.hint:
                remedy = f"ask for it by {of_root.hint}"
            raise DestinationError(f"there is no {root}: {remedy}") from None
        raise DestinationError(
            f"{root}, where this site stages, cannot be used on this node: {error.strerror}; tell "
            "the administrator"
        ) from None


def _who_could_replace(root: str, owners: tuple[int, int]) -> str:
    """Return who could replace a private root or what is in it; empty if nobody. Raise OSError."""
    owner = os.lstat(root).st_uid
    if owner not in owners:
        return name_of(owner)  # and a link of theirs is not followed
    above = os.stat(os.path.dirname(root))
    return who_could_replace(above, owners) or who_could_replace(os.stat(root), owners)


def plan_cache(
    root: str,
    uid: int,
    *,
    shared: bool = False,
    of_root: RootFacts = _FIXED,
    disk: str = "",
) -> Cache:
    """Return the cache that `open_cache` would return, and make nothing. Raise as it does."""
    if shared and uid != os.getuid():
        return open_cache(root, uid, shared=True, disk=disk)
    if of_root.private:
        _facts_of(root, uid, of_root)
    try:
        return look_for_cache(root, uid, shared=shared, disk=disk)
    except DestinationError:
        above = existing_folder_above(_parent(root))
        may = of_root.is_made_by_user and os.access(above, os.W_OK | os.X_OK)
        if os.path.lexists(_parent(root)) or not (may or os.stat(above).st_uid == uid):
            raise
        check_disk(above)
        return Cache(_folder(root, uid), shared, disk)


def _parent(root: str) -> str:
    return f"{root}/{RECORDS_FOLDER}"


def _folder(root: str, uid: int) -> str:
    return f"{root}/{RECORDS_FOLDER}/{uid}"


def _make_inner_folders(cache: Cache, mode: int) -> None:
    records = f"{cache.folder}/{_PUBLISHED}"
    _make_folder(records, mode)
    if cache.shared:  # root made its folder for the account alone, as it does for users
        for folder in (cache.folder, records):
            if stat.S_IMODE(os.stat(folder).st_mode) != mode:
                with stage_errors(folder):
                    os.chmod(folder, mode)
    _make_folder(cache.partial, 0o700)


def _make_folder(path: str, mode: int) -> None:
    with stage_errors(path), suppress(FileExistsError):
        os.mkdir(path, mode)
        os.chmod(path, mode)  # whatever the user's mask


def _check_mounter(root: str) -> None:
    """Raise DestinationError if a stranger mounted the filesystem of ``root``.

    Where the site's disk is missing, any user may take the name of a root, and pretend any owner.
    """
    with suppress(OSError):  # what is missing is told later
        stranger = stranger_at(root or "/")
        if stranger:
            raise DestinationError(
                f"{root} is on a filesystem that uid {stranger} mounted; tell the administrator"
            )


def _check_folder(path: str, owners: tuple[int, ...], root: str) -> None:
    """Raise an error unless ``path`` is a folder that only its owner, one of these, can write."""
    try:
        facts = os.lstat(path) if path == (root or "/") else facts_beneath(root, path)
    except FileNotFoundError:
        check_disk(root or "/")  # on a full or read-only disk, root could not make it
        raise DestinationError(f"{path} is missing: {_why_missing(root, owners[-1])}") from None
    except OSError as error:
        why = "a filesystem is mounted there" if error.errno == errno.EXDEV else error.strerror
        raise DestinationError(f"{path}: {why}; tell the administrator") from None
    names = " or ".join(f"uid {uid}" for uid in owners)
    problem = ""
    if not stat.S_ISDIR(facts.st_mode):
        problem = f"is {kind_of(facts.st_mode)}, not a folder"
    elif facts.st_uid not in owners:
        problem = f"belongs to uid {facts.st_uid}, not to {names}"
    elif facts.st_mode & 0o022:
        problem = f"can be written to by users other than {names}"
    if problem:
        raise DestinationError(f"{path} {problem}; tell the administrator")


def _why_missing(root: str, uid: int) -> str:
    """Return why root's part has not made the folder of a user, and what to do."""
    if os.path.islink(root) and linux.without_own_link(root) == root:
        return (
            f"{root} is a symbolic link that others than root can replace, and the site's prolog "
            "or plugin follows none of these; tell the administrator to name "
            f"{os.path.realpath(root)} in roots of stage.toml instead"
        )
    if not user_name(uid):
        return (
            f"this node knows no user with uid {uid}, so the site's prolog or plugin makes no "
            f"folders there; tell the administrator (getent passwd {uid})"
        )
    return "the site's prolog or plugin makes it at the start of a job; tell the administrator"


def check_inodes(cache: Cache, count: int) -> None:
    """Raise SpaceError if the disk has no inodes for ``count`` more files and folders."""
    with stage_errors(cache.folder):
        room = os.statvfs(cache.folder)
    if room.f_files > 0 and room.f_favail < count:  # some filesystems have no limit
        raise SpaceError(
            f"{cache.root}: {count} files and folders are needed, but the disk can hold only "
            f"{room.f_favail} more, whatever their size; delete files, or stage an archive without "
            "extract"
        )


def _names_in(folder: str) -> list[str]:
    """Return the names of what may be records. Raise OSError."""
    try:
        with os.scandir(folder) as entries:
            names = (
                entry.name
                for entry in islice(entries, 2 * _MOST_RECORDS)
                if entry.name.endswith(".json")
            )
            return [*islice(names, _MOST_RECORDS)]
    except FileNotFoundError:  # nothing was ever staged here
        return []


def _read_trusted(path: str, writers: tuple[int, ...], limit: int = RECORD_LIMIT) -> bytes:
    """Return what is in a file."""
    with opened(path, READ_FILE) as descriptor:
        facts = _check_trusted(descriptor, writers)
        if facts.st_size > limit:
            raise ValueError("it is longer than a record can be")
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read()


def _check_trusted(descriptor: int, writers: tuple[int, ...]) -> os.stat_result:
    """Return the facts of an open file. Raise ValueError if others can write it."""
    facts = os.fstat(descriptor)
    trusted = facts.st_uid in writers and not facts.st_mode & 0o022
    if not (stat.S_ISREG(facts.st_mode) and trusted and facts.st_nlink == 1):
        raise ValueError("it is not a plain file that this user alone can write")
    return facts
