"""Root's part: stage.toml and a uid in, the user's folders on this node's disks out.

``python -I -m stager.prepare --config stage.toml UID``, run by the plugin, or by the site's prolog,
which has it mark the job too (``--job``): the plugin does that itself.
It imports the standard library alone, so that it is fast and that nothing else runs as root; and
it touches the site's own cache roots and nothing that a user named. Where all was made it says so
in a note, by which the plugin knows (prepare.c) that it need not run this again.
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
import stat
import sys
import syslog
import tomllib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: The folder beneath each cache root, and beneath /run for the word; see `stager.store`.
FOLDERS_OF_ROOT = ".slurm-stage"
_RUN, _FOLDER_OF_RUN = "/run", "slurm-stage"
RUN_FOLDER = f"{_RUN}/{_FOLDER_OF_RUN}"
#: Root's marks of the jobs that stage on this node; see `stager.store`.
JOBS = f"{RUN_FOLDER}/jobs"
#: The note beside a user's folder beneath /run, behind the uid.
_NOTE = ".prepared"

T = TypeVar("T")

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeError(Exception):
    """A folder that root will not work in, and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what can be made; 1 where something could not, which syslog then explains."""
    parser = argparse.ArgumentParser(prog="stager.prepare", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--job", type=int, default=0)
    parser.add_argument("uid", type=int)
    options = parser.parse_args(arguments)
    syslog.openlog("slurm-stage", syslog.LOG_PID)

    def complain(text: str) -> None:
        syslog.syslog(syslog.LOG_ERR, text)

    code = prepare(options.config, options.uid, complain)
    if options.job:
        try:
            mark_job(options.job, options.uid)
        except OSError as error:
            complain(f"job {options.job} is not marked: {error}")
            code = 1
    return code


def prepare(config: str, uid: int, complain: Callable[[str], None]) -> int:
    """Make the folders of user ``uid`` beneath every cache root that ``config`` names."""
    code = 0
    whole = True
    try:
        version = _version_of(config)  # before it is read: what is written later is not noted
        places = [(root, FOLDERS_OF_ROOT) for root in read_rules(config).roots]
        gid = group_of(uid)
    except OSError as error:
        complain(f"uid {uid}, {config}: {error.strerror}")
        return 1
    except ValueError as error:
        complain(f"uid {uid}, {config}: {error}")
        return 1
    places.append((_RUN, _FOLDER_OF_RUN))
    for root, folder in places:
        try:
            make_folder(root, folder, uid, gid)
        except FileNotFoundError:
            whole = False  # this node lacks the disk; a job that wants it hears so from its rank
        except (OSError, UnsafeError) as error:
            complain(f"{root}/{folder}: {error}")
            whole, code = False, 1
    if whole:
        with suppress(OSError):  # then all of it is looked at again next time
            _note(uid, [version, *(f"{root}/{folder}" for root, folder in places)])
    return code


def _version_of(config: str) -> str:
    """What differs between any two versions of the file."""
    facts = os.stat(config)
    return f"{facts.st_dev} {facts.st_ino} {facts.st_ctime_ns}"


def _note(uid: int, lines: Sequence[str]) -> None:
    """Leave the lines for the plugin: the version of stage.toml, the folders that users pass."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(_RUN, None) as run, opened(_FOLDER_OF_RUN, run) as parent:
        descriptor = os.open(f"{uid}{_NOTE}", flags, 0o600, dir_fd=parent)
        try:
            # At once: a reader meets all of it, or an empty file that tells it nothing.
            os.write(descriptor, os.fsencode("\n".join(lines) + "\n"))
        finally:
            os.close(descriptor)


def mark_job(job: int, uid: int) -> None:
    """Have what the job uses stay on this node, until `stager.epilog` unmarks it."""
    with (
        opened(_RUN, None) as run,
        _made(run, _FOLDER_OF_RUN, 0o755) as parent,
        _made(parent, os.path.basename(JOBS), 0o711) as jobs,
    ):
        os.fchmod(jobs, 0o711)  # which jobs there are is not for all to list
        os.close(os.open(f"{job}.{uid}", _CREATE, 0o644, dir_fd=jobs))


