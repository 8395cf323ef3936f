"""What are the ranks asked to do? A StageRequest, and its items.

It travels to the ranks as JSON in one environment variable. Both ends are the same user's
processes of one version, so the text is trusted, unlike a directive or a record.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from stager.base.errors import PolicyRefusal, UsageError
from stager.base.formats import archive_suffix, compressed_suffix
from stager.base.options import (
    DEFAULT_OPTIONS,
    ITSELF,
    FolderLayout,
    Links,
    Mode,
    Options,
    Relocate,
)
from stager.base.paths import SHARD_LIST
from stager.base.rules import Amount, amount_of
from stager.source.endpoints import DEFAULT_REMOTE, RemoteSettings
from stager.source.schemes import Scheme, cache_name, name_of
from stager.wire.layout import DEFAULT_SETTINGS, KEY_SIZE, Algorithm, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.source.description import Selection

T = TypeVar("T")


def check_options(item: StageItem, *, is_folder: bool) -> None:
    """Raise UsageError or PolicyRefusal if the item's options do not fit its source."""
    options = item.options
    becomes_tree = is_folder or options.extract
    if not is_folder and (options.include or options.exclude):
        raise UsageError(
            f"{item.source} is not a folder; remove include and exclude, which are for folders"
        )
    if options.links is Links.FOLLOW and (item.scheme.is_url or not is_folder):
        raise UsageError(f"{item.source} is not a folder on a filesystem; remove links=follow")
    if options.mode is Mode.SHARD and not is_folder:
        raise UsageError(f"{item.source} is not a folder; mode=shard is for folders")
    if is_folder and options.extract:
        raise UsageError(f"{item.source} is a folder; extract is for archives")
    if is_folder and options.decompress == ITSELF:
        raise UsageError(
            f"{item.source} is a folder; name the files in it that are to be decompressed by a "
            "pattern, such as decompress=*"
        )
    if not is_folder and options.decompress not in ((), ITSELF):
        raise UsageError(
            f"{item.source} is not a folder; write decompress alone, without a pattern"
        )
    if becomes_tree and item.shared:
        raise PolicyRefusal(
            f"{item.destination} would be a folder, but beneath {item.root} only single files are "
            "staged, for all users; choose a destination elsewhere"
        )


#: The environment variable that names a job's lists of what each node holds.
_SHARDS = "STAGE_SHARDS"
#: The one that names where the filesystem of the job's own disks is.
SHARED_VARIABLE = "STAGE_SHARED"
#: The environment variable in which the request travels to the ranks.
REQUEST_VARIABLE = "STAGE_REQUEST"
#: Most bytes of the request there: the kernel takes 128 KiB with the name (MAX_ARG_STRLEN).
MAX_REQUEST = 127 * 1024
#: How the text begins if it is compressed. No JSON begins so.
_COMPRESSED = "xz:"
#: Default for the most bytes, and the most members, that one archive may unpack to.
UNPACKED_SIZE, UNPACKED_MEMBERS = 1 << 40, 10_000_000

#: The fields of an item besides its options.
_OWN = ("source", "destination", "root", "shared")


