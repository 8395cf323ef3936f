"""Directives and the site's Policy in, a StageRequest out: what every rank is asked to do.

A request travels to the ranks as JSON in one environment variable. Both ends are the same user's
processes of one version, so the text is trusted, unlike a directive or a record.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from stager.directive import (
    Directive,
    Lifetime,
    Mode,
    Relocate,
    Validate,
    Verify,
    archive_suffix,
    chosen_options,
    merge,
)
from stager.errors import PolicyRefusal, UsageError
from stager.manifest import RECORDS_FOLDER
from stager.route import Algorithm

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stager.policy import Policy


#: Environment variable in which the request travels to the ranks, and the most bytes that it may
#: have there: the kernel takes 128 KiB, name and all (MAX_ARG_STRLEN).
REQUEST_VARIABLE = "STAGE_REQUEST"
_LONGEST = 127 * 1024
#: The most bytes and members that one archive may unpack to, where the site says nothing else.
UNPACKED_SIZE, UNPACKED_MEMBERS = 1 << 40, 10_000_000
#: The file in each node's part of a folder that is spread, which tells what each node holds.
LIST_NAME = ".stage-shards.tsv"
#: The fields of an item that are tuples, which JSON does not know.
_LISTS = ("include", "exclude")


@dataclass(frozen=True, slots=True)
class StageItem:
    """One file to stage: ``source`` to ``destination``, which lies beneath the cache ``root``.

    Where ``destination`` is found to be a folder on a node, the file goes into it under ``name``.
    """

    source: str
    destination: str
    root: str
    validate: Validate = Validate.STAT
    verify: Verify = Verify.STREAM
    lifetime: Lifetime = Lifetime.CACHE
    #: Whether ``root`` is the site's own: root stages there, and all may use it.
    shared: bool = False
    relocate: Relocate = Relocate.NONE
    #: What of a folder is staged, and what is not; see `patterns`.
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    #: Whether ``source`` is an archive, whose files are wanted.
    extract: bool = False
    mode: Mode = Mode.COPY
    #: A pattern that tells a file's part by a number in its path; see `shard`.
    by: str = ""

    @property
    def options(self) -> str:
        """What the directive says behind the destination."""
        others = (
            f", {key}={value}" if value else f", {key}"
            for key, value in chosen_options(self)
            if key != "validate"
        )
        return f"validate={self.validate}{''.join(others)}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back; there may be thousands, so it is short."""
        usual = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StageItem:
        """The item that `to_json` wrote."""
        kinds = {
            "validate": Validate, "verify": Verify, "lifetime": Lifetime, "relocate": Relocate,
            "mode": Mode,
        }  # fmt: skip
        chosen = {name: kind(data[name]) for name, kind in kinds.items() if name in data}
        lists: dict[str, Any] = {name: tuple(data[name]) for name in _LISTS if name in data}
        return cls(**{**data, **chosen, **lists})

    @property
    def is_as_it_is(self) -> bool:
        """Whether the destination has all of the source, and as it is there."""
        changed = self.extract or self.include or self.exclude or self.relocate is not Relocate.NONE
        return not changed and self.mode is Mode.COPY

    @property
    def shard_list(self) -> str:
        """Where the list of all parts is, empty for what is not spread over the nodes."""
        return f"{self.destination}/{LIST_NAME}" if self.mode is Mode.SHARD else ""

    @property
    def name(self) -> str:
        """The source's own name, for a destination that is a folder."""
        return self.source.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Settings:
    """How bytes are to move: ``chunk`` in bytes, ``depth`` of the ring in chunks.

    0 ``depth``, ``readers`` or ``writers`` stand for what is best; ``direct`` for writing past the
    page cache.
    """

    chunk: int = 2 << 20
    depth: int = 0
    readers: int = 0
    writers: int = 0
    algorithm: Algorithm = Algorithm.AUTO
    direct: bool = True


@dataclass(frozen=True, slots=True)
class Space:
    """What the site wants of each node's disks: bytes, and percent of a disk, that stay free; the
    most bytes that a user's copies may take on a disk, 0 for no limit; all roots, which may share
    a disk; the most bytes and members that one archive may unpack to.
    """

    keep_free: int = 0
    keep_free_percent: float = 0.0
    user_limit: int = 0
    roots: tuple[str, ...] = ()
    unpacked_size: int = UNPACKED_SIZE
    unpacked_members: int = UNPACKED_MEMBERS


