"""Read the site's stage.toml: what may be staged where, and how a stage is launched.

Every key but ``roots`` has a default. An unknown key, a wrong type or a value out of range is a
PolicyRefusal that names the file and the key. `request.keys` makes the template and the reference
of what stands below each key here.
"""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from contextlib import suppress
from ipaddress import ip_network
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from stager.base.errors import PolicyRefusal
from stager.base.extents import ALIGNMENT
from stager.base.paths import INTERFACES
from stager.base.rules import (
    KEEP_FREE,
    byte_size,
    disk_amount,
    shared_owner,
    store_path,
    with_store,
)
from stager.request.grammar import Tolerance
from stager.request.items import UNPACKED_MEMBERS, UNPACKED_SIZE
from stager.request.names import LETTERS, fill_letters, letters_at_submission, letters_of
from stager.source.endpoints import RemoteSettings
from stager.source.image_name import is_registry
from stager.source.schemes import URLS
from stager.wire.layout import Algorithm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

#: Most of those who meet a fault in stage.toml are users, who cannot mend it.
_REMEDY = "tell the administrator"
_MIB = 1 << 20
#: A name that the kernel allows for an interface; Open MPI splits its list at commas.
_INTERFACE_NAME = re.compile(r"[^\s,/:]{1,15}")
#: A name of a variable, as shells have it.
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Slower connections would be cut off by some servers.
_LOWEST_RATE = 1_000_000
#: A stage counts as stalled after so many seconds at least: several signs of life are due by then.
_SHORTEST_LIMIT = 5


def _plain_absolute(path: str) -> str:
    if not path.startswith("/") or any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise ValueError("must be an absolute path without '.', '..' or a '/' at its end")
    return path


def _plain_absolute_or_none(path: str) -> str:
    try:
        return path and _plain_absolute(path)
    except ValueError as error:
        raise ValueError(f'{error}, or ""') from None


