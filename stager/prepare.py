"""Root's part: stage.toml and a uid in, the user's folders on this node's disks out.

``python -I -m stager.prepare --config stage.toml UID``, run by the plugin or by the site's prolog.
It imports the standard library alone, so that it is fast and that nothing else runs as root; and
it touches the site's own cache roots and nothing that a user named.
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
    try:
        places = [(root, _FOLDERS_OF_ROOT) for root in read_roots(config)]
        gid = _group_of(uid)
    except OSError as error:
        complain(f"uid {uid}, {config}: {error.strerror}")
        return 1
    except ValueError as error:
        complain(f"uid {uid}, {config}: {error}")
        return 1
    for root, folder in [*places, (_RUN, _FOLDER_OF_RUN)]:
        try:
            make_folder(root, folder, uid, gid)
        except FileNotFoundError:
            pass  # this node lacks the disk; a job that wants it hears so from its rank
        except (OSError, UnsafeError) as error:
            complain(f"{root}/{folder}: {error}")
            code = 1
    return code


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
