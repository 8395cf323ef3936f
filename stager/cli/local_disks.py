"""Make the folders that are the disks of simulated nodes, where nobody else can replace them.

The folder that they are made in may be the current one, in which any user may have put links.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from itertools import accumulate

from stager.base.errors import UsageError
from stager.fs.files import name_of, who_could_replace

_REMEDY = "choose another --local-root"


def make_disk(root: str, disk: str) -> None:
    """Make the folder ``disk`` beneath ``root``, both absolute paths, for this user alone.

    Links above ``root`` are followed if they are root's or this user's. Raise UsageError.
    """
    above = os.path.dirname(root)
    try:
        for path in _steps(above):
            _check(path)
        # What is checked first cannot be replaced by others while the rest is.
        above = os.path.realpath(above)
        for path in _steps(f"{above}/{os.path.basename(root)}{disk}"):
            if not os.path.lexists(path):
                os.mkdir(path, 0o700)
            if len(path) > len(above) and os.path.islink(path):
                raise UsageError(f"{path} is a symbolic link, which is not followed; {_REMEDY}")
            _check(path)
    except OSError as error:
        raise UsageError(f"{root}{disk}: {error.strerror}; {_REMEDY}") from None


def _steps(path: str) -> list[str]:
    """Return ``path`` and all folders above it, those first."""
    return [*accumulate(["/", *filter(None, path.split("/"))], os.path.join)]


def _check(path: str) -> None:
    """Raise UsageError if others could replace what is in the folder ``path``, or the link itself.

    Return if it is missing.
    """
    # In a container of the user's, what is root's may belong to another uid.
    owners = {0, os.getuid(), os.stat("/").st_uid}
    with suppress(FileNotFoundError):
        facts = os.lstat(path)
        who = "" if facts.st_uid in owners else name_of(facts.st_uid)
        if not who and (not stat.S_ISLNK(facts.st_mode) or os.path.isdir(path)):
            there = os.stat(path)
            # Who works in a folder of a group's trusts the group; root does not.
            if os.getuid() == 0 or there.st_uid not in owners or there.st_mode & stat.S_IWOTH:
                who = who_could_replace(there, owners)
        if who:
            raise UsageError(f"{path or '/'}: {who} could replace what is in it; {_REMEDY}")
