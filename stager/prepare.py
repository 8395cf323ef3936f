"""Root's part: stage.toml and a uid in, the user's folders on this node's disks out.

``python -I -m stager.prepare --config stage.toml UID``, run by the plugin or by the site's prolog.
It imports the standard library alone, so that it is fast and that nothing else runs as root; and
it touches the site's own cache roots and nothing that a user named. Where all was made it says so
in a note, by which the plugin knows (prepare.c) that it need not run this again.
"""

from __future__ import annotations

import argparse
import os
import pwd
import stat
import sys
import syslog
import tomllib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: The folder beneath each cache root, and beneath /run for the word; see `stager.store`.
_FOLDERS_OF_ROOT = ".slurm-stage"
_RUN, _FOLDER_OF_RUN = "/run", "slurm-stage"
#: The note beside a user's folder beneath /run, behind the uid.
_NOTE = ".prepared"

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafeError(Exception):
    """A folder that root will not work in, and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what can be made; 1 where something could not, which syslog then explains."""
    parser = argparse.ArgumentParser(prog="stager.prepare", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("uid", type=int)
    options = parser.parse_args(arguments)
    syslog.openlog("slurm-stage", syslog.LOG_PID)
    return prepare(options.config, options.uid, lambda text: syslog.syslog(syslog.LOG_ERR, text))


def prepare(config: str, uid: int, complain: Callable[[str], None]) -> int:
    """Make the folders of user ``uid`` beneath every cache root that ``config`` names."""
    code = 0
    whole = True
    try:
        version = _version_of(config)  # before it is read: what is written later is not noted
        places = [(root, _FOLDERS_OF_ROOT) for root in read_roots(config)]
        gid = _group_of(uid)
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
    with _opened(_RUN, None) as run, _opened(_FOLDER_OF_RUN, run) as parent:
        descriptor = os.open(f"{uid}{_NOTE}", flags, 0o600, dir_fd=parent)
        try:
            # At once: a reader meets all of it, or an empty file that tells it nothing.
            os.write(descriptor, os.fsencode("\n".join(lines) + "\n"))
        finally:
            os.close(descriptor)


def read_roots(config: str) -> list[str]:
    """The ``roots`` of stage.toml. Raises OSError, or ValueError where they are wrong."""
    with open(config, "rb") as file:
        document = tomllib.load(file)
    if "roots" not in document:
        raise ValueError("roots is missing")
    roots: Any = document["roots"]
    if not isinstance(roots, list) or not all(
        isinstance(root, str) and root.startswith("/") for root in roots
    ):
        raise ValueError("roots is not a list of absolute paths")
    return roots


def _group_of(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        raise ValueError("this node knows no such user") from None


def make_folder(root: str, folder: str, uid: int, gid: int) -> None:
    """Make ``root/folder``, root's, and in it ``uid``, that user's alone.

    Every step goes by descriptors and refuses links, so that nobody who may write in ``root`` can
    lead it elsewhere. Raises OSError, or UnsafeError for a folder that somebody else made.
    """
    with _opened(root, None) as base, _made(base, folder, 0o755) as parent:
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
def _opened(name: str, folder: int | None) -> Iterator[int]:
    descriptor = os.open(name, _OPEN_FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _made(folder: int, name: str, mode: int) -> Iterator[int]:
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
    with _opened(name, folder) as descriptor:
        yield descriptor


if __name__ == "__main__":
    sys.exit(main())
