"""Survey one node for one item: is its copy current, and can a new one be put in its place?

Nothing is written. Shared storage is not touched either: rank 0 alone looks at the source, and a
copy is judged by what is on its own node's disk. But who reads the source tells whether it and the
destination are, or contain, each other by other names (`check_apart`): then the copy would take the
place of the only original, and be evicted as any other copy.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError
from stager.base.options import Validate
from stager.base.telemetry import Kind, doing
from stager.base.users import name_or_uid
from stager.fs.files import (
    as_stage_error,
    check_read_only,
    digest_of,
    existing_folder_above,
    kind_of,
    name_of,
    not_a_folder,
    opened_beneath,
    read_back,
    who_could_replace,
)
from stager.store.entries import is_entry
from stager.store.record import has_open_names, is_ours

if TYPE_CHECKING:
    from typing import TypeAlias

    #: Device and inode.
    _Place: TypeAlias = tuple[int, int]
    from collections.abc import Callable

    from stager.request.items import StageItem
    from stager.source.description import Source, SourceFacts
    from stager.store.cache import Cache
    from stager.store.record import Record


def check_apart(source: str, path: str) -> None:
    """Raise DestinationError if the destination at ``path`` and the ``source`` are not apart.

    Only the node that reads the source can tell. Whether the source can be read is not checked.
    """
    try:
        with doing(Kind.READ, source):
            from_source = _upwards(os.path.realpath(source))
        from_destination = _upwards(os.path.realpath(existing_folder_above(path)))
    except OSError:
        return  # who reads the source, or looks at the destination, says why
    (original, real), *_ = from_source.items()
    there = _place_of(os.lstat(path)) if os.path.lexists(path) else None
    if there == original:
        relation = "is the source itself"
    elif original in from_destination:
        relation = f"is in the source, {real}"
    elif there in from_source:
        relation = f"contains the source, {real}"
    else:
        return
    leads = "" if source == real else f", to which {source} leads"
    raise DestinationError(f"{path} {relation}{leads}; choose another destination")


def _upwards(path: str) -> dict[_Place, str]:
    """Return ``path``, which has no links, and all folders above it. Raise OSError."""
    places = {_place_of(os.stat(path)): path}
    while path != "/":
        path = os.path.dirname(path)
        places.setdefault(_place_of(os.stat(path)), path)
    return places


def _place_of(there: os.stat_result) -> _Place:
    return there.st_dev, there.st_ino


#: Seconds to wait, in turn, for the record of a copy that may just have been replaced.
_PUBLICATION = (0.1, 0.5, 1.0)


class Reason(StrEnum):
    """Why a copy is not current, as `stagectl plan` and JSON show it."""

    ABSENT = "absent"
    NOT_RECORDED = "what is there was not staged"
    UNREADABLE_RECORD = "its record cannot be read"
    ALWAYS = "validate=always"
    #: Something else is in its place.
    REPLACED = "replaced"
    OTHER_SOURCE = "staged from another source"
    SOURCE_CHANGED = "the source changed"
    #: A folder's listing is another one: by a change, or by other options include and exclude.
    LISTING_CHANGED = "the source changed, or other files of it are wanted"
    COPY_CHANGED = "the copy changed"
    #: Of an entry in the store.
    NAMES_CHANGED = "something was put into the copy"
    DAMAGED = "it is damaged"
    RELOCATED_DIFFERENTLY = "relocated differently"
    SHARED_DIFFERENTLY = "shared differently"
    #: Such as with and without decompress.
    MADE_DIFFERENTLY = "made differently"
    #: With and without mode=shard, and with another by=.
    PART_ONLY = "the copy has one node's part (mode=shard), all files are wanted"
    NOT_SPLIT = "the copy has all files, one part (mode=shard) is wanted"
    SPLIT_DIFFERENTLY = "split differently"
    #: Each node has a current part, but together they do not have all parts of one split.
    OTHER_NODES = "spread over other nodes"


@dataclass(frozen=True, slots=True)
class Survey:
    """One node's answer for one item."""

    node: str
    #: None for a current copy.
    reason: Reason | None
    #: The recorded digest of a current copy.
    digest: str
    #: The number of files of a current tree, and what is recorded for its user.
    files: int = 0
    note: str = ""
    #: The split that a current part of a folder belongs to.
    split: str = ""
    #: Whether something of the user's own is there, which ``replace`` lets the stage destroy.
    changed: bool = False
    #: With lifetime=job: whether the copy stays all the same, as it is pinned.
    pinned: bool = False
    #: The jobs that use the copy there, which is not current, and for which it must stay.
    jobs: tuple[int, ...] = ()
    #: The source of the copy there, which is not current, if that is another one.
    replaces: str = ""
    #: Who else could replace the copy, and by which folder, as the user is told.
    open_to: str = ""
    #: How a view of the node's store is made there: a `fs.clone.Way`; empty for what is no view.
    #: And why it is made in no better way.
    way: str = ""
    why: str = ""

    @property
    def current(self) -> bool:
        """Whether the node needs nothing, and can send its copy to others."""
        return not self.reason


