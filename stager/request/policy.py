"""Read the site's stage.toml: what may be staged where, and how a stage is launched.

Every key but ``roots`` has a default. An unknown key, a wrong type or a value out of range is a
PolicyRefusal that names the file and the key.
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


Memory = Annotated[Annotated[ByteSize, Field(ge=8192, le=1 << 36)] | None, BeforeValidator(_memory)]
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
Count = Annotated[int, BeforeValidator(_count)]


UrlStart = Annotated[str, AfterValidator(_url_start)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
EndpointOrNone = Annotated[str, AfterValidator(_endpoint_or_none)]
Registry = Annotated[str, AfterValidator(_registry)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cache(_Section):
    """``[cache]``: what staged files may take of each node's disks."""

    #: What a stage leaves free of each disk.
    keep_free: DiskAmount = KEEP_FREE
    #: The most that one user's copies may take of each disk of a node; 0 for no limit.
    user_limit: DiskAmount = "60%"
    #: What is made free beyond ``keep_free`` after each job: the least recently used copies of all
    #: users are evicted. With 0, no user's copies are evicted for another user.
    headroom: DiskAmount = 0
    #: Where copies are kept from which those in the folders of jobs are made; empty for nowhere.
    store: Store = ""
    #: The most that the copies of all users take there; 0 for no limit.
    size: DiskAmount = 0
    #: The most bytes and members that one archive may unpack to.
    unpacked_size: Bytes = UNPACKED_SIZE
    unpacked_members: Annotated[int, Field(ge=1, strict=True)] = UNPACKED_MEMBERS