@dataclass(frozen=True, slots=True)
class StageItem:
    """One file or folder to stage: ``source`` to ``destination`` beneath the cache ``root``."""

    source: str
    destination: str
    root: str
    options: Options = DEFAULT_OPTIONS
    #: Whether ``root`` is one of the site's shared roots: `StageRequest.shared_owner` stages there,
    #: and all may use it.
    shared: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for `from_json`. There may be thousands of items, so it is short."""
        own = {"source": self.source, "destination": self.destination, "root": self.root}
        return own | ({"shared": True} if self.shared else {}) | self.options.to_json()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StageItem:
        """Return the item that `to_json` wrote."""
        own = {name: data.pop(name) for name in _OWN if name in data}
        return cls(**own, options=Options.from_json(data))

    @property
    def scheme(self) -> Scheme:
        """What kind of source it is."""
        return Scheme.of(self.source)

    @property
    def selection(self) -> Selection:
        """What is staged of a folder."""
        from stager.source.description import Selection  # the launcher does without

        options = self.options
        return Selection(
            options.include,
            options.exclude,
            () if options.decompress == ITSELF else options.decompress,
            as_cache=options.layout is FolderLayout.HUB,
            follow=options.links is Links.FOLLOW,
            relocate=options.relocate is Relocate.AUTO and options.mode is Mode.COPY,
        )

    @property
    def shard_list(self) -> str:
        """Path of the list of which node holds which file; empty without mode=shard."""
        return f"{self.destination}/{SHARD_LIST}" if self.options.mode is Mode.SHARD else ""


def copy_name(source: str, options: Options) -> str:
    """Return the last part of the source's path, without the suffix of what is unpacked.

    Of an image it is the name of a file for it.

    >>> copy_name("/shared/set.gz", Options(decompress=("",)))
    'set'
    """
    if options.layout is FolderLayout.HUB:
        return cache_name(source)
    name = name_of(source)
    if options.extract:
        return name[: len(name) - len(archive_suffix(name))]
    is_single = options.decompress == ITSELF
    return name[: len(name) - len(compressed_suffix(name))] if is_single else name


@dataclass(frozen=True, slots=True)
class Space:
    """The site's limits on what staged files may take of each node's disks."""

    #: What stays free of a disk.
    keep_free: Amount = 0
    #: The most that one user's copies may take of a disk; 0 for no limit.
    user_limit: Amount = 0
    #: All cache roots; several may be on one disk.
    roots: tuple[str, ...] = ()
    #: Those that are there for a job or a user alone, where root's part makes nothing.
    private: tuple[str, ...] = ()
    #: Those of them that are one job's: no copy is evicted there by itself, and nothing outside of
    #: them says what they hold.
    of_job: tuple[str, ...] = ()
    #: How a job asks for a root, or for more room there: an option of sbatch.
    hints: Mapping[str, str] = field(default_factory=dict)
    #: That of the roots that keeps copies behind the folders of jobs, empty for none; and the most
    #: that those of all users take there, 0 for no limit.
    store: str = ""
    store_size: Amount = 0
    #: Most bytes and members that one archive may unpack to.
    unpacked_size: int = UNPACKED_SIZE
    unpacked_members: int = UNPACKED_MEMBERS

    def limit_in(self, root: str, disk: int) -> int:
        """Return the most bytes of a user's in a root, whose disk has so many.

        Return 0 for no limit, as in a root that is the user's own.
        """
        limits = [] if root in self.private else [self.user_limit]
        if root == self.store:
            limits.append(self.store_size)
        return min(filter(None, (amount_of(one, disk) for one in limits)), default=0)


class Work(StrEnum):
    """What the ranks do."""

    STAGE = "stage"
    #: Survey and plan only.
    PLAN = "plan"
    #: Measure the network and the disks instead; see `rank.measure`.
    MEASURE = "measure"
    #: Only find out how many ranks there are; several may be on one node.
    HELLO = "hello"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Tasks that wait on each node: see `node.job_state`."""

    #: Name of the job's status files on each node, and the number of the step that waits there.
    status_file: str
    step: str
    #: Whether only the plugin makes them wait.
    needs_plugin: bool = False


def _new_key() -> str:
    return os.urandom(KEY_SIZE).hex()