@dataclass(frozen=True, slots=True)
class StageRequest:
    """All that the ranks need to know; sizes in bytes, times in seconds."""

    items: tuple[StageItem, ...]
    nodes: int
    lock_timeout: float
    transfer: Settings = Settings()
    space: Space = Space()
    #: Slurm's job id, 0 outside of Slurm.
    job: int = 0
    #: Names the job for the tasks that wait on each node, with the number of their step and their
    #: directives as the plugin has them; see `store.Words`. Empty where no task waits.
    word: str = ""
    step: str = ""
    said: str = ""
    #: Survey and plan only; nothing is written.
    dry_run: bool = False
    #: Measure with so many bytes instead of staging; see `measure`.
    bench: int = 0
    #: Folder that holds one folder a simulated node; empty on real nodes.
    local_root: str = ""

    def to_json(self) -> str:
        """One line of JSON that `from_json` reads back. Raises UsageError if it is too long."""
        items = [item.to_json() for item in self.items]
        text = json.dumps({**asdict(self), "items": items}, ensure_ascii=False)
        if len(os.fsencode(text)) > _LONGEST:
            raise UsageError("too many directives for one job: stage an archive instead")
        return text

    @classmethod
    def from_json(cls, text: str) -> StageRequest:
        """The request that `to_json` wrote."""
        data = json.loads(text)
        items = tuple(StageItem.from_json(item) for item in data.pop("items"))
        transfer = data.pop("transfer")
        transfer["algorithm"] = Algorithm(transfer["algorithm"])
        space = data.pop("space")
        space = Space(**{**space, "roots": tuple(space["roots"])})
        return cls(items=items, transfer=Settings(**transfer), space=space, **data)


def resolve(directives: Iterable[Directive], policy: Policy) -> tuple[StageItem, ...]:
    """The items that ``directives`` ask for, each once.

    Raises PolicyRefusal for a destination outside of the site's roots, UsageError for two sources
    with one destination.
    """
    items = tuple(dict.fromkeys(_item(directive, policy) for directive in merge(directives)))
    _check_destinations(items)
    return items


def _check_destinations(items: Sequence[StageItem]) -> None:
    """Raise UsageError for two items that would stand in each other's way."""
    by_destination: dict[str, StageItem] = {}
    for item in items:
        other = by_destination.setdefault(item.destination, item)
        if other is not item:
            raise UsageError(
                f"{item.destination} is asked for twice: from {other.source} "
                f"({other.options}) and from {item.source} ({item.options})"
            )
    for item in items:
        for above in by_destination:
            if item.destination.startswith(f"{above}/"):
                raise UsageError(
                    f"{above} is staged as a whole: {item.destination} cannot lie beneath it"
                )


def _item(directive: Directive, policy: Policy) -> StageItem:
    parts = [part for part in directive.destination.split("/") if part not in ("", ".")]
    destination = "/" + "/".join(parts)
    # A root is a folder, written with a '/' at its end or not.
    known = (*policy.roots, *policy.shared_roots, *policy.allowed)
    if directive.destination.endswith("/") or destination in ("/", *known):
        name = directive.source.rstrip("/").rpartition("/")[2]
        if directive.extract:
            name = name[: -len(archive_suffix(name))]
        if name in ("", ".", ".."):
            raise UsageError(f"{directive.source} has no name of its own; name the file at DST")
        destination = f"{destination.rstrip('/')}/{name}"
    source = directive.source.rstrip("/")
    if destination == source:
        raise UsageError(f"{destination} is source and destination at once")
    for inner, outer in ((destination, source), (source, destination)):
        if inner.startswith(f"{outer}/"):
            raise UsageError(f"{inner} lies beneath {outer}; one of them cannot become the other")
    if RECORDS_FOLDER in destination.split("/"):
        raise UsageError(f"{destination}: {RECORDS_FOLDER} holds the records of what is staged")
    root = _folder_above(destination, (*policy.roots, *policy.shared_roots))
    shared = root in policy.shared_roots
    if root is None or not (shared or _folder_above(destination, policy.allowed) is not None):
        raise PolicyRefusal(
            f"{destination} is not beneath a folder that this site stages to; "
            f"choose a destination beneath {' or '.join(policy.allowed)}"
        )
    return StageItem(
        directive.source, destination, root, directive.validate, directive.verify,
        directive.lifetime, shared, directive.relocate, directive.include, directive.exclude,
        directive.extract, directive.mode, directive.by,
    )  # fmt: skip


def _folder_above(path: str, folders: Iterable[str]) -> str | None:
    """The nearest of the ``folders`` that ``path`` lies beneath."""
    above = [folder for folder in folders if path.startswith(f"{folder}/")]
    return max(above, key=len, default=None)
