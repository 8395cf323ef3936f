"""Clean up on one node after a job has ended, as root.

The plugin or a site's Epilog runs ``python -I -m stager.root.epilog --config stage.toml JOB UID``.
It removes the job's mark, has `stager.copies.tidy` remove what the job left at paths that users
named, makes room and keeps figures. It imports the standard library alone. Root works in its own
folders only, by descriptors that follow no link. What comes from users is numbers, or is ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import select
import signal
import subprocess
import sys
import syslog
import time
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from stager.base import paths
from stager.root.folders import opened
from stager.root.headroom import make_headroom
from stager.root.metrics import _MOST_SAID, FIGURES, keep_figures, read_figures
from stager.root.rules import Rules, read_rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Seconds for all of it, and for one user's part: Slurm keeps the node waiting meanwhile.
_LIMIT, _USER_LIMIT = 50, 10
#: Most names in a user's folder that are looked at as those of one job.
_MOST_NAMES = 100_000
#: The group of nobody, in which a user may be who has left.
_NOGROUP = 65534
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Clean up after the job; 1 where something could not be done, which syslog then explains."""
    parser = argparse.ArgumentParser(prog="stager.root.epilog", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("job", type=int)
    parser.add_argument("uid", type=int)
    options = parser.parse_args(arguments)
    syslog.openlog("slurm-stage", syslog.LOG_PID)
    signal.signal(signal.SIGALRM, _be_late)
    signal.alarm(_LIMIT)
    try:
        Epilog(options.config, options.job, options.uid).run()
    except (OSError, ValueError) as error:
        syslog.syslog(syslog.LOG_ERR, f"after job {options.job}: {error}")
        return 1
    finally:
        signal.alarm(0)
    return 0


def _be_late(*_: object) -> None:
    raise TimeoutError(f"not done after {_LIMIT} s")


class Epilog:
    """One job's end on this node. Raises OSError, or ValueError where stage.toml is wrong."""

    def __init__(self, config: str, job: int, uid: int) -> None:
        self._config = config
        self._job = job
        self._uid = uid

    def run(self) -> None:
        """First what nobody may prevent: the job holds nothing any longer."""
        with suppress(FileNotFoundError):
            os.unlink(f"{paths.JOBS_FOLDER}/{self._job}.{self._uid}")
        rules = read_rules(self._config)
        gains = dict.fromkeys(FIGURES, 0.0)
        usage: dict[str, Any] = {}
        # A folder of the user's own, whatever he may have done to it.
        with suppress(OSError), self._words() as words:
            names = self._names_of_job(words)
            if f"{self._job}.uses" in names:
                usage = self._ask(self._uid, ["--job", str(self._job)], rules)
            if f"{self._job}.figures" in names:
                gains = read_figures(words, f"{self._job}.figures")
            for name in names:
                with suppress(OSError):  # a folder that the user made there is his own
                    os.unlink(name, dir_fd=words)
        if rules.textfile:
            keep_figures(rules, gains, self._uid, usage)
        gone = make_headroom(rules, self._ask)
        if rules.textfile and gone:
            evictions = {**dict.fromkeys(FIGURES, 0.0), "evictions": float(gone)}
            keep_figures(rules, evictions, self._uid, {})

    @contextmanager
    def _words(self) -> Iterator[int]:
        with opened(paths.RUN_FOLDER, None) as run, opened(str(self._uid), run) as words:
            yield words

    def _names_of_job(self, words: int) -> list[str]:
        with os.scandir(words) as entries:
            names = (entry.name for entry in entries)
            mine = (name for name in names if name.partition(".")[0] == str(self._job))
            return list(islice(mine, _MOST_NAMES))

    def _ask(self, uid: int, options: Sequence[str], rules: Rules) -> dict[str, Any]:
        """Return the answer of `stager.copies.tidy`, run as the user; nothing if it fails."""
        command = [
            sys.executable,
            "-I",
            "-m",
            "stager.copies.tidy",
            "--config",
            self._config,
            *options,
        ]
        if rules.textfile:
            command.append("--usage")
        try:
            said = json.loads(run_as(uid, *groups_of(uid), command))
        except TimeoutError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            syslog.syslog(syslog.LOG_WARNING, f"uid {uid}: {error}")
            return {}
        return said if isinstance(said, dict) else {}


def groups_of(uid: int) -> tuple[int, list[int]]:
    """The user's group, and all that he is in; nobody's for one who has left."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return _NOGROUP, []
    return user.pw_gid, os.getgrouplist(user.pw_name, user.pw_gid)


def run_as(uid: int, gid: int, groups: Sequence[int], command: Sequence[str]) -> bytes:
    """The output of ``command`` run as that user; what is late or too long is cut off.

    Raises OSError.
    """
    deadline = time.monotonic() + _USER_LIMIT
    said = b""
    with subprocess.Popen(
        command, user=uid, group=gid, extra_groups=groups, env=_ENVIRONMENT, cwd="/", umask=0o077,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            while len(said) < _MOST_SAID:
                left = deadline - time.monotonic()
                ready, _, _ = select.select([process.stdout], [], [], max(0.0, left))
                block = os.read(process.stdout.fileno(), 65536) if ready else b""
                if not block:
                    break
                said += block
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return said


if __name__ == "__main__":
    sys.exit(main())