def survey(item: StageItem, path: str, source: Source, cache: Cache, node: str) -> Survey:
    """Return what this node holds at ``path``, the place of ``item``.

    Raise DestinationError if nothing can be put at ``path``, or if a file of the user's own would
    be lost without the option ``replace``.
    """
    there = _lstat_destination(path, item.destination)
    check_folder(existing_folder_above(path), cache)
    check_trees_above(item, path, cache)
    record = cache.load(item.destination)
    reason = (
        or_other_source(item, record, judge(item.options.validate, source.facts, record, there))
        or made_differently(item, record)
        or shared_differently(item, record)
        or damage(item, record, lambda record: _has_digest(path, record.digest))
    )
    if (
        there
        and reason is Reason.NOT_RECORDED
        and os.path.lexists(cache.record_path(item.destination))
    ):
        reason = Reason.UNREADABLE_RECORD
    if reason or record is None:
        is_own = bool(there and _is_own(path, there, source.facts, record))
        if there and is_own and not item.options.replace:
            raise _would_overwrite(path, there, record, reason)
        return Survey(node, reason, "", changed=is_own)
    return Survey(node, None, record.digest)


def _is_own(path: str, there: os.stat_result, source: SourceFacts, record: Record | None) -> bool:
    """Return whether what is ``there``, which is not current, is a user's own.

    It is not if it has the bytes that were staged, or is like the source, or if its bytes alone
    differ: then the disk has damaged it, as who writes to a file changes its time.
    """
    if _is_alike(there, source):
        return False
    if record is None:
        return True
    return not has_same_bytes(path, there, record)


def has_same_bytes(path: str, there: os.stat_result, record: Record) -> bool:
    """Return whether what is ``there`` has the bytes of the staged file, whatever its time."""
    if is_ours(there, record):
        return True
    copy = record.copy_facts
    alike = (there.st_size, there.st_uid) == (copy.size, copy.owner)
    if record.tree or not alike or not stat.S_ISREG(there.st_mode):
        return False
    with suppress(OSError):
        return read_back(path) == record.digest
    return False


def check_contents(path: str, source: SourceFacts, record: Record | None, digest: str) -> None:
    """Raise DestinationError if the file at ``path`` is a user's own that only looks like a copy.

    `survey` lets a file pass that has the size and time of the ``source``. What is to be put there
    has this ``digest``. ``record`` is that of the destination.
    """
    there = _lstat_or_none(path)
    if not (there and _is_alike(there, source)) or (record and is_ours(there, record)):
        return
    if record and has_same_bytes(path, there, record):
        return
    with suppress(OSError):
        if read_back(path) == digest:
            return
    raise _would_overwrite(path, there, record, Reason.NOT_RECORDED)


def _would_overwrite(
    path: str, there: os.stat_result, record: Record | None, reason: Reason | None
) -> DestinationError:
    kind = kind_of(there.st_mode)
    if reason is Reason.UNREADABLE_RECORD:
        kind = f"{kind}, and its record cannot be read, so it may be yours"
    elif record and stat.S_ISREG(there.st_mode) and not record.tree:
        kind = f"{kind}, changed since it was staged"
    else:
        kind = f"{kind} that was not staged"
    return DestinationError(
        f"{path} is {kind}; it is kept: move it, delete it, choose another "
        "destination, or add the option replace"
    )


def _is_alike(there: os.stat_result, source: SourceFacts) -> bool:
    """Return whether what is there is probably a copy of the source, as ``cp -p`` makes it.

    It has the size and the time of the source. `check_contents` compares the rest.
    """
    alike = (there.st_size, there.st_mtime_ns) == (source.size, source.mtime_ns)
    return alike and stat.S_ISREG(there.st_mode)


