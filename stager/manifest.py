"""A node's record of one staged file: what was copied from where, and how the copy looked then.

The manifest of a node is one record a destination. A record is written last, after the copy is in
place, so that a record never promises what is not there. It is read back strictly: a record that
is damaged, newer or of another shape is no record.

Records are plain dataclasses: the ranks read them at start-up, where a model library would cost
more time than all their other work.
"""

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Self

#: Version of the record's shape; a record of another version is treated as absent.
VERSION = 1


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
            data = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise ValueError(f"version {version!r}, where {VERSION} is known")
        record = _build(cls, data)
        assert isinstance(record, cls)
        return record


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
        values[field.name] = value
    return shape(**values)
