"""Define the options of a directive.

A new option is a field of `Options`, with a default and what it does: the grammar, the requests,
the help, completion and the reference follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator


class Validate(StrEnum):
    """How a node's copy is compared with the source; see `store.validity`."""

    STAT = "stat"
    CHECKSUM = "checksum"
    ALWAYS = "always"


class Verify(StrEnum):
    """What is compared with the source's digest before a copy is published."""

    #: The bytes that were received; nothing is read again.
    STREAM = "stream"
    #: The written file, read again from the disk past the page cache.
    READBACK = "readback"


class Lifetime(StrEnum):
    """How long a copy stays on a node."""

    #: Until its space is needed for something else.
    CACHE = "cache"
    #: Until the last job that uses it has ended.
    JOB = "job"


class Relocate(StrEnum):
    """What is changed in a folder so that it works at its destination; see `tree.environments`."""

    #: The paths of Python's virtual environments, in their scripts.
    AUTO = "auto"
    NO = "no"


class Mode(StrEnum):
    """Which files of a folder each node gets."""

    #: All files.
    COPY = "copy"
    #: A part: each file is on one node; see `tree.shard`.
    SHARD = "shard"


class FolderLayout(StrEnum):
    """How the files of a model of a hub lie in its folder."""

    #: As they are named on the hub.
    PLAIN = "plain"
    #: As in the cache of the hub's own programs; see `source.hub`.
    HUB = "hub"


class Links(StrEnum):
    """What becomes of the symbolic links in a folder."""

    #: They are links in the copy.
    KEEP = "keep"
    #: The copy has the files and folders that they lead to in their places.
    FOLLOW = "follow"


class Share(StrEnum):
    """Who besides its owner may read a copy; see `fs.files`."""

    #: Nobody.
    NONE = "none"
    #: The source's group.
    GROUP = "group"
    #: Everybody.
    ALL = "all"


class Via(StrEnum):
    """How a destination that goes with its job gets the copy from the node's store."""

    #: By what takes least room there: a clone, a hard link, or a copy.
    AUTO = "auto"
    #: It is a symbolic link to the store's copy.
    LINK = "link"
    #: It is a copy of its own.
    COPY = "copy"


