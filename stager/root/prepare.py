"""Root's part: stage.toml and a uid in, the user's folders on this node's disks out.

``python -I -m stager.root.prepare --config stage.toml UID``, run by the plugin or a site prolog,
which has it mark the job too (``--job``): the plugin does that itself.
It imports the standard library alone, so that it is fast and that nothing else runs as root; and
it touches the site's own cache roots and nothing that a user named. Where all was made it says so
in a note, by which the plugin knows (prepare.c) that it need not run this again.
"""

from __future__ import annotations

import argparse
import os
import sys
import syslog
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base import paths
from stager.root.folders import UnsafeError, group_of, made, make_folder, opened
from stager.root.rules import read_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The note beside a user's folder beneath /run, behind the uid.
_NOTE = ".prepared"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what can be made; 1 where something could not, which syslog then explains."""
    parser = argparse.ArgumentParser(prog="stager.root.prepare", description=__doc__)
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
        places = [(root, paths.RECORDS_FOLDER) for root in read_rules(config).roots]
        gid = group_of(uid)
    except OSError as error:
        complain(f"uid {uid}, {config}: {error.strerror}")
        return 1
    except ValueError as error:
        complain(f"uid {uid}, {config}: {error}")
        return 1
    places.append((paths.RUN, paths.RUN_NAME))
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
    with opened(paths.RUN, None) as run, opened(paths.RUN_NAME, run) as parent:
        descriptor = os.open(f"{uid}{_NOTE}", flags, 0o600, dir_fd=parent)
        try:
            # At once: a reader meets all of it, or an empty file that tells it nothing.
            os.write(descriptor, os.fsencode("\n".join(lines) + "\n"))
        finally:
            os.close(descriptor)


def mark_job(job: int, uid: int) -> None:
    """Have what the job uses stay on this node, until `stager.root.epilog` unmarks it."""
    with (
        opened(paths.RUN, None) as run,
        made(run, paths.RUN_NAME, 0o755) as parent,
        made(parent, os.path.basename(paths.JOBS_FOLDER), 0o711) as jobs,
    ):
        os.fchmod(jobs, 0o711)  # which jobs there are is not for all to list
        os.close(os.open(f"{job}.{uid}", _CREATE, 0o644, dir_fd=jobs))


if __name__ == "__main__":
    sys.exit(main())
