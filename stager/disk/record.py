"""A node's record of what was staged: what was copied from where, and how the copy looked then.

The manifest of a node is one record a destination. A record is written last, after the copy is in
place, so that a record never promises what is not there. It is read back strictly: a record that
is damaged, newer or of another shape is no record.

Records are plain dataclasses: the ranks read them at start-up, where a model library would cost
more time than all their other work.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Self

#: Version of the record's shape; a record of another version is treated as absent.
VERSION = 4


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """The source's stat at the time of reading: bytes, nanoseconds since 1970, inode."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """The copy's stat right after publication: bytes, nanoseconds since 1970, inode, uid."""

    size: int
    mtime_ns: int
    inode: int
    owner: int


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """A staged folder as one: its files by number, and the bytes that they take on the disk.

    ``before`` is the inode of the tree that this one was about to take the place of, until it has.
    The digests are those of the source's listing, of the copy's by `table.as_copy`, and of the
    `table` of its files.
    """

    files: int
    allocated: int
    source_digest: str
    copy_digest: str
    table_digest: str
    before: int = 0
    #: A `directive.Relocate`: what was changed in the copy.
    relocate: str = "none"
    #: Where the interpreter of a relocated environment is, if that was staged too.
    interpreter: str = ""
    #: Of a part of a folder, which split it is a part of; see `shard.split_name`.
    split: str = ""
    #: The files of all parts.
    files_in_all: int = 0
    #: The pattern by whose numbers it was split.
    by: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One staged file or ``tree``. ``digest`` is xxh3-128 in hexadecimal, of a file's bytes or of
    all files' digests; times are seconds since 1970. A tree's sizes are those of all its files.

    ``lifetime`` is a `directive.Lifetime`; what is ``pinned`` stays until its user says otherwise.
    """

    version: int
    source: str
    destination: str
    source_facts: SourceFacts
    copy_facts: CopyFacts
    digest: str
    staged_at: int
    used_at: int
    used_by_job: int
    lifetime: str
    pinned: bool
    tree: TreeFacts | None = None

    def to_json(self) -> str:
        """The text of the record's file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record in ``text``. Raises ValueError that says what is wrong with it."""
        try:
            data = json.loads(text, object_pairs_hook=_unique)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise ValueError(f"version {version!r}, expected {VERSION}")
        record = _build(cls, data)
        assert isinstance(record, cls)
        return record


def _is_time(value: int) -> bool:
    return -(1 << 63) <= value < 1 << 63


def _is_number(value: int) -> bool:
    return 0 <= value < 1 << 64


def _is_digest(text: str) -> bool:
    return len(text) == 32 and not text.strip("0123456789abcdef")


def _is_split(text: str) -> bool:
    nodes, _, digest = text.partition(":")
    return not text or (nodes.isdecimal() and _is_digest(digest))


def _is_lifetime(text: str) -> bool:
    return text in ("cache", "job")


def _is_relocation(text: str) -> bool:
    return text in ("none", "venv")


def _is_path(text: str) -> bool:
    try:
        return text.startswith("/") and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _is_path_or_nothing(text: str) -> bool:
    return not text or _is_path(text)


def _is_any(_: object) -> bool:
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


@cache
def _fields(shape: type) -> dict[str, tuple[type, Callable[[Any], bool]]]:
    """Each field's type, and whether the system could have given a value of that type."""
    # Once a shape: to ask dataclasses for each of thousands of records takes most of the time.
    found: dict[str, tuple[type, Callable[[Any], bool]]] = {}
    for field in fields(shape):
        kind = TreeFacts if field.type == TreeFacts | None else field.type
        assert isinstance(kind, type)
        by_type = _BY_TYPE.get(kind, _is_any)
        found[field.name] = kind, _BY_NAME.get(field.name, by_type)
    return found


_BY_TYPE: dict[type, Callable[[Any], bool]] = {int: _is_number, str: _is_path}
_BY_NAME: dict[str, Callable[[Any], bool]] = {
    # Nanoseconds since 1970, which a file may also have from before.
    "mtime_ns": _is_time,
    "ctime_ns": _is_time,
    "digest": _is_digest,
    "source_digest": _is_digest,
    "copy_digest": _is_digest,
    "table_digest": _is_digest,
    "lifetime": _is_lifetime,
    "relocate": _is_relocation,
    "split": _is_split,
    "by": _is_any,
    "interpreter": _is_path_or_nothing,
}


def _build(shape: type, data: Any) -> Any:
    """``data`` as a ``shape``, with exactly the keys and types that the dataclass declares."""
    known = _fields(shape)
    if type(data) is not dict or data.keys() != known.keys():
        raise ValueError(f"the fields are not those of {shape.__name__}")
    values: list[Any] = []
    for name, (kind, possible) in known.items():
        value = data[name]
        if kind is TreeFacts and value is None:  # a file
            values.append(None)
            continue
        if kind in _NESTED:
            value = _build(kind, value)
        if type(value) is not kind:
            raise ValueError(f"{name} is not {kind.__name__}")
        if not possible(value):
            raise ValueError(f"the value of {name} is not possible")
        values.append(value)
    return shape(*values)


_NESTED = (SourceFacts, CopyFacts, TreeFacts)