def survey_shared(item: StageItem, path: str, source: Source, cache: Cache, node: str) -> Survey:
    """Return the copy at ``path`` that the site's account staged for all users.

    Raise DestinationError if it is not current or may not be read, or if somebody else could
    replace it: only that account can mend that.
    """
    with suppress(FileNotFoundError), opened_beneath(cache.root, os.path.dirname(path), cache.uid):
        pass
    for pause in (*_PUBLICATION, 0.0):
        record = cache.load(item.destination)
        reason = (
            or_other_source(
                item,
                record,
                judge(item.options.validate, source.facts, record, _lstat_or_none(path)),
            )
            or made_differently(item, record)
            or damage(item, record, lambda record: _is_intact(path, record))
        )
        if reason in (None, Reason.ABSENT, Reason.ALWAYS):
            break
        time.sleep(pause)  # the copy is replaced first, then its record
    if reason or record is None:
        raise DestinationError(
            f"{path} cannot be used: only the site's account (uid {cache.uid}) stages files there, "
            f"for all users, and the copy is missing or not up to date ({reason}); ask the "
            "administrator, or choose another destination"
        )
    if not os.access(path, os.R_OK):
        raise DestinationError(
            f"{path} was staged by the site's account (uid {cache.uid}), and you may not read it; "
            "choose another destination"
        )
    return Survey(node, None, record.digest)


def _is_intact(path: str, record: Record) -> bool:
    """Return whether the copy has the recorded bytes, as far as this user may read it."""
    return not os.access(path, os.R_OK) or _has_digest(path, record.digest)


