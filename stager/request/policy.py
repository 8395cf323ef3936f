"""The site's stage.toml in, a frozen Policy out: what may be staged where, and how it is launched.

Every key has a default but ``roots``. An unknown key, a wrong type or a value out of range is a
PolicyRefusal that names the file and the key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from stager.base.errors import PolicyRefusal
from stager.base.extents import ALIGNMENT
from stager.request.items import UNPACKED_MEMBERS, UNPACKED_SIZE
from stager.root.rules import byte_size, percentage
from stager.wire.route import Algorithm

#: Where the plugin and stagectl look when nobody says otherwise.
DEFAULT_PATH = Path("/etc/slurm/stage.toml")
_MIB = 1 << 20


def _plain_absolute(path: str) -> str:
    if not path.startswith("/") or any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise ValueError("must be an absolute path without '.', '..' or a '/' at its end")
    return path


def _possible_name(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError("no variable can have this name")
    return name


def _possible_value(value: str) -> str:
    if "\0" in value:
        raise ValueError("no variable can hold a null byte")
    return value


Environment = dict[
    Annotated[str, AfterValidator(_possible_name)], Annotated[str, AfterValidator(_possible_value)]
]


def _not_empty(roots: tuple[str, ...]) -> tuple[str, ...]:
    if not roots:
        raise ValueError("must not be empty")
    return roots


Root = Annotated[str, AfterValidator(_plain_absolute)]
Seconds = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


def _count(value: object) -> object:
    if value == "auto":
        return 0
    if type(value) is not int or not 1 <= value <= 64:
        raise ValueError('must be "auto" or a number from 1 to 64')
    return value


def _memory(value: object) -> object:
    return None if value == "auto" else value


def _whole_pages(size: ByteSize) -> ByteSize:
    if size % ALIGNMENT:
        raise ValueError(f"must be a multiple of {ALIGNMENT}")
    return size


Memory = Annotated[Annotated[ByteSize, Field(ge=8192, le=1 << 36)] | None, BeforeValidator(_memory)]
#: As root reads the same keys.
Bytes = Annotated[int, BeforeValidator(byte_size)]
#: A number, or 0 for ``auto``.
Count = Annotated[int, BeforeValidator(_count)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Cache(_Section):
    """``[cache]``: what staged files may take of each node's disks."""

    #: Bytes, and percent of a disk, that a stage leaves free.
    keep_free: Bytes = 0
    keep_free_percent: Annotated[float, BeforeValidator(percentage)] = 0
    #: Most bytes that one user's copies may take on each disk of a node; 0 for no limit.
    user_limit: Bytes = 0
    #: Bytes beyond ``keep_free`` that are made free after each job, by the eviction of what was
    #: used least recently, whosesoever it is; 0: nobody's copies go for another user.
    headroom: Bytes = 0
    #: The most bytes and members that one archive may unpack to.
    unpacked_size: Bytes = UNPACKED_SIZE
    unpacked_members: Annotated[int, Field(ge=1, strict=True)] = UNPACKED_MEMBERS


class Launch(_Section):
    """``[launch]``: how the broadcast is started on the nodes of a job."""

    #: The srun to use; a bare name is looked for in the system's own folders.
    srun: str = "srun"
    #: srun's --mpi: the plugin by which the MPI library finds its peers (`srun --mpi=list`).
    mpi: str = "pmix"
    #: Seconds from launch until every rank has begun; nodes import Python in that time. Less than
    #: the patience of the plugin's waiting tasks (gate.c), which is 300.
    start_timeout: Annotated[Seconds, Field(le=240)] = 120
    #: Extra environment of the ranks, for the site's MPI library.
    environment: Environment = Field(default_factory=dict)


