"""A node's record of one staged file: what was copied from where, and how the copy looked then.

The manifest of a node is one record a destination. A record is written last, after the copy is in
place, so that a record never promises what is not there. It is read back strictly: a record that
is damaged, newer or of another shape is no record.

Records are plain dataclasses: the ranks read them at start-up, where a model library would cost
more time than all their other work.
"""

import json
import os
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Self

#: Version of the record's shape; a record of another version is treated as absent.
VERSION = 1
#: Name of the folder beneath each cache root that holds the records.
RECORDS_FOLDER = ".slurm-stage"
#: Nanoseconds since 1970, which a file may also have from before.
_TIMES = ("mtime_ns", "ctime_ns")


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
class Record:
    """One staged file. ``digest`` is xxh3-128 in hexadecimal; times are seconds since 1970."""

    version: int
    source: str
    destination: str
    source_facts: SourceFacts
    copy_facts: CopyFacts
    digest: str
    staged_at: int
    used_at: int
    used_by_job: int

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
            raise ValueError(f"version {version!r}, where {VERSION} is known")
        record = _build(cls, data)
        assert isinstance(record, cls)
        return record


def _possible(name: str, value: object) -> bool:
    """Whether the system could have given this value."""
    match value:
        case int():
            return -(1 << 63) <= value < 1 << 63 if name in _TIMES else 0 <= value < 1 << 64
        case str() if name == "digest":
            return len(value) == 32 and all(digit in "0123456789abcdef" for digit in value)
        case str():
            return _is_path(value)
    return True


def _is_path(text: str) -> bool:
    try:
        return text.startswith("/") and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is given twice")
    return dict(pairs)


def _build(shape: type, data: Any) -> Any:
    """``data`` as a ``shape``, with exactly the keys and types that the dataclass declares."""
    if type(data) is not dict or data.keys() != {field.name for field in fields(shape)}:
        raise ValueError(f"the fields of {shape.__name__} differ")
    values: dict[str, Any] = {}
    for field in fields(shape):
        value = data[field.name]
        assert isinstance(field.type, type)
        if is_dataclass(field.type):
            value = _build(field.type, value)
        if type(value) is not field.type:
            raise ValueError(f"{field.name} is not {field.type.__name__}")
        if not _possible(field.name, value):
            raise ValueError(f"{field.name} is none that the system gives")
        values[field.name] = value
    return shape(**values)