class Launch(_Section):
    """``[launch]``: how the broadcast is started on the nodes of a job."""

    #: The srun to use; a name without ``/`` is looked for in the system's own folders, and Slurm's
    #: other commands first beside a path (`launch.job`).
    srun: Annotated[str, AfterValidator(_possible_srun)] = "srun"
    #: srun's --mpi: the plugin through which the ranks find each other (`srun --mpi=list`). "auto"
    #: is settled by what is installed (`launch.mpi`).
    mpi: Annotated[str, Field(min_length=1)] = "auto"
    #: Most seconds from the launch until every rank has started, Python's start included. Less
    #: than the 300 seconds that the plugin's waiting tasks allow (gate.c).
    start_timeout: Annotated[Seconds, Field(le=240)] = 120
    #: Whether ranks authenticate the TCP connections between them (`launch.mpi`). Both must see
    #: the same addresses: this fails where addresses are translated between nodes.
    authenticate: Annotated[bool, Field(strict=True)] = True
    #: The network interface, or its network as in ``10.1.0.0/16``, that MPI over TCP uses, and over
    #: which the ranks watch each other. "auto": MPI uses those that lead to other nodes
    #: (`rank.network`), and the ranks choose the watch's by kind and speed (`rank.network`).
    interface: Annotated[str, AfterValidator(_interface)] = "auto"
    #: Without Slurm: the mpiexec that starts the ranks (`launch.mpiexec`), and the program by which
    #: it reaches other hosts, with its options.
    mpiexec: Annotated[str, Field(min_length=1)] = "mpiexec"
    agent: Annotated[str, AfterValidator(_possible_command)] = "ssh"
    #: Without Slurm: most seconds until all hosts answer; 0 to ask none.
    wait: Annotated[float, Field(ge=0, le=86_400, strict=True)] = 30
    #: The nodes of a job that may fail to be staged to, where the job does not say
    #: (`launch.tolerate`); and the most of them, whatever it says.
    tolerate: Tolerated = Tolerance(0)
    tolerate_limit: Tolerated = Tolerance(50, is_percent=True)
    #: Seconds that a node with a slow disk may cost the others where it may fail; 0 for no limit.
    tolerate_slow: Annotated[float, BeforeValidator(_limit)] = 60
    #: Extra environment of the ranks, for the site's MPI library.
    environment: Environment = Field(default_factory=dict)

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

    #: Bytes of one message. Below 2^31, since MPI counts are C ints. Above the size up to which MPI
    #: libraries send before the receiver is ready (usually 64 KiB): a slow receiver would have to
    #: keep such messages outside of its ring.
    chunk: Annotated[ByteSize, Field(ge=128 << 10, le=1 << 30), AfterValidator(_whole_pages)] = (
        ByteSize(2 * _MIB)
    )
    #: Bytes of buffers on each node, at least two chunks. None, "auto" in the file, lets the ranks
    #: choose.
    memory: Memory = None
    #: The way of chunks from node to node.
    algorithm: Algorithm = Algorithm.AUTO
    #: Nodes that take turns in reading the source, and threads that write on each node. 0, "auto"
    #: in the file, lets the ranks choose.
    readers: Count = 0
    writers: Count = 0
    #: Whether copies are written past the page cache, where the filesystem supports that.
    direct: Annotated[bool, Field(strict=True)] = True
    #: Seconds without a byte read, received or written on any node, or without a sign of life from
    #: one, after which a stage fails; 0 for no limit.
    stall_timeout: Annotated[float, BeforeValidator(_limit)] = 60

    @property
    def depth(self) -> int:
        """Number of chunks for which there are buffers; 0 lets the ranks choose."""
        return 0 if self.memory is None else max(2, self.memory // self.chunk)


class SourceSection(_Section):
    """``[source]``: which URLs may be staged, and how they are read."""

    #: What a URL must begin with, such as ``s3://`` or ``https://data.site.org/``; empty for none.
    allow: tuple[UrlStart, ...] = ()
    #: Other endpoints of stores than the vendors' that a job's environment may name.
    endpoints: tuple[Endpoint, ...] = ()
    #: Requests that each reading node has under way at once.
    requests: Annotated[int, Field(ge=1, le=64, strict=True)] = 8
    #: Bytes a second that all nodes of a job together may read from stores; 0 for no limit.
    limit: Rate = 0
    #: Seconds for which a request is repeated while a store fails.
    patience: Annotated[Seconds, Field(le=3600)] = 60
    #: A file on all nodes with certificates of the site's own authorities; a proxy.
    ca_file: RootOrNone = ""
    proxy: EndpointOrNone = ""
    #: Registries without TLS, or with a certificate that is not checked.
    insecure_registries: tuple[Registry, ...] = ()

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

    #: The account whose jobs stage beneath ``roots``. Root stages nothing.
    owner: Annotated[str, AfterValidator(_known_account)] = ""
    #: Folders on each node that belong to root or to this account.
    roots: tuple[Root, ...] = ()

    @model_validator(mode="after")
    def _check_owner(self) -> Self:
        if self.roots and not self.owner:
            raise ValueError("roots needs an owner: the account whose jobs stage there")
        return self


class Report(_Section):
    """``[report]``: where the result of a stage is told besides the job's output."""

    #: Whether each node logs one line for each stage.
    syslog: Annotated[bool, Field(strict=True)] = True
    #: The jobs into whose comment the result is written.
    job_comment: Literal["all", "failed", "none"] = "failed"


class Metrics(_Section):
    """``[metrics]``: figures of each node for Prometheus."""

    #: File in the textfile folder of node_exporter, ending in ``.prom``; empty for none.
    textfile: RootOrNone = ""


class Place(_Section):
    """One of ``roots``: a folder on each node's own disks, beneath which users may stage."""

    path: Pattern
    #: Whether the site makes and removes it for jobs or users, as it does wherever the path has a
    #: pattern. Else each job, or each user, has another folder of this name. Root's part of
    #: slurm-stage leaves it alone.
    private: Annotated[bool, Field(strict=True)] = False
    #: How a job asks for the folder, or for more room in it: an option of sbatch.
    hint: str = ""

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

    #: The folders beneath which users may stage, each as a path or as a table.
    places: Annotated[
        tuple[Annotated[Place, BeforeValidator(_place)], ...], AfterValidator(_not_empty)
    ] = Field(alias="roots")
    #: Folders beneath ``roots`` to which alone users may stage; empty for all of ``roots``.
    destinations: tuple[Pattern, ...] = ()
    #: What ``$NAME`` at the beginning of DST stands for.
    variables: dict[Annotated[str, AfterValidator(_possible_variable)], Pattern] = Field(
        default_factory=dict
    )
    #: Most seconds that a job waits for another job that stages the same destination.
    lock_timeout: Seconds = 1800
    #: The most that users may open their copies to by the option share.
    allow_share: Literal["none", "group", "all"] = "all"
    cache: Cache = Cache()
    launch: Launch = Launch()
    transfer: Transfer = Transfer()
    source: SourceSection = SourceSection()
    shared: Shared = Shared()
    report: Report = Report()
    metrics: Metrics = Metrics()

    #: Set by `at`.
    _absent: tuple[str, ...] = PrivateAttr(default=())

    @property
    def roots(self) -> tuple[str, ...]:
        """The folders on each node's own disks that hold copies: those of users, and the store."""
        return tuple(with_store([*self.open_roots], self.store))

    @property
    def open_roots(self) -> tuple[str, ...]:
        """Those of ``roots`` beneath which users may stage: all but a store that is none of them."""
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
