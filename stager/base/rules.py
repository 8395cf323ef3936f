"""Read what root needs of stage.toml, with the standard library alone.

`stager.request.policy` reads the whole of it for users, by the same functions for single values.
"""

from __future__ import annotations

import pwd
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True)
class SharedFs:
    """How a job gets a filesystem of its nodes' disks."""

    #: The program that starts and stops it on each node.
    driver: str
    #: A folder on a disk of each node, beneath which the jobs' data is.
    folder: str
    #: The folder in which the jobs' filesystems are mounted.
    mount: str
    #: Whether the driver runs as the job's user; else as root.
    user: bool = True


@dataclass(frozen=True)
class Rules:
    """What root needs of stage.toml: folders, and amounts of a disk."""

    #: Without those that come and go with a job or a user: root touches nothing there. With the
    #: ``store``.
    roots: list[str]
    shared_roots: list[str]
    keep_free: Amount
    headroom: Amount
    #: The file for Prometheus; empty for none.
    textfile: str
    #: The uid of the account that stages beneath ``shared_roots``; 0 for none, as root does not.
    shared_owner: int = 0
    #: Whether what becomes of copies is told in the system log.
    syslog: bool = True
    #: The folder that keeps copies behind the folders of jobs, empty for none; and the most that
    #: those of all users take there, 0 for no limit.
    store: str = ""
    store_size: Amount = 0
    #: Those of ``roots`` beneath which users may stage: mostly all but the store.
    open_roots: list[str] = field(default_factory=list)
    #: None where jobs get no filesystem of their nodes' disks.
    shared_fs: SharedFs | None = None


def read_rules(config: str) -> Rules:
    """Return the rules in stage.toml. Raise OSError if it cannot be read, ValueError if wrong."""
    import tomllib  # slow to import, and ranks import this module

    with open(config, "rb") as file:
        document = tomllib.load(file)
    if "roots" not in document:
        raise ValueError("roots is missing")
    names = ("cache", "metrics", "report", "shared")
    cache, metrics, report, shared = (_section(document, name) for name in names)
    store = _read(cache, "store", "", store_path)
    open_roots = _lasting(document["roots"])
    shared_roots = _folders(shared, "roots", "shared.roots")
    owner = shared_owner(shared.get("owner", ""))
    if shared_roots and not owner:
        raise ValueError("shared.roots has no shared.owner")
    textfile = metrics.get("textfile", "")
    if not isinstance(textfile, str) or not (textfile.startswith("/") or textfile == ""):
        raise ValueError("metrics.textfile is not an absolute path")
    keep_free = _read(cache, "keep_free", KEEP_FREE, disk_amount)
    headroom = _read(cache, "headroom", 0, disk_amount)
    size = _read(cache, "size", 0, disk_amount)
    syslog = report.get("syslog", True)
    if not isinstance(syslog, bool):
        raise ValueError("report.syslog is neither true nor false")  # noqa: TRY004
    return Rules(
        with_store(open_roots, store), shared_roots, keep_free, headroom, textfile, owner, syslog,
        store, size, open_roots, _shared_fs(_section(document, "shared_fs")),
    )  # fmt: skip


def fault_text(config: str, error: OSError | ValueError) -> str:
    """Return what is wrong with stage.toml, by an error of `read_rules`, and what to do."""
    if isinstance(error, OSError):
        return f"{config}: {error.strerror}; restore it, or correct config= in plugstack.conf"
    return f"{config}: {error}; correct it"


def shared_owner(name: object) -> int:
    """Return the uid of the account that stages for all users, 0 for an empty name.

    Raise ValueError if this node does not know it, or if it is root.
    """
    if name == "":
        return 0
    try:
        uid = pwd.getpwnam(str(name)).pw_uid
    except KeyError:
        raise ValueError(
            f"this node knows no user {name!r}; create the account, or correct the name"
        ) from None
    if uid == 0:
        raise ValueError("must not be root, which cannot stage; name an unprivileged account")
    return uid