@dataclass(frozen=True)
class Rules:
    """What of stage.toml concerns root: folders, bytes, and percent of a disk."""

    roots: list[str]
    shared_roots: list[str]
    keep_free: int
    keep_free_percent: float
    headroom: int
    #: Prometheus' file, empty for none.
    textfile: str


def read_rules(config: str) -> Rules:
    """The rules in stage.toml. Raises OSError, or ValueError where they are wrong."""
    with open(config, "rb") as file:
        document = tomllib.load(file)
    if "roots" not in document:
        raise ValueError("roots is missing")
    roots, shared = (_folders(document, key) for key in ("roots", "shared_roots"))
    cache, metrics = (_section(document, name) for name in ("cache", "metrics"))
    textfile = metrics.get("textfile", "")
    if not isinstance(textfile, str) or not (textfile.startswith("/") or textfile == ""):
        raise ValueError("metrics.textfile is not an absolute path")
    keep_free, headroom = (_read(cache, key, byte_size) for key in ("keep_free", "headroom"))
    percent = _read(cache, "keep_free_percent", percentage)
    return Rules(roots, shared, keep_free, percent, headroom, textfile)


def _folders(document: dict[str, Any], key: str) -> list[str]:
    folders: Any = document.get(key, [])
    if not isinstance(folders, list) or not all(
        isinstance(folder, str) and folder.startswith("/") for folder in folders
    ):
        raise ValueError(f"{key} is not a list of absolute paths")
    return folders


def _section(document: dict[str, Any], name: str) -> dict[str, Any]:
    section = document.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{name} is not a table")  # noqa: TRY004 - one kind for the caller
    return section


_UNITS = {
    "": 1, "b": 1,
    **{name: 1000**power for power, name in enumerate("kmgtpe", 1)},
    **{f"{name}b": 1000**power for power, name in enumerate("kmgtpe", 1)},
    **{f"{name}ib": 1024**power for power, name in enumerate("kmgtpe", 1)},
}  # fmt: skip
_BYTES = re.compile(r"\s*(\d*\.?\d+)\s*(\w*)\s*")


def byte_size(value: object) -> int:
    """Bytes of a number, or of a text with a unit. Raises ValueError."""
    if isinstance(value, str) and (found := _BYTES.fullmatch(value)):
        number, unit = found.groups()
        if unit.lower() in _UNITS:
            return int(float(number) * _UNITS[unit.lower()])
    if type(value) is not int or value < 0:
        raise ValueError('must be a number of bytes, or a text such as "10GiB"')
    return value


def percentage(value: object) -> float:
    """A share of a disk. Raises ValueError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 100:
        raise ValueError("must be a number from 0 to less than 100")
    return value


def _read(section: dict[str, Any], key: str, read: Callable[[object], T]) -> T:
    try:
        return read(section.get(key, 0))
    except ValueError as error:
        raise ValueError(f"cache.{key} {error}") from None


def group_of(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        raise ValueError("this node knows no such user") from None


def make_folder(root: str, folder: str, uid: int, gid: int) -> None:
    """Make ``root/folder``, root's, and in it ``uid``, that user's alone.

    Every step goes by descriptors and refuses links, so that nobody who may write in ``root`` can
    lead it elsewhere. Raises OSError, or UnsafeError for a folder that somebody else made.
    """
    with opened(root, None) as base, _made(base, folder, 0o755) as parent:
        facts = os.fstat(parent)
        if facts.st_uid != 0:
            raise UnsafeError(f"made by uid {facts.st_uid}, not by root alone; remove it")
        if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnsafeError("others than root may write in it; remove it")
        os.fchmod(parent, 0o755)  # users pass through it, whatever mask root ran with
        with _made(parent, str(uid), 0o700) as home:
            if os.fstat(home).st_uid == 0 and uid != 0:
                # Still root's own and in root's folder: nobody had a chance to change it.
                os.fchmod(home, 0o700)
                os.fchown(home, uid, gid)
            if os.fstat(home).st_uid != uid:
                raise UnsafeError(f"{uid} belongs to another user; remove it")


@contextmanager
def opened(name: str, folder: int | None) -> Iterator[int]:
    descriptor = os.open(name, _OPEN_FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _made(folder: int, name: str, mode: int) -> Iterator[int]:
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
    with opened(name, folder) as descriptor:
        yield descriptor


if __name__ == "__main__":
    sys.exit(main())
