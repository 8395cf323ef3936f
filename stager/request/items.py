"""Directives and the site's Policy in, a StageRequest out: what every rank is asked to do.

A request travels to the ranks as JSON in one environment variable. Both ends are the same user's
processes of one version, so the text is trusted, unlike a directive or a record.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from stager.base.errors import UsageError
from stager.base.options import DEFAULT_OPTIONS, Mode, Options
from stager.base.paths import SHARD_LIST
from stager.wire.route import Algorithm
from stager.wire.settings import DEFAULT_SETTINGS, Settings

#: Environment variable in which the request travels to the ranks, and the most bytes that it may
#: have there: the kernel takes 128 KiB, name and all (MAX_ARG_STRLEN).
REQUEST_VARIABLE = "STAGE_REQUEST"
_LONGEST = 127 * 1024
#: The most bytes and members that one archive may unpack to, where the site says nothing else.
UNPACKED_SIZE, UNPACKED_MEMBERS = 1 << 40, 10_000_000


@dataclass(frozen=True, slots=True)
class StageItem:
    """One file to stage: ``source`` to ``destination``, which lies beneath the cache ``root``.

    Where ``destination`` is found to be a folder on a node, the file goes into it under ``name``.
    """

    source: str
    destination: str
    root: str
    options: Options = DEFAULT_OPTIONS
    #: Whether ``root`` is the site's own: root stages there, and all may use it.
    shared: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for `from_json`. There may be thousands of items, so it is short."""
        shared = {"shared": True} if self.shared else {}
        paths = {"source": self.source, "destination": self.destination, "root": self.root}
        return {**paths, **shared, **self.options.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StageItem:
        """Return the item that `to_json` wrote."""
        own = {
            name: data.pop(name)
            for name in ("source", "destination", "root", "shared")
            if name in data
        }
        return cls(**own, options=Options.from_json(data))

    @property
    def shard_list(self) -> str:
        """Where the list of all parts is, empty for what is not spread over the nodes."""
        return f"{self.destination}/{SHARD_LIST}" if self.options.mode is Mode.SHARD else ""

    @property
    def name(self) -> str:
        """The source's own name, for a destination that is a folder."""
        return self.source.rstrip("/").rpartition("/")[2]


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
    transfer: Settings = DEFAULT_SETTINGS
    space: Space = Space()
    #: Slurm's job id, 0 outside of Slurm.
    job: int = 0
    #: Names the job for the tasks that wait on each node, with the number of their step and their
    #: directives as the plugin has them; see `store.Words`. Empty where no task waits.
    status_file: str = ""
    step: str = ""
    directives: str = ""
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