class Transfer(_Section):
    """``[transfer]``: how the bytes move."""

    #: Bytes of one message: below 2^31, since MPI counts are C ints; above what MPI libraries send
    #: unasked (64 KiB is usual), which a slow receiver would have to keep beside its ring.
    chunk: Annotated[ByteSize, Field(ge=128 << 10, le=1 << 30), AfterValidator(_whole_pages)] = (
        ByteSize(2 * _MIB)
    )
    #: Bytes of buffers on each node, at least two chunks: what is being read, sent or written.
    #: None for what is best; "auto" in the file.
    memory: Memory = None
    #: How chunks get from node to node.
    algorithm: Algorithm = Algorithm.AUTO
    #: Nodes that read in turns, and threads that write on each node; "auto" for what is best.
    readers: Count = 0
    writers: Count = 0
    #: Whether copies are written past the page cache, where the filesystem lets it.
    direct: Annotated[bool, Field(strict=True)] = True

    @property
    def depth(self) -> int:
        """Chunks for which there are buffers; 0 for what is best."""
        return 0 if self.memory is None else max(2, self.memory // self.chunk)


class Metrics(_Section):
    """``[metrics]``: figures of each node for Prometheus."""

    #: File in node_exporter's textfile folder, ending in ``.prom``; empty for none.
    textfile: Root | Literal[""] = ""


class Policy(_Section):
    """The whole of stage.toml."""

    #: Node-local folders beneath which users may stage, each on a disk of the node.
    roots: Annotated[tuple[Root, ...], AfterValidator(_not_empty)]
    #: Folders beneath ``roots`` to which users may stage; all of them where none is named.
    destinations: tuple[Root, ...] = ()
    #: Folders of root's own on the nodes: what root stages there, all users may use.
    shared_roots: tuple[Root, ...] = ()
    #: Seconds that a job waits for another one that stages the same destination.
    lock_timeout: Seconds = 1800
    cache: Cache = Cache()
    launch: Launch = Launch()
    transfer: Transfer = Transfer()
    metrics: Metrics = Metrics()

    @property
    def allowed(self) -> tuple[str, ...]:
        """The folders beneath which users may stage."""
        return self.destinations or self.roots

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        for folder in self.destinations:
            if not any(f"{folder}/".startswith(f"{root}/") for root in self.roots):
                raise ValueError(f"destinations: {folder} is not beneath one of roots")
        for folder in self.shared_roots:
            if folder in self.roots:
                raise ValueError(f"shared_roots: {folder} is one of roots, where users stage")
        return self


#: For `stagectl --local` on a machine without stage.toml: the simulated nodes' whole disks.
LOCAL = Policy.model_construct(roots=("",))


def load(path: Path) -> Policy:
    """The policy in ``path``. Raises PolicyRefusal where it is absent, unreadable or wrong."""
    rules = load_if_present(path)
    if rules is None:
        raise PolicyRefusal(
            f"{path} is missing: the site's administrator writes it (see slurm-config/stage.toml)"
        )
    return rules


def load_if_present(path: Path) -> Policy | None:
    """The policy in ``path``, None where there is no such file. Raises PolicyRefusal."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PolicyRefusal(f"{path} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise PolicyRefusal(f"{path} is not TOML: it is nested too deeply") from None
    except ValueError as error:  # TOML's own, UTF-8's, or that of an endless number
        raise PolicyRefusal(f"{path} is not TOML: {error}") from None
    try:
        return Policy.model_validate(document)
    except ValidationError as error:
        faults = "; ".join(
            _tell(fault["loc"], fault["type"], fault["msg"]) for fault in error.errors()
        )
        raise PolicyRefusal(f"{path}: {faults}") from None


def _tell(location: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(str(part) for part in location if part != "[key]")
    return f"{key}: {_explain(kind, message)}" if key else _explain(kind, message)


#: Pydantic's kinds of faults that are better told in TOML's words.
_IN_TOML = {
    "extra_forbidden": "unknown key",
    "model_type": "must be a table",
    "tuple_type": "must be a list",
}


def _explain(kind: str, message: str) -> str:
    return _IN_TOML.get(kind) or message.removeprefix("Value error, ")