def _lstat_or_none(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def judge(
    validate: Validate,
    source: SourceFacts,
    record: Record | None,
    there: os.stat_result | None,
) -> Reason | None:
    """Return why the copy ``there`` is not current, None if it is. Pure.

    ``stat`` compares all facts of source and copy with the record. ``checksum`` compares all facts
    of the source and the size of the copy; the caller compares the digest. For ``always`` no copy
    is current.
    """
    if there is None:
        return Reason.ABSENT
    if record is None:
        return Reason.NOT_RECORDED
    if validate is Validate.ALWAYS:
        return Reason.ALWAYS
    if record.is_damaged:
        return Reason.DAMAGED
    copy = record.copy_facts
    if not stat.S_ISREG(there.st_mode) or there.st_uid != copy.owner:
        return Reason.REPLACED
    if record.source_facts != source:
        return Reason.SOURCE_CHANGED
    if copy.size != there.st_size:
        return Reason.COPY_CHANGED
    if validate is Validate.STAT:
        same = (copy.mtime_ns, copy.inode) == (there.st_mtime_ns, there.st_ino)
        return Reason.COPY_CHANGED if has_open_names(there) or not same else None
    return None


def or_other_source(item: StageItem, record: Record | None, reason: Reason | None) -> Reason | None:
    """Return the ``reason``, or that the copy was staged from another source than ``item`` names.

    That says more than that the source changed. Pure.
    """
    vague = reason in (None, Reason.SOURCE_CHANGED, Reason.LISTING_CHANGED)
    return Reason.OTHER_SOURCE if vague and other_source(item, record) else reason


def other_source(item: StageItem, record: Record | None) -> str:
    """Return the source of the recorded copy if ``item`` names another one, else nothing. Pure."""
    return record.source if record and record.source != item.source else ""


def made_differently(item: StageItem, record: Record | None) -> Reason | None:
    """Return a reason if something else was made of the source than is wanted. Pure."""
    if record is None or record.made == item.options.made:
        return None
    return Reason.MADE_DIFFERENTLY


def shared_differently(item: StageItem, record: Record | None) -> Reason | None:
    """Return a reason if the copy was opened to more, or to fewer users. Pure."""
    differs = record is not None and record.share != item.options.share
    return Reason.SHARED_DIFFERENTLY if differs else None


def damage(
    item: StageItem, record: Record | None, is_intact: Callable[[Record], bool]
) -> Reason | None:
    """Return a reason if ``item`` asks for a checksum and the copy's bytes differ from it."""
    checked = item.options.validate is Validate.CHECKSUM
    return Reason.DAMAGED if checked and record and not is_intact(record) else None


def _has_digest(path: str, digest: str) -> bool:
    with suppress(PermissionError):
        return digest_of(path) == digest
    return False


def own_lstat(path: str) -> os.stat_result | None:
    """Return the lstat of ``path``, None if nothing is there but a link to an entry of a store.

    Raise DestinationError if it is somebody else's.
    """
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None  # `check_folder` looks at the folder above
    except OSError as error:
        raise as_stage_error(error, path) from None
    if there.st_uid != os.getuid():
        owner = name_of(there.st_uid)
        raise DestinationError(f"{path} belongs to {owner}; choose {_another_place(path)}")
    if stat.S_ISLNK(there.st_mode) and is_entry(os.readlink(path)):
        return None  # with via=link, that is all that is staged there
    return there


def _another_place(path: str) -> str:
    """Return what to write in the place of a ``path`` that another user has taken."""
    above, name = os.path.split(path)
    place = f"{above}/{name_or_uid(os.getuid())}/{name}"
    facts = os.stat(existing_folder_above(place))
    is_free = not os.path.lexists(place) and os.access(existing_folder_above(place), os.W_OK)
    is_safe = not who_could_replace(facts, (0, os.getuid()))
    return f"another destination, such as {place}" if is_free and is_safe else "another destination"


def _lstat_destination(path: str, destination: str) -> os.stat_result | None:
    there = own_lstat(path)
    if there and not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
        remedy = "choose another destination"
        if stat.S_ISDIR(there.st_mode):
            remedy = f"write {destination}/ to put the file into it, or {remedy}"
        raise DestinationError(f"{path} is {kind_of(there.st_mode)}; {remedy}")
    return there


def check_trees_above(item: StageItem, path: str, cache: Cache) -> None:
    """Raise DestinationError if the destination, at ``path``, lies in a folder that is staged.

    A copy that is gone, or that its user replaced by another folder, does not count.
    """
    disk = path.removesuffix(item.destination)
    above = os.path.dirname(item.destination)
    while len(above) > len(item.root or "/"):
        record = cache.load(above)
        there = _lstat_or_none(f"{disk}{above}")
        if record and record.tree and there and is_ours(there, record):
            from shlex import quote  # only for this message

            raise DestinationError(
                f"{item.destination} lies in {above}, which is staged as a whole; choose another "
                f"destination, or delete that copy (stagectl evict {quote(above)})"
            )
        above = os.path.dirname(above)


def check_folder(folder: str, cache: Cache) -> None:
    """Raise DestinationError if nothing can be put into ``folder`` safely."""
    if f"{folder}/".startswith(f"{cache.root}/"):  # else a dry run, before the root exists
        with opened_beneath(cache.root, folder):
            pass
    try:
        facts = os.stat(folder)
    except OSError as error:
        raise as_stage_error(error, folder) from None
    if not stat.S_ISDIR(facts.st_mode):
        raise not_a_folder(folder, facts)
    if not os.access(folder, os.W_OK | os.X_OK):
        check_read_only(folder)
        remedy = "choose another destination"
        if folder == cache.root:
            remedy += ", or tell the administrator: users must be able to write there"
        raise DestinationError(f"{folder}: no permission to write there; {remedy}")
    strangers = facts.st_uid not in (0, os.getuid()) and not facts.st_mode & stat.S_ISVTX
    if strangers and facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DestinationError(
            f"{folder} belongs to {name_of(facts.st_uid)}, and others could replace what is staged "
            "there; choose another destination"
        )
    # In a dry run the cache may have no folder yet.
    if facts.st_dev != os.stat(existing_folder_above(f"{cache.folder}/")).st_dev:
        raise DestinationError(
            f"{folder} is not on the same disk as {cache.root or '/'}, where this site stages; "
            "choose another destination"
        )


def open_to(path: str, cache: Cache) -> str:
    """Return who could replace what is at ``path``, and by which folder; empty if nobody.

    Root, the copy's owner and who has the root are not counted. A site may want its projects'
    members to write in their folder. Raise DestinationError if all users may beneath the root.
    """
    root = cache.root or "/"
    if not os.path.isdir(root):
        return ""  # in a dry run
    owners = {0, cache.uid, os.stat(root).st_uid}
    beneath = existing_folder_above(path).removeprefix(cache.root).split("/")
    for folder in accumulate([root, *filter(None, beneath)], os.path.join):
        facts = os.stat(folder)
        who = who_could_replace(facts, owners)
        if who and folder != root and facts.st_mode & stat.S_IWOTH:
            raise DestinationError(
                f"{folder}: {who} could replace what is staged there; choose another destination, "
                "or have its owner set the sticky bit (chmod +t)"
            )
        if who:
            return f"{who} could replace the copy, as they may write in {folder}"
        if not facts.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            break  # nobody else reaches what is beneath
    return ""