@dataclass(frozen=True, slots=True)
class StageRequest:
    """All that the ranks need to know; sizes in bytes, times in seconds."""

    items: tuple[StageItem, ...]
    nodes: int
    lock_timeout: float
    #: Seconds without progress on any node after which the launching process ends the stage; 0 for
    #: no limit.
    stall_timeout: float = 60.0
    transfer: Settings = DEFAULT_SETTINGS
    space: Space = Space()
    #: The network interface that the site names, or its network; empty where the ranks choose.
    interface: str = ""
    #: How objects in stores are read.
    remote: RemoteSettings = DEFAULT_REMOTE
    #: Slurm's job id, 0 outside of Slurm.
    job: int = 0
    #: Where the filesystem of the job's own disks is mounted; empty if nothing is asked for there.
    shared_mount: str = ""
    #: The empty folders that are asked for there.
    scratch: tuple[str, ...] = ()
    #: The tasks that wait on each node for the end of the stage.
    waiting: Waiting | None = None
    #: The uid of the account that stages for all users; 0 for none.
    shared_owner: int = 0
    work: Work = Work.STAGE
    #: Bytes with which `Work.MEASURE` measures.
    bench: int = 0
    #: Seconds without a sign of life after which a node is given up, if that is not
    #: ``stall_timeout``; 0 if it is.
    silence: float = 0.0
    #: The job's nodes on which the stage has failed, and that it goes on without.
    failed_nodes: tuple[str, ...] = ()
    #: The user's name for the line that each node logs about the stage; empty to log nothing.
    log_user: str = ""
    #: The hosts on which ranks were started without Slurm; a rank takes its node's name from there.
    hosts: tuple[str, ...] = ()
    #: The name of the command line, if other processes run it, too, and wait on their nodes until
    #: this stage has ended (`node.job_state`); else empty.
    line: str = ""
    #: Folder that holds one folder a simulated node; empty on real nodes.
    local_root: str = ""
    #: The secret by which the ranks of this stage know each other, in hexadecimal. It is nowhere
    #: but here: the environment of a process is private to its user.
    key: str = field(default_factory=_new_key, repr=False)

    @property
    def dry_run(self) -> bool:
        """Whether nothing is written."""
        return self.work in (Work.PLAN, Work.HELLO)

    @property
    def variables(self) -> dict[str, str]:
        """What the tasks that wait for the stage get in their environment."""
        named = [item for item in self.items if item.options.name]
        lists = ":".join(item.shard_list for item in self.items if item.shard_list)
        found = {f"STAGE_{item.options.name}": item.destination for item in named}
        found |= {_SHARDS: lists} if lists else {}
        found |= {SHARED_VARIABLE: self.shared_mount} if self.shared_mount else {}
        # They travel as lines, and the next one would be another variable.
        return {name: value for name, value in found.items() if "\n" not in value}

    @property
    def line_root(self) -> str:
        """The cache root where the end of the stage is told to those who run the same line."""
        roots = [item.root for item in self.items if not item.shared]
        return (roots or self.space.roots)[0]

    def to_json(self) -> str:
        """Return one line for `from_json`: JSON, compressed if it has more than MAX_REQUEST bytes.

        Raise UsageError if it is too long even then.
        """
        data = asdict(replace(self, items=())) | {"items": [item.to_json() for item in self.items]}
        text = json.dumps(data, ensure_ascii=False)
        if len(os.fsencode(text)) <= MAX_REQUEST:
            return text
        text = _compressed(text)
        if len(text) > MAX_REQUEST:
            raise UsageError(
                f"{len(self.items)} directives are too long for one job: they have {len(text)} "
                f"compressed bytes; {MAX_REQUEST} are allowed: stage a folder or an archive "
                "instead of many files"
            )
        return text

    @classmethod
    def from_json(cls, text: str) -> StageRequest:
        """Return the request that `to_json` wrote."""
        data = json.loads(text if text.startswith("{") else _decompressed(text))
        items = tuple(map(StageItem.from_json, data.pop("items")))
        data["transfer"]["algorithm"] = Algorithm(data["transfer"]["algorithm"])
        data["work"] = Work(data["work"])
        nested = {name: _made(kind, data[name]) for name, kind in _NESTED.items() if data[name]}
        return _made(cls, data | nested | {"items": items})


#: The fields of a request that are dataclasses.
_NESTED: dict[str, type[Any]] = {
    "transfer": Settings, "space": Space, "remote": RemoteSettings, "waiting": Waiting,
}  # fmt: skip


def _made(kind: type[T], values: dict[str, Any]) -> T:
    """Return a dataclass of values from JSON, which has lists in place of tuples."""
    tuples = {name: tuple(value) for name, value in values.items() if type(value) is list}
    return kind(**values | tuples)


def _compressed(text: str) -> str:
    """Return ``text`` in letters, digits and ``+/=:``, for `_decompressed`.

    By xz, which sees the repetition of a path also 100 KiB later.
    """
    import lzma  # only for long requests, as below
    from binascii import b2a_base64

    return _COMPRESSED + b2a_base64(lzma.compress(os.fsencode(text)), newline=False).decode("ascii")


def _decompressed(text: str) -> str:
    import lzma
    from binascii import a2b_base64

    return os.fsdecode(lzma.decompress(a2b_base64(text.removeprefix(_COMPRESSED))))