#: The value of an option that may have patterns and was given without one.
ITSELF = ("",)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one directive. A field's name is its key, which users write, but for `_AS`.

    Its metadata say what may be written behind the name, capital letters standing for what the user
    chooses, and what that does.
    """

    validate: Validate = field(default=Validate.STAT, metadata={
        "=stat": "a copy is current if size, times and inode of both are as recorded",
        "=checksum": "the source as with stat, and the contents of the copy, which are read",
        "=always": "copy it again in any case",
    })  # fmt: skip
    verify: Verify = field(default=Verify.STREAM, metadata={
        "=stream": "check the bytes as they arrive",
        "=readback": "read the written file again from the disk",
    })  # fmt: skip
    lifetime: Lifetime = field(default=Lifetime.CACHE, metadata={
        "=cache": "keep the copy for later jobs",
        "=job": "remove the copy when no job uses it any more; the last job that asked for it "
        "decides",
    })  # fmt: skip
    relocate: Relocate = field(default=Relocate.AUTO, metadata={
        "=auto": "make a Python environment work at DST, and bring its Python along from shared "
        "storage",
        "=no": "leave the paths in Python environments as they are",
    })  # fmt: skip
    #: Patterns of the paths in a folder that are staged, and of those that are not; see
    #: `tree.patterns`.
    include: tuple[str, ...] = field(default=(), metadata={
        "=PATTERN": "take only what matches in a folder, as in a .gitignore; repeatable",
    })  # fmt: skip
    exclude: tuple[str, ...] = field(default=(), metadata={
        "=PATTERN": "leave out what matches in a folder, even if include= takes it; repeatable",
    })  # fmt: skip
    #: Whether the source is an archive that is unpacked at the destination.
    extract: bool = field(default=False, metadata={
        "": "unpack an archive: .tar, .tar.gz, .tar.zst, .tar.xz, .tar.bz2 or .zip",
    })  # fmt: skip
    #: `ITSELF` if the source is a compressed file that is decompressed at the destination; for a
    #: folder, patterns of the files in it that are; see `tree.compressed`.
    decompress: tuple[str, ...] = field(default=(), metadata={
        "": "decompress a file: .gz, .zst, .xz or .bz2",
        "=PATTERN": "decompress what matches in a folder; repeatable",
    })  # fmt: skip
    mode: Mode = field(default=Mode.COPY, metadata={
        "=copy": "put all files of a folder on every node",
        "=shard": "put each file of a folder on one node only",
    })  # fmt: skip
    #: With mode=shard, a pattern that finds a number in a file's path, which decides its node; see
    #: `tree.shard`.
    by: str = field(default="", metadata={
        "=PATTERN": "with mode=shard: the number at {n} chooses the node, as in by=part-{n}.tar",
    })  # fmt: skip
    share: Share = field(default=Share.NONE, metadata={
        "=none": "let you alone read the copy",
        "=group": "let the source's group read the copy",
        "=all": "let everybody read the copy",
    })  # fmt: skip
    layout: FolderLayout = field(default=FolderLayout.PLAIN, metadata={
        "=plain": "lay a model of hf:// out as on the hub",
        "=hub": "lay a model of hf:// out as in the hub's own cache",
    })  # fmt: skip
    links: Links = field(default=Links.KEEP, metadata={
        "=keep": "keep the symbolic links in a folder",
        "=follow": "copy what links in a folder lead to, in place of the links",
    })  # fmt: skip
    #: Whether staging may destroy the user's own files at the destination.
    replace: bool = field(default=False, metadata={
        "": "delete files of yours that are in the way at DST, or were changed there",
    })  # fmt: skip
    via: Via = field(default=Via.AUTO, metadata={
        "=auto": "with a store: make DST of its copy with the least room",
        "=link": "with a store: make DST a symbolic link to its copy",
        "=copy": "with a store: make DST a copy of its own",
    })  # fmt: skip
    #: The job's tasks find the path of the copy in the variable ``STAGE_NAME``; empty for none.
    name: str = field(default="", metadata={
        "=NAME": "tell the job's tasks the path of the copy in the variable $STAGE_NAME",
    })  # fmt: skip

    def __str__(self) -> str:
        """Return the options as messages show them: ``validate=stat, extract``."""
        chosen = {"validate": str(self.validate)}
        others = ((key, value) for key, value in self.given() if key not in chosen)
        pairs = (*chosen.items(), *others)
        return ", ".join(f"{key}={value}" if value else key for key, value in pairs)

    def given(self) -> Iterator[tuple[str, str]]:
        """Yield the key and value of each option that differs from its default.

        The value of an option that takes none is empty. An option that was given several times is
        yielded as often.
        """
        for key, value in self.to_json().items():
            values = value if isinstance(value, tuple) else ("" if value is True else value,)
            yield from ((key, one) for one in values)

    def to_json(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, for `from_json`."""
        return {
            _key(option.name): value
            for option in fields(self)
            if (value := getattr(self, option.name)) != option.default
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Return the options that `to_json` wrote. Raise KeyError or ValueError for others."""
        values = {key: OPTION_TYPES[key](value) for key, value in data.items()}
        if _AS in values:
            values["name"] = values.pop(_AS)
        return cls(**values)

    @property
    def made(self) -> str:
        """What is made of the source's bytes, for the copy's record; empty if they are copied."""
        return "decompressed" if self.decompress else ""

    @property
    def is_unpacked(self) -> bool:
        """Whether each node makes the copy of other bytes, which it does not keep.

        So the source must be read for each node without a copy, and how much room the copy takes
        is known at its end.
        """
        return self.extract or bool(self.decompress)


#: The key of `Options.name`: a word that no field can have as its name.
_AS = "as"


def _key(field: str) -> str:
    return _AS if field == "name" else field


#: The type of each option's value, by the option's key: that of its default.
OPTION_TYPES: dict[str, type] = {
    _key(option.name): type(option.default) for option in fields(Options)
}
#: What may be written as an option, and what it does.
WAYS: dict[str, str] = {
    f"{_key(option.name)}{way}": text
    for option in fields(Options)
    for way, text in option.metadata.items()
}
#: Options, and those that cannot be combined with them. (With share, others would read what a
#: stranger's link leads this user to.)
CONFLICTS = {
    "mode=shard": {"extract"},
    "decompress": {"extract", "mode=shard"},
    "layout=hub": {"decompress", "mode=shard"},
    "links=follow": {"share=group", "share=all"},
    "via=link": {"share=group", "share=all"},
}
#: The options of a directive that gives none.
DEFAULT_OPTIONS = Options()
