"""One node's facts in, a Survey out: whether its copy is current, and what a new one would meet.

Nothing is written here. Only the rank that looks at the source touches shared storage, by one
stat; the currency of a copy is judged from the disk of its own node.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stager.base.errors import DestinationError
from stager.base.options import Validate
from stager.disk.files import (
    check_read_only,
    digest_of,
    existing_folder_above,
    kind_of,
    opened_beneath,
)

if TYPE_CHECKING:
    from stager.disk.cache import Cache
    from stager.disk.record import Record, SourceFacts
    from stager.request.items import StageItem
    from stager.source.posix import Source

#: Why a copy is not current that nobody has staged.
NOT_RECORDED = "not recorded"
#: Seconds of patience between a copy's replacement and that of its record.
_PUBLICATION = (0.1, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Survey:
    """One node's answer for one item. ``reason`` says why the copy is not current, else is empty.

    ``digest`` is the recorded one of a current copy.
    """

    node: str
    reason: str
    digest: str
    #: Of a current tree.
    files: int = 0
    #: Whether a current copy is of the source as it is now, and not only of its size.
    fresh: bool = True
    #: Of a current part of a folder, which split it is a part of.
    split: str = ""

    @property
    def current(self) -> bool:
        """Whether the node can do without the item, and can send it to others."""
        return not self.reason


def survey(item: StageItem, path: str, source: Source, cache: Cache, node: str) -> Survey:
    """What this node holds at ``path``, where ``item`` is wanted.

    Raises DestinationError where nothing could be put at ``path``.
    """
    there = _look_at_destination(path)
    folder = existing_folder_above(path)
    check_folder(folder, cache)
    check_trees_above(item, cache)
    record = cache.load(item.destination)
    reason = judge(item.options.validate, source.facts, record, there)
    if reason == NOT_RECORDED and os.path.lexists(cache.record_path(item.destination)):
        reason = "its record cannot be read"
    if record and record.source != item.source:
        reason = reason or "staged from another source"
    if item.shared and there and stat.S_IMODE(there.st_mode) & 0o077 & ~source.mode:
        reason = reason or "its permissions are too wide"
    if not reason and item.options.validate is Validate.CHECKSUM:
        assert record is not None
        reason = "" if digest_of(path) == record.digest else "its bytes differ from its digest"
    if reason or record is None:
        return Survey(node, reason, "")
    return Survey(node, reason, record.digest, fresh=record.source_facts == source.facts)


def survey_shared(item: StageItem, path: str, source: Source, cache: Cache, node: str) -> Survey:
    """What root staged at ``path`` for all, if that is what ``item`` asks for.

    Raises DestinationError where it is not: nobody but root can bring it there.
    """
    for pause in (*_PUBLICATION, 0.0):
        record = cache.load(item.destination)
        reason = judge(item.options.validate, source.facts, record, _look_at_shared(path))
        if record and record.source != item.source:
            reason = reason or "staged from another source"
        if not reason and item.options.validate is Validate.CHECKSUM and record:
            reason = "" if digest_of(path) == record.digest else "its bytes differ from its digest"
        if not reason or reason in ("absent", "validate=always"):
            break
        time.sleep(pause)  # root may be about to replace both, one after the other
    if reason or record is None:
        raise DestinationError(
            f"{path} is root's to stage, and not current there: {reason}; choose another "
            "destination, or ask the administrator"
        )
    if not os.access(path, os.R_OK):
        raise DestinationError(f"{path}: no permission to read it; choose another destination")
    return Survey(node, "", record.digest)


def _look_at_shared(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def judge(
    validate: Validate,
    source: SourceFacts,
    record: Record | None,
    there: os.stat_result | None,
) -> str:
    """Why a copy is not current, or nothing. Pure.

    ``stat`` compares the source and the copy with the record by all of its facts, ``size`` by
    their sizes alone; ``checksum`` compares the source by all facts and the copy by its size, and
    leaves the copy's bytes to the caller; ``always`` takes no copy for current.
    """
    if there is None:
        return "absent"
    if record is None:
        return NOT_RECORDED
    if validate is Validate.ALWAYS:
        return "validate=always"
    if not stat.S_ISREG(there.st_mode) or there.st_uid != record.copy_facts.owner:
        return "replaced"
    was, now = record.source_facts, source
    if was.size != now.size or (validate is not Validate.SIZE and was != now):
        return "the source changed"
    copy = record.copy_facts
    if copy.size != there.st_size:
        return "the copy changed"
    if validate is Validate.STAT:
        same = (copy.mtime_ns, copy.inode) == (there.st_mtime_ns, there.st_ino)
        return "" if same and there.st_nlink == 1 else "the copy changed"
    return ""


def own_lstat(path: str) -> os.stat_result | None:
    """What is there, if anything. Raises DestinationError where it is somebody else's."""
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None  # the folder above, where there is one, is looked at next
    except OSError as error:
        raise DestinationError(f"{path}: {error.strerror}") from None
    if there.st_uid != os.getuid():
        raise DestinationError(f"{path} belongs to uid {there.st_uid}; choose another destination")
    return there


def _look_at_destination(path: str) -> os.stat_result | None:
    there = own_lstat(path)
    if there and not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
        raise DestinationError(f"{path} is {kind_of(there.st_mode)}; choose another destination")
    return there


def check_trees_above(item: StageItem, cache: Cache) -> None:
    """Raise DestinationError where the destination lies in a tree that is staged as a whole."""
    above = os.path.dirname(item.destination)
    while len(above) > len(item.root or "/"):
        record = cache.load(above)
        if record and record.tree:
            raise DestinationError(
                f"{item.destination} lies in {above}, which is staged as a whole; choose another "
                "destination"
            )
        above = os.path.dirname(above)


def check_folder(folder: str, cache: Cache) -> None:
    """Raise DestinationError where nothing can be put into ``folder`` safely."""
    if f"{folder}/".startswith(f"{cache.root}/"):  # else the root itself is only planned for
        with opened_beneath(cache.root, folder):
            pass
    try:
        facts = os.stat(folder)
    except OSError as error:
        raise DestinationError(f"{folder}: {error.strerror}") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise DestinationError(f"{folder} is {kind_of(facts.st_mode)}, not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        check_read_only(folder)
        raise DestinationError(f"{folder}: no permission to write there")
    strangers = facts.st_uid not in (0, os.getuid()) and not facts.st_mode & stat.S_ISVTX
    if strangers and facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DestinationError(
            f"{folder} belongs to uid {facts.st_uid}, and others could replace what is staged "
            "there; choose another destination"
        )
    # A cache that is only planned for has no folder yet.
    if facts.st_dev != os.stat(existing_folder_above(f"{cache.folder}/")).st_dev:
        raise DestinationError(
            f"{folder} is on another filesystem than its cache root; choose another destination"
        )
