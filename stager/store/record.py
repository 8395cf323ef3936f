"""Keep what was staged as records: what was copied from where, and how the copy looked then.

There is one record for each destination. It counts only after the copy is in place, so that it
never names a copy that does not exist. It is read strictly: one that is damaged, of another version
or of another shape counts as absent.

Records are plain dataclasses. Ranks read thousands of them at start-up, where a library for data
models would take longer than all their other work.
"""

import json
import os
import stat
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import xxhash

from stager.base.codec import Count, Short, codec_of
from stager.base.options import Lifetime, Share
from stager.fs.files import WRITABLE, CopyFacts
from stager.source.description import SourceFacts

#: Version of the record's shape; a record of another version counts as absent.
VERSION = 8
#: A digest that no file has, for a copy whose content is not known any more.
_UNKNOWN_DIGEST = "0" * 32
#: What a record's file begins with, before its checksum.
_CHECKSUM = b'{\n "checksum": "'
#: Bytes of the longest path that the kernel takes.
_PATH_LIMIT = 4096


def _is_digest(text: str) -> bool:
    return len(text) == 32 and not text.strip("0123456789abcdef")


def _is_split(text: str) -> bool:
    nodes, _, digest = text.partition(":")
    return not text or (nodes.isdecimal() and _is_digest(digest))


def _is_path(text: str) -> bool:
    try:
        path = os.fsencode(text)
        return path.startswith(b"/") and b"\0" not in path and len(path) <= _PATH_LIMIT
    except UnicodeEncodeError:
        return False


def _is_source(text: str) -> bool:
    return _is_path(text) or ("://" in text and len(text) <= _PATH_LIMIT)


_Digest = Annotated[str, _is_digest]
_Path = Annotated[str, _is_path]


class TornError(ValueError):
    """The text of a record is not as it was written: it may be written over at this moment."""


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """What is recorded of a staged folder: its number of files, and the bytes on disk of them all.

    The digests are those of the listing of the source and of the `table` of the copy's files.
    """

    files: Count
    allocated: Count
    source_digest: _Digest
    table_digest: _Digest
    #: How the Python environments in the copy were relocated: `Source.relocation`.
    relocation: Short = ""
    #: What its user must know of them, if they were unpacked from an archive.
    note: Short = ""
    #: With mode=shard, the split that this copy is a part of; see `shard.split_name`.
    split: Annotated[str, _is_split] = ""
    #: The pattern whose numbers chose the part of each file.
    by: Short = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One staged file, or folder if it has a ``tree``.

    Times are seconds since 1970. ``digest`` is that of a file (`base.digest`) in hexadecimal, or
    the xxh3-128 of those of all files of a folder. ``lifetime`` is a `Lifetime`. A ``pinned`` copy
    is not evicted until its user unpins it. The facts of a folder hold the sizes of all its files.
    A copy that was ``made`` in any way has other bytes than its source: see `Options.made`.
    """

    version: Count
    source: Annotated[str, _is_source]
    destination: _Path
    source_facts: SourceFacts
    copy_facts: CopyFacts
    digest: _Digest
    staged_at: Count
    used_at: Count
    used_by_job: Count
    lifetime: Annotated[str, {*Lifetime}.__contains__]
    pinned: bool
    made: Short = ""
    #: A `Share`: to whom the user opened the copy.
    share: Annotated[str, {*Share}.__contains__] = Share.NONE.value
    tree: TreeFacts | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether the copy was found to have other bytes than those that were staged."""
        return self.digest == _UNKNOWN_DIGEST

    def as_damaged(self) -> Self:
        """Return the record of the same copy after it was found to be damaged."""
        return replace(self, digest=_UNKNOWN_DIGEST)

    def to_json(self) -> str:
        """Return the text of the record's file: JSON that begins with the checksum of the rest.

        It may be written over while it is read. A lock would be no help: whoever can read a file
        can lock it.
        """
        rest = json.dumps(codec_of(type(self)).to_data(self), indent=1).removeprefix("{")
        return f'{_CHECKSUM.decode()}{_checksum(rest.encode())}",{rest}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the record in ``text``. Raise ValueError if it is not valid."""
        text = _without_checksum(text.encode("utf-8", "replace") if isinstance(text, str) else text)
        try:
            data = json.loads(text, object_pairs_hook=_unique)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise ValueError(f"version {version!r}, expected {VERSION}")
        data.pop("checksum", None)  # of who has laid out the text anew, it is none
        return codec_of(cls).from_data(data)


def _checksum(rest: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(rest)


def _without_checksum(text: bytes) -> bytes:
    """Return the ``text`` of a record as if it had no checksum; those of old versions have none.

    Raise TornError if it is wrong.
    """
    if not text.startswith(_CHECKSUM):
        return text
    checksum, _, rest = text.removeprefix(_CHECKSUM).partition(b'",')
    # Blanks may follow: a shorter record was written over a longer one.
    if _checksum(rest.rstrip()) != checksum.decode("ascii", "replace"):
        raise TornError("its checksum is wrong")
    return b"{" + rest


def is_ours(there: os.stat_result, record: Record) -> bool:
    """Return whether ``there`` is the copy that was published, unchanged, and not a user's file.

    Of the folder of a tree only the folder itself is looked at.
    """
    copy = record.copy_facts
    if record.tree:
        known = (there.st_ino, there.st_uid) == (copy.inode, copy.owner)
        return known and stat.S_ISDIR(there.st_mode)
    facts = CopyFacts(there.st_size, there.st_mtime_ns, there.st_ino, there.st_uid)
    return facts == copy and stat.S_ISREG(there.st_mode)


def has_open_names(there: os.stat_result) -> bool:
    """Return whether a file can be written by another name of it.

    What the store keeps cannot be written, and may have names in the folders of jobs.
    """
    return there.st_nlink != 1 and bool(there.st_mode & WRITABLE)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
