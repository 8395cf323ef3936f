"""Make root's folders on the disks of this node, and a user's in them before a job, as root.

The plugin or a site's prolog runs ``python -I -m stager.node.prolog --config stage.toml UID``; as
slurmd starts, the plugin runs it without UID, so that no user takes the names. A prolog adds
``--job JOB`` to mark the job and to make the user's room beneath /run; the plugin does that itself.
``--shared NODE NODES`` starts the filesystem of the job's disks on this node, one of the nodes in
Slurm's list, for a job that asks for it (`shared_fs`).
Root touches only the site's cache roots, and no path that a user named. When everything is made, a
note beneath /run tells the plugin (prepare.c) not to run this again.

After a boot, what was being written when the node went down is removed for all users: a user's own
next stage on the node removes it too, but there may never be one. Each user's `stager.node.tidy`
removes that user's files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import syslog
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.base import paths
from stager.base.rules import fault_text, read_rules
from stager.base.users import users_of
from stager.node.folders import (
    REPLACE_FILE,
    UnsafeError,
    group_of,
    made,
    make_folder,
    make_store,
    opened,
    replace_file,
)
from stager.node.runtime import begin_job
from stager.node.shared_fs import start, stop_leftovers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stager.base.rules import Rules
    from stager.node.headroom import Ask

#: Seconds after one job in which users are asked, others after the next one; and for one answer.
_LIMIT = 2.0
#: How often a user is asked who does not answer in time: there may be much to remove.
_TRIES = 5
#: The file with the users who are still to be asked, and how often. It is gone after a boot.
_WAITING = "after-boot.json"


def remove_unfinished(rules: Rules, ask: Ask, done: int) -> None:
    """Ask those users who have not answered since the boot, but for the uid ``done``.

    Raise OSError.
    """
    path = f"{paths.RUN_FOLDER}/{_WAITING}"
    before = _waiting(path)
    waiting = dict.fromkeys(_users(rules), _TRIES) if before is None else dict(before)
    waiting.pop(str(done), None)
    deadline = time.monotonic() + _LIMIT
    for uid in list(waiting):
        if time.monotonic() >= deadline:
            break
        tries = waiting.pop(uid) - 1
        if ask(int(uid), [], rules, _LIMIT) is None and tries:
            waiting[uid] = tries
    if waiting != before:
        replace_file(path, json.dumps(waiting), 0o600)


def _users(rules: Rules) -> list[str]:
    roots = (*rules.roots, *rules.shared_roots)
    return [str(uid) for uid in sorted({uid for root in roots for uid in users_of(root)})]


def _waiting(path: str) -> dict[str, int] | None:
    """Return the users whom earlier clean-ups left, and tries; None if none was since the boot."""
    with suppress(OSError, ValueError), open(path, "rb") as file:
        waiting: dict[str, int] = json.load(file)
        return waiting
    return None


#: Seconds after which nothing more is stopped of what jobs left.
_LEFTOVERS_LIMIT = 5.0
#: The suffix of the note's name after the uid.
_NOTE = ".prepared"


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the folders. Return 1 if one could not be made, which syslog then explains."""
    parser = argparse.ArgumentParser(prog="stager.node.prolog", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--job", type=int, default=0)
    parser.add_argument("--shared", nargs=2, metavar=("NODE", "NODES"))
    parser.add_argument("uid", type=int, nargs="?")
    options = parser.parse_args(arguments)
    syslog.openlog("slurm-stage", syslog.LOG_PID)

    def complain(text: str) -> None:
        syslog.syslog(syslog.LOG_ERR, text)

    code = prepare(options.config, options.uid, complain)
    if options.job and options.uid is not None:
        try:
            begin_job(options.job, options.uid, group_of(options.uid))
        except (OSError, ValueError) as error:
            complain(f"job {options.job} cannot be marked: {error}")
            return 1
    return max(code, share(options, complain))


def share(options: argparse.Namespace, complain: Callable[[str], None]) -> int:
    """Start what the job asks for, and before any job stop what is left. Return 1 if that failed.

    The job's own ranks tell its user that the filesystem does not start.
    """
    try:
        site = read_rules(options.config).shared_fs
        if options.uid is None:
            stop_leftovers(site, _LEFTOVERS_LIMIT)
        elif options.job and options.shared:
            start(site, options.job, options.uid, *options.shared)
    except (OSError, ValueError) as error:
        complain(f"no filesystem of job {options.job}'s disks: {error}")
        return 1
    return 0


def prepare(config: str, uid: int | None, complain: Callable[[str], None]) -> int:
    """Make root's folder, and user ``uid``'s in it, beneath each root. Return 1 if that failed."""
    code = 0
    whole = True
    whose = "" if uid is None else f" for uid {uid}"
    try:
        version = _version_of(config)  # before it is read, so that a later change differs
        rules = read_rules(config)
    except (OSError, ValueError) as error:
        complain(f"no folders were made{whose}: {fault_text(config, error)}")
        return 1
    try:
        gid = 0 if uid is None else group_of(uid)
    except ValueError as error:
        complain(f"no folders were made{whose}: {error}")
        return 1
    roots = [*rules.roots, *(rules.shared_roots if uid in (None, rules.shared_owner) else ())]
    for root in roots:
        try:
            if root not in (*rules.open_roots, *rules.shared_roots):
                make_store(root)
            if moved := make_folder(root, paths.RECORDS_FOLDER, uid, gid):
                complain(moved)
        except FileNotFoundError:
            whole = False  # this node does not have the disk; its rank tells a job that needs it
        except (OSError, UnsafeError) as error:
            where = "" if isinstance(error, UnsafeError) else f"{root}/{paths.RECORDS_FOLDER}: "
            complain(f"{where}{error}")
            whole, code = False, 1
    if whole and uid is not None:
        with suppress(OSError):  # without the note, this runs again for the next job
            _note(uid, [version, *(f"{root}/{paths.RECORDS_FOLDER}" for root in roots)])
    return code


def _version_of(config: str) -> str:
    """Return a text that differs between any two versions of the file."""
    facts = os.stat(config)
    return f"{facts.st_dev} {facts.st_ino} {facts.st_ctime_ns}"


def _note(uid: int, lines: Sequence[str]) -> None:
    """Write the note for the plugin: the version of stage.toml, and the parents of all folders."""
    with (
        opened(paths.RUN) as run,
        made(run, paths.RUN_NAME, 0o755) as parent,
        opened(f"{uid}{_NOTE}", parent, flags=REPLACE_FILE) as note,
    ):
        # One write: a reader finds all of it, or an empty file, which is no note.
        os.write(note, os.fsencode("\n".join(lines) + "\n"))


if __name__ == "__main__":
    sys.exit(main())