def _possible_name(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError("this is not a possible name of an environment variable")
    return name


def _possible_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    return value


def _possible_command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be read as a command: {error}") from None
    if not words:
        raise ValueError("must name a program")
    return text


def _possible_srun(text: str) -> str:
    if not text or ("/" in text and not text.startswith("/")):
        raise ValueError("must be a name, or a path that starts with /")
    return text


Environment = dict[
    Annotated[str, AfterValidator(_possible_name)], Annotated[str, AfterValidator(_possible_value)]
]


def _possible_pattern(path: str) -> str:
    fill_letters(_plain_absolute(path), LETTERS)
    return path


def _possible_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ValueError("must be letters, digits and _, and begin with no digit")
    return name


def _place(value: object) -> object:
    if isinstance(value, str):
        value = {"path": _possible_pattern(value)}
    if not isinstance(value, dict | Place):
        raise ValueError("must be a path, or a table with one")  # noqa: TRY004 - pydantic's
    if isinstance(value, dict) and _is_pattern(str(value.get("path"))):
        return {**value, "private": True}
    return value


def _is_pattern(path: str) -> bool:
    return "%" in path.replace("%%", "")


def _is_of_user(path: str) -> bool:
    """Return whether a pattern is the same for all jobs of a user."""
    return {*re.findall("%(.)", path.replace("%%", ""))} in ({"u"}, {"U"}, {"u", "U"})


def _not_empty(places: tuple[Place, ...]) -> tuple[Place, ...]:
    if not places:
        raise ValueError("must name at least one folder")
    return places


def _known_account(name: str) -> str:
    shared_owner(name)
    return name


def _url_start(text: str) -> str:
    begin = tuple(f"{one}://" for one in URLS)
    if not text.startswith(begin):
        raise ValueError(f"must begin with one of {', '.join(begin)}")
    return text


def _endpoint(text: str) -> str:
    if not text.startswith(("https://", "http://")):
        raise ValueError("must begin with https:// or http://")
    return text.rstrip("/")


def _endpoint_or_none(text: str) -> str:
    try:
        return text and _endpoint(text)
    except ValueError as error:
        raise ValueError(f'{error}, or be ""') from None


def _interface(text: str) -> str:
    with suppress(ValueError):
        return str(ip_network(text)) if "/" in text else _interface_name(text)
    raise ValueError(
        'must be "auto", the name of an interface such as "hsn0", or a network such as '
        '"10.1.0.0/16", with the address of the network itself'
    )


def _interface_name(text: str) -> str:
    if not _INTERFACE_NAME.fullmatch(text):
        raise ValueError
    return text


def _registry(text: str) -> str:
    if not is_registry(text):
        raise ValueError("must be a host with a '.' or a port, such as registry.site.org:5000")
    return text


Root = Annotated[str, AfterValidator(_plain_absolute)]
#: The same, with what stands for a job or its user (`names`).
Pattern = Annotated[str, AfterValidator(_possible_pattern)]
RootOrNone = Annotated[str, AfterValidator(_plain_absolute_or_none)]
Seconds = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


def _count(value: object) -> object:
    if value == "auto":
        return 0
    if type(value) is not int or not 1 <= value <= 64:
        raise ValueError('must be "auto" or a number from 1 to 64')
    return value


def _limit(value: object) -> object:
    is_number = type(value) in (int, float)
    if not is_number or not (value == 0 or _SHORTEST_LIMIT <= value < inf):  # type: ignore[operator]
        raise ValueError(f"must be 0 or a number of seconds from {_SHORTEST_LIMIT} on")
    return value


def _memory(value: object) -> object:
    return None if value == "auto" else value


def _rate(value: object) -> object:
    try:
        size = byte_size(value.removesuffix("/s") if isinstance(value, str) else value)
    except ValueError:
        text = 'must be a number of bytes a second, or a text such as "5GB/s"'
        raise ValueError(text) from None
    if 0 < size < _LOWEST_RATE:
        raise ValueError(f"must be 0 or at least {_LOWEST_RATE} bytes a second")
    return size


def _whole_pages(size: ByteSize) -> ByteSize:
    if size % ALIGNMENT:
        raise ValueError(f"must be a multiple of {ALIGNMENT}")
    return size


def _or_auto(value: int | None) -> int | str:
    return value or "auto"


Memory = Annotated[
    Annotated[ByteSize, Field(ge=8192, le=1 << 36)] | None,
    BeforeValidator(_memory),
    PlainSerializer(_or_auto, when_used="json"),
]
#: Read by the same function as in root's programs, which read these keys too.
Bytes = Annotated[int, BeforeValidator(byte_size)]
#: The same, or percent of a disk.
DiskAmount = Annotated[int | str, BeforeValidator(disk_amount)]
#: A folder, or empty for none.
Store = Annotated[str, BeforeValidator(store_path)]
#: Bytes a second, 0 for no limit.
Rate = Annotated[int, BeforeValidator(_rate)]
#: How many nodes may fail.
Tolerated = Annotated[Tolerance, BeforeValidator(Tolerance.parse), PlainSerializer(str)]
#: A number from 1 to 64, or 0 for "auto".
Count = Annotated[int, BeforeValidator(_count), PlainSerializer(_or_auto, when_used="json")]


UrlStart = Annotated[str, AfterValidator(_url_start)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
EndpointOrNone = Annotated[str, AfterValidator(_endpoint_or_none)]
Registry = Annotated[str, AfterValidator(_registry)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cache(_Section):
    """``[cache]``: what staged files may take of each node's disks."""

    keep_free: DiskAmount = KEEP_FREE
    """What a stage leaves free of each disk: bytes, or percent of the disk."""
    user_limit: DiskAmount = "60%"
    """The most of each disk of a node that one user's copies may take, `shared:` aside; 0 for no
    limit.
    """
    headroom: DiskAmount = 0
    """After a job, this much more than `keep_free` is made free, by removing old
    copies of any user; 0: none.
    """
    store: Store = ""
    """A folder on each node's disk that outlasts jobs, from which copies in jobs' folders are
    made; empty for none.
    """
    size: DiskAmount = 0
    """The most that the copies of all users take in `store`; 0 for no limit."""
    unpacked_size: Bytes = UNPACKED_SIZE
    """The most bytes to which one archive or compressed file may unpack."""
    unpacked_members: Annotated[int, Field(ge=1, strict=True)] = UNPACKED_MEMBERS
    """The most files, folders and links that one archive may have."""


class Launch(_Section):
    """``[launch]``: how the broadcast is started on the nodes of a job."""

    srun: Annotated[str, AfterValidator(_possible_srun)] = "srun"
    """The srun that starts the ranks, the MPI processes of which one runs on each node. A
    path, such as `/opt/slurm/bin/srun`, is that of scontrol and sinfo, too.
    """
    mpi: Annotated[str, Field(min_length=1)] = "auto"
    """What `srun --mpi` gets: one of `srun --mpi=list` that the MPI library supports. `auto`:
    pmix with Open MPI, or pmi2 with MPICH, if Slurm has it; else MPICH with pmix.
    """
    # Less than the 300 seconds that the plugin's waiting tasks allow (gate.c).
    start_timeout: Annotated[Seconds, Field(le=240)] = 120
    """Seconds in which the ranks must have started on all nodes, up to 240; else the job fails
    with code 8.
    """
    authenticate: Annotated[bool, Field(strict=True)] = True
    """Ranks accept TCP connections from ranks of the same stage only. `false` is for nodes
    between which addresses are translated; then let no two users share a node.
    """
    interface: Annotated[str, AfterValidator(_interface)] = "auto"
    """The network interface for MPI over TCP, such as `hsn0`, or with Open MPI its network, such
    as `10.1.0.0/16`, which each node must have. `auto`: MPI
    uses that of the node's name and faster ones, and the ranks the fastest network.
    """
    mpiexec: Annotated[str, Field(min_length=1)] = "mpiexec"
    """Without Slurm: the mpiexec, of Open MPI or MPICH, that starts the ranks. It must be of
    the MPI library that they load.
    """
    agent: Annotated[str, AfterValidator(_possible_command)] = "ssh"
    """Without Slurm: the program by which mpiexec reaches other hosts, with options, such as
    `ssh -p 2222`, `blaunch` or `pbs_tmrsh`.
    """
    wait: Annotated[float, Field(ge=0, le=86_400, strict=True)] = 30
    """Without Slurm: seconds to wait until all hosts answer, up to 86400; 0: ask none."""
    tolerate: Tolerated = Tolerance(0)
    """On how many nodes of a job staging may fail if the job has no `--stage-tolerate`: a
    number, or a share such as `"5%"`. These nodes leave the job.
    """
    tolerate_limit: Tolerated = Tolerance(50, is_percent=True)
    """The most nodes of a job that may fail, whatever the job asks for."""
    tolerate_slow: Annotated[float, BeforeValidator(_limit)] = 60
    """Seconds that a node may cost the others whose disk writes less than a third of what theirs
    do, before it leaves a job that tolerates that. From 5 on; 0 for no limit.
    """
    environment: Environment = Field(default_factory=dict)
    """More environment of the ranks, for the MPI library: `environment = { UCX_NET_DEVICES =
    "mlx5_0:1" }`
    """

    @property
    def interfaces(self) -> tuple[str, str]:
        """Where the site names the interfaces for MPI over TCP, and their names with commas."""
        if INTERFACES in self.environment:
            return f"{INTERFACES} in [launch] environment", self.environment[INTERFACES]
        return "interface in [launch]", self.named_interface

    @property
    def named_interface(self) -> str:
        """The interface or the network that the site names; empty if it names none."""
        return "" if self.interface == "auto" else self.interface


class Transfer(_Section):
    """``[transfer]``: how the bytes move."""

    # Below 2^31, since MPI counts are C ints. Above the size up to which MPI libraries send before
    # the receiver is ready (usually 64 KiB): a slow receiver would have to keep such messages
    # outside of its ring.
    chunk: Annotated[ByteSize, Field(ge=128 << 10, le=1 << 30), AfterValidator(_whole_pages)] = (
        ByteSize(2 * _MIB)
    )
    """Bytes of one message: 128 KiB to 1 GiB, a multiple of 4096."""
    # None, like 0 below, lets the ranks choose.
    memory: Memory = None
    """Buffers on each node: 8 KiB to 64 GiB, two chunks at least. `auto`: 16 MiB for up to 7
    nodes, growing to 64 MiB for 16,384; for a URL up to 256 MiB.
    """
    algorithm: Algorithm = Algorithm.AUTO
    """The way of chunks between nodes: `chain` or `tree`, from node to node, `bcast` or
    `ibcast`, by the MPI library. `auto`: ibcast for a file of one chunk; else chain below 8
    nodes and tree from 8 on.
    """
    readers: Count = 0
    """Nodes that read a file in turns: 1 to 64. `auto`: as many as
    help. Images and whole folders are read by one; what all nodes see, by all.
    """
    writers: Count = 0
    """Threads that write on each node: 1 to 64. What is unpacked is written by one."""
    direct: Annotated[bool, Field(strict=True)] = True
    """Single files are written without the page cache, where possible.
    """
    stall_timeout: Annotated[float, BeforeValidator(_limit)] = 60
    """Seconds in which no byte moves on any node, or a node does not answer. Then the job fails
    with code 8 and the node's name. From 5 on; 0 for no limit.

    A lock and a suspended job are no stall.
    """

    @property
    def depth(self) -> int:
        """Number of chunks for which there are buffers; 0 lets the ranks choose."""
        return 0 if self.memory is None else max(2, self.memory // self.chunk)


class SourceSection(_Section):
    """``[source]``: which URLs may be staged, and how they are read."""

    allow: tuple[UrlStart, ...] = ()
    """What a URL must begin with to be staged, such as `["s3://", "az://ouraccount/",
    "hf://ORG/", "https://data.site.org/"]`; empty: no URLs. For images name the registry, as
    `docker://registry.site.org/`; nodes need skopeo, umoci and mksquashfs.

    `http://` must be named, and nothing proves who answers there.
    """
    endpoints: tuple[Endpoint, ...] = ()
    """Endpoints besides the vendors' that a job's environment may name, such as
    `["https://minio.site.org:9000"]`.
    """
    requests: Annotated[int, Field(ge=1, le=64, strict=True)] = 8
    """Requests that each reading node has under way at once: 1 to 64."""
    limit: Rate = 0
    """The most that all nodes of a job together read from stores, such as `"5GB/s"`, shared
    equally by the nodes that may read. From `"1MB/s"` on; 0 for no limit. Registries are not
    limited.
    """
    patience: Annotated[Seconds, Field(le=3600)] = 60
    """Seconds for which a request is repeated while a store fails, up to 3600; then the job
    fails with code 4.
    """
    ca_file: RootOrNone = ""
    """A file on all nodes with the certificates of the site's own authorities; empty for none."""
    proxy: EndpointOrNone = ""
    """A proxy for all requests; empty for none."""
    insecure_registries: tuple[Registry, ...] = ()
    """Registries without TLS, or with a certificate that is not checked, such as
    `["registry:5000"]`.

    Anybody on the way can replace an image, unless it is named by its digest.
    """

    @property
    def settings(self) -> RemoteSettings:
        """What of it the ranks need."""
        allow_http = any(one.startswith("http://") for one in (*self.allow, *self.endpoints))
        return RemoteSettings(
            self.requests, self.patience, self.ca_file, self.proxy, allow_http,
            self.insecure_registries, self.limit,
        )  # fmt: skip


class Shared(_Section):
    """``[shared]``: files that one account of the site stages for all users."""

    owner: Annotated[str, AfterValidator(_known_account)] = ""
    """That account. It is unprivileged, and there on all nodes."""
    roots: tuple[Root, ...] = ()
    """The folders for these files. They belong to that account, and nobody else can write there."""

    @model_validator(mode="after")
    def _check_owner(self) -> Self:
        if self.roots and not self.owner:
            raise ValueError("roots needs an owner: the account whose jobs stage there")
        return self


class SharedFsSection(_Section):
    """``[shared_fs]``: a filesystem of a job's disks, for `shared:`."""

    driver: RootOrNone = ""
    """The program that starts and stops it on a job's nodes; if it fails, the job does, and no node
    is drained. Empty for none.
    """
    folder: RootOrNone = ""
    """A folder on a disk of each node, for the jobs' data."""
    mount: RootOrNone = ""
    """The folder in which the filesystem of job 17 is mounted as `17`."""
    user: Annotated[bool, Field(strict=True)] = True
    """Whether the driver runs as the job's user; `false`: as root."""

    @model_validator(mode="after")
    def _check_paths(self) -> Self:
        missing = [name for name in ("driver", "folder", "mount") if not getattr(self, name)]
        if missing and len(missing) < len(("driver", "folder", "mount")):
            raise ValueError(f"{missing[0]} is missing")
        return self


class Report(_Section):
    """``[report]``: where the result of a stage is told besides the job's output."""

    syslog: Annotated[bool, Field(strict=True)] = True
    """Each node logs one line for each stage: job, user, bytes that it received, seconds, exit
    code.
    """
    job_comment: Literal["all", "failed", "none"] = "failed"
    """The jobs whose comment says how their stage ended, after a comment of the user's own:
    `all`, `failed` or `none`. It takes two requests to slurmctld for each of these jobs.
    """


class Metrics(_Section):
    """``[metrics]``: figures of each node for Prometheus."""

    textfile: RootOrNone = ""
    """A file for node_exporter's textfile collector, such as
    `/var/lib/node_exporter/slurm_stage.prom`; empty for none. Its folder belongs to root, and
    only root may write there.
    """


class Place(_Section):
    """One of ``roots``: a folder on each node's own disks, beneath which users may stage."""

    path: Pattern
    """The folder. `%u`, `%j`, `%A`, `%a` and `%x` are those of sbatch, `%U` is the uid and
    `%r` the restart count.
    """
    # Root's part of slurm-stage leaves such a folder alone.
    private: Annotated[bool, Field(strict=True)] = False
    """Whether jobs or users have different folders of this one name. It is so wherever the
    path has a `%`.
    """
    hint: str = ""
    """How a job asks for the folder, or for more room in it: an option of sbatch."""

    #: Found in the pattern, which `Policy.at` fills in.
    _of_job: bool = PrivateAttr(default=False)

    def model_post_init(self, _: object) -> None:
        """Note what the pattern says."""
        self._of_job = self.private and not _is_of_user(self.path)

    @property
    def of_job(self) -> bool:
        """Whether it is there for one job, and not for the user's other jobs."""
        return self._of_job


class Policy(_Section):
    """The whole of stage.toml; its paths have patterns until they are filled in by `at`."""

    places: Annotated[
        tuple[Annotated[Place, BeforeValidator(_place)], ...], AfterValidator(_not_empty)
    ] = Field(alias="roots")
    """Folders on the local disks of each node, beneath which users may stage; each on one
    filesystem. One that is made for each job or user is a table: `roots = [{ path =
    "/localscratch/%u.%j.%r", hint = "--gres=localscratch:GB" }, { path = "/tmp", private =
    true }]`
    """
    destinations: tuple[Pattern, ...] = ()
    """The only folders beneath the roots where users may stage; empty: all roots. Make
    them as root, mode 1777.
    """
    variables: dict[Annotated[str, AfterValidator(_possible_variable)], Pattern] = Field(
        default_factory=dict
    )
    """What `$NAME` stands for at the beginning of DST, beneath one of the roots: `variables =
    { SLURM_TMPDIR = "/localscratch/%u.%j.%r" }`
    """
    lock_timeout: Seconds = 1800
    """Seconds that a job waits for another job that stages to the same DST; then it fails with
    code 9.
    """
    allow_share: Literal["none", "group", "all"] = "all"
    """The most that users may open their copies to others by the option `share`: `none`,
    `group` or `all`.
    """
    cache: Cache = Cache()
    launch: Launch = Launch()
    transfer: Transfer = Transfer()
    source: SourceSection = SourceSection()
    shared: Shared = Shared()
    shared_fs: SharedFsSection = SharedFsSection()
    report: Report = Report()
    metrics: Metrics = Metrics()

    #: Set by `at`.
    _absent: tuple[str, ...] = PrivateAttr(default=())
    _shared_mount: str = PrivateAttr(default="")

    @property
    def roots(self) -> tuple[str, ...]:
        """The folders on each node's own disks that hold copies: those of users, and the store."""
        return tuple(with_store([*self.open_roots], self.store))

    @property
    def open_roots(self) -> tuple[str, ...]:
        """The ``roots`` beneath which users may stage: all but a store that is none of them."""
        return tuple(place.path for place in self.places)

    @property
    def store(self) -> str:
        """The folder that keeps copies behind the folders of jobs; empty for none."""
        return self.cache.store

    @property
    def private_roots(self) -> tuple[str, ...]:
        """Those of ``roots`` that are there for a job or a user alone."""
        return tuple(place.path for place in self.places if place.private)

    @property
    def job_roots(self) -> tuple[str, ...]:
        """Those of them that are there for one job, and not for the user's other jobs."""
        return tuple(place.path for place in self.places if place.of_job)

    @property
    def absent_roots(self) -> tuple[str, ...]:
        """The patterns of roots that are left out, as they are there in a job alone."""
        return self._absent

    @property
    def shared_mount(self) -> str:
        """Where the job's filesystem of its nodes' disks is, if it asks for one; empty outside of a
        job, and where the site has none.
        """
        return self._shared_mount

    @property
    def copy_roots(self) -> tuple[str, ...]:
        """``roots``, and ``shared_mount``: a user's copies are beneath these."""
        return (*self.roots, *filter(None, [self.shared_mount]))

    @property
    def hints(self) -> dict[str, str]:
        """How to ask for those of ``roots`` that a job must ask for."""
        return {place.path: place.hint for place in self.places if place.hint}

    def at(self, letters: Mapping[str, str]) -> Self:
        """Return the policy of one job or user, in which no root has a pattern.

        ``letters`` are those of `names.letters_of`. Roots that need others are left out; outside of
        a job, so are all that are there for one job.
        """
        filled = [
            (place, _filled(place.path, letters) if "j" in letters or not place.of_job else None)
            for place in self.places
        ]
        here = self.model_copy(
            update={
                "places": tuple(
                    place.model_copy(update={"path": path})
                    for place, path in filled
                    if path is not None
                ),
                # What cannot be filled in matches nothing, and so allows nothing.
                "destinations": tuple(_filled(one, letters) or one for one in self.destinations),
            }
        )
        here._absent = tuple(place.path for place, path in filled if path is None)  # noqa: SLF001
        if self.shared_fs.mount and "j" in letters:
            here._shared_mount = f"{self.shared_fs.mount}/{letters['j']}"  # noqa: SLF001
        return here

    @property
    def shared_roots(self) -> tuple[str, ...]:
        """The folders for files that all users may use."""
        return self.shared.roots

    @property
    def shared_owner(self) -> int:
        """The uid of the account that stages there, 0 if there is none."""
        return shared_owner(self.shared.owner)

    @property
    def allowed(self) -> tuple[str, ...]:
        """The folders beneath which users may stage."""
        return self.destinations or self.open_roots

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        roots = self.open_roots
        for folder in self.destinations:
            if not _is_in(folder, roots):
                raise ValueError(f"destinations: {folder} is not beneath one of roots")
        for folder in self.shared_roots:
            if folder in roots:
                raise ValueError(
                    f"shared.roots: {folder} is one of roots too; choose another folder"
                )
        for name, path in self.variables.items():
            if not _is_in(path, roots):
                raise ValueError(f"variables.{name}: {path} is not beneath one of roots")
        self._check_store()
        return self

    def _check_store(self) -> None:
        """Raise ValueError if users could stage into the store, or if it went with a job."""
        lasting = [place.path for place in self.places if not place.private]
        others = [root for root in (*self.roots, *self.shared_roots) if root != self.store]
        if self.store in (*self.private_roots, *self.shared_roots) or _is_in(self.store, others):
            or_one = f", or one of {', '.join(lasting)}" if lasting else ""
            raise ValueError(
                f"cache.store: {self.store} is in a folder that users stage to; choose a folder "
                f"outside of roots and shared.roots{or_one}"
            )


def _is_in(path: str, folders: Iterable[str]) -> bool:
    """Return whether a path is one of the folders, or beneath one."""
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)


def _filled(pattern: str, letters: Mapping[str, str]) -> str | None:
    with suppress(ValueError):
        return fill_letters(pattern, letters)
    return None


#: For `stagectl --local` on a machine without stage.toml: all of the simulated nodes' disks.
LOCAL = Policy.model_construct(places=(Place.model_construct(path=""),))
#: For `stagectl check` there: what some site may allow.
ANY = LOCAL.model_copy(
    update={
        "source": SourceSection.model_construct(allow=tuple(f"{one}://" for one in URLS)),
    }
)
ANY._shared_mount = "/$STAGE_SHARED"  # noqa: SLF001


def load(path: Path) -> Policy:
    """Return the policy in ``path``. Raise PolicyRefusal if it is absent, unreadable or wrong."""
    rules = load_if_present(path)
    if rules is None:
        raise PolicyRefusal(
            f"{path} is missing; {_REMEDY} (slurm-config/stage.toml is a template for it)"
        )
    return rules


def load_here(path: Path, environment: Mapping[str, str], *, simulated: bool = False) -> Policy:
    """Return the policy in ``path`` for the job, if any, that an ``environment`` tells of.

    Simulated nodes have a default one. Raise PolicyRefusal.
    """
    letters = letters_of(environment)
    if simulated:
        rules = load_if_present(path) or LOCAL
        return rules.at(letters_at_submission(environment) | letters)
    return load(path).at(letters)


def load_if_present(path: Path) -> Policy | None:
    """Return the policy in ``path``, None if there is no such file. Raise PolicyRefusal."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PolicyRefusal(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from None
    except RecursionError:
        raise PolicyRefusal(f"{path} is not TOML: it is nested too deeply; {_REMEDY}") from None
    except ValueError as error:  # from TOML, from UTF-8, or from a number of too many digits
        raise PolicyRefusal(f"{path} is not TOML: {error}; {_REMEDY}") from None
    try:
        return Policy.model_validate(document)
    except ValidationError as error:
        faults = "; ".join(
            _fault(found["loc"], found["type"], found["msg"]) for found in error.errors()
        )
        raise PolicyRefusal(f"{path}: {faults}; {_REMEDY}") from None


#: What some kinds of pydantic's faults are in the terms of TOML.
_IN_TOML = {
    "missing": "is missing",
    "model_type": "must be a table",
    "tuple_type": "must be a list",
}


def _fault(location: tuple[int | str, ...], kind: str, message: str) -> str:
    """Return one fault as ``key: problem``."""
    key = ".".join(str(part) for part in location if part != "[key]")
    problem = _IN_TOML.get(kind) or message.removeprefix("Value error, ")
    if kind == "extra_forbidden":
        problem = f"unknown key; {_near_key(location)}stage.toml(5) lists all"
    return f"{key}: {problem}" if key else problem


def _near_key(location: tuple[int | str, ...]) -> str:
    """Return a question for the key of the same table that is most like an unknown one, if any."""
    table: Any = Place if location[0] == "roots" and len(location) > 1 else Policy
    for part in location[:-1] if table is Policy else ():
        table = table.model_fields[part].annotation
    names = [field.alias or name for name, field in table.model_fields.items()]
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {near[0]}? " if near else ""