def _shared_fs(section: dict[str, Any]) -> SharedFs | None:
    names = ("driver", "folder", "mount")
    paths = {name: section[name] for name in names if section.get(name, "") != ""}
    for name, path in paths.items():
        if not isinstance(path, str) or not path.startswith("/") or not path.strip("/"):
            raise ValueError(f"shared_fs.{name} is not an absolute path")
    if not paths:
        return None
    if missing := [name for name in names if name not in paths]:
        raise ValueError(f"shared_fs.{missing[0]} is missing")
    user = section.get("user", True)
    if not isinstance(user, bool):
        raise ValueError("shared_fs.user is neither true nor false")  # noqa: TRY004
    return SharedFs(**paths, user=user)


def _lasting(roots: object) -> list[str]:
    """Return the paths of those roots that are the same for all jobs and users."""
    tables = roots if isinstance(roots, list) else [None]
    places = [one if isinstance(one, dict) else {"path": one} for one in tables]
    paths = _folders({"roots": [one.get("path") for one in places]}, "roots", "roots")
    return [
        path.replace("%%", "%")
        for path, place in zip(paths, places, strict=True)
        if "%" not in path.replace("%%", "") and not place.get("private")
    ]


def _folders(section: dict[str, Any], key: str, name: str) -> list[str]:
    folders: Any = section.get(key, [])
    if not isinstance(folders, list) or not all(
        isinstance(folder, str) and folder.startswith("/") and folder.strip("/")
        for folder in folders
    ):
        raise ValueError(f"{name} is not a list of absolute paths")
    return folders


def _section(document: dict[str, Any], name: str) -> dict[str, Any]:
    section = document.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{name} is not a table")  # noqa: TRY004 - callers catch one type
    return section


_UNITS = {
    "": 1, "b": 1,
    **{name: 1000**power for power, name in enumerate("kmgtpe", 1)},
    **{f"{name}b": 1000**power for power, name in enumerate("kmgtpe", 1)},
    **{f"{name}ib": 1024**power for power, name in enumerate("kmgtpe", 1)},
}  # fmt: skip
#: What a stage leaves free of each disk, if stage.toml does not say.
KEEP_FREE = "5%"
_PERCENT = re.compile(r"\d{1,2}(\.\d+)?%", re.ASCII)
_BYTES = re.compile(r"\s*(\d*\.?\d+)\s*(\w*)\s*")


def byte_size(value: object) -> int:
    """Return the bytes of a number, or of a text with a unit. Raise ValueError."""
    if isinstance(value, str) and (found := _BYTES.fullmatch(value)):
        number, unit = found.groups()
        if unit.lower() in _UNITS:
            return int(float(number) * _UNITS[unit.lower()])
    if type(value) is not int or value < 0:
        raise ValueError('must be a number of bytes, or a text such as "10GiB"')
    return value


def disk_amount(value: object) -> Amount:
    """Return an amount of a disk, in bytes or, as text, in percent. Raise ValueError."""
    if isinstance(value, str) and _PERCENT.fullmatch(value):
        return value
    try:
        return byte_size(value)
    except ValueError as error:
        raise ValueError(f'{error}, or percent of a disk such as "5%"') from None


def store_path(value: object) -> str:
    """Return the path of the store, empty for none. Raise ValueError."""
    if value == "":
        return ""
    plain = isinstance(value, str) and value.startswith("/") and "%" not in value
    if not plain or any(part in ("", ".", "..") for part in str(value)[1:].split("/")):
        raise ValueError(
            "must be \"\", or an absolute path without '%', '.', '..' or a '/' at its end: the "
            "folder is the same for all jobs and users"
        )
    return str(value)


def with_store(roots: list[str], store: str) -> list[str]:
    """Return the roots and the store, each once."""
    return roots if not store or store in roots else [*roots, store]


def _read(section: dict[str, Any], key: str, default: object, value_of: Callable[[object], T]) -> T:
    try:
        return value_of(section.get(key, default))
    except ValueError as error:
        raise ValueError(f"cache.{key} {error}") from None


#: Bytes, or a text such as ``5%``: of each disk.
Amount = int | str


def amount_of(amount: Amount, disk: int) -> int:
    """Return the bytes that ``amount`` means on a disk of ``disk`` bytes.

    >>> amount_of(50, 1000), amount_of("2.5%", 1000)
    (50, 25)
    """
    return int(disk * float(amount[:-1]) / 100) if isinstance(amount, str) else amount
