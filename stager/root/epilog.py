"""Clean up on one node after a job has ended, as root.

The plugin or a site's Epilog runs ``python -I -m stager.root.epilog --config stage.toml JOB UID``.
It removes the job's mark, runs `stager.copies.tidy` as the user to remove what the job left at
paths that users named, makes headroom and counts figures. Root works in its own folders only, by
descriptors that follow no link. Of what users' programs answer, it takes numbers alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import syslog
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from stager.base import paths
from stager.root.as_user import groups_of, run_as
from stager.root.folders import opened
from stager.root.headroom import make_headroom
from stager.root.metrics import FIGURES, keep_figures, read_figures
from stager.root.rules import Rules, read_rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Seconds for all of it: Slurm keeps the node waiting meanwhile.
_TIME_LIMIT = 50
#: Files of one job that are looked at in its user's folder.
_NAME_LIMIT = 100_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Clean up after the job. Return 1 if that failed, which syslog then explains."""
    parser = argparse.ArgumentParser(prog="stager.root.epilog", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("job", type=int)
    parser.add_argument("uid", type=int)
    options = parser.parse_args(arguments)
    syslog.openlog("slurm-stage", syslog.LOG_PID)
    signal.signal(signal.SIGALRM, _raise_late)
    signal.alarm(_TIME_LIMIT)
    try:
        Epilog(options.config, options.job, options.uid).run()
    except _LateError:
        syslog.syslog(
            syslog.LOG_ERR,
            f"cleaning up after job {options.job} was stopped after {_TIME_LIMIT} s; look for a "
            "disk or a user's filesystem that does not answer",
        )
        return 1
    except (OSError, ValueError) as error:
        syslog.syslog(syslog.LOG_ERR, f"cleaning up after job {options.job} failed: {error}")
        return 1
    finally:
        signal.alarm(0)
    return 0


class _LateError(Exception):
    """The time is up. No OSError, so that nothing on the way takes it for one of a disk."""


def _raise_late(*_: object) -> None:
    raise _LateError


class Epilog:
    """The end of one job on this node. Raise OSError, or ValueError if stage.toml is wrong."""

    def __init__(self, config: str, job: int, uid: int) -> None:
        self._config = config
        self._job = job
        self._uid = uid

    def run(self) -> None:
        """Do all of it, and first what no user can prevent: release what the job used."""
        with suppress(FileNotFoundError):
            os.unlink(f"{paths.JOBS_FOLDER}/{self._job}.{self._uid}")
        rules = read_rules(self._config)
        gains = dict.fromkeys(FIGURES, 0.0)
        usage: dict[str, Any] = {}
        # The folder belongs to the user, who may have put anything into it.
        with suppress(OSError), self._user_folder() as folder:
            names = self._names_of_job(folder)
            if f"{self._job}.uses" in names:
                usage = self._ask(self._uid, ["--job", str(self._job)], rules)
            if f"{self._job}.figures" in names:
                gains = read_figures(folder, f"{self._job}.figures")
            for name in names:
                with suppress(OSError):  # a folder that the user made there may stay
                    os.unlink(name, dir_fd=folder)
        if rules.textfile:
            keep_figures(rules, gains, self._uid, usage)
        gone = make_headroom(rules, self._ask)
        if rules.textfile and gone:
            evictions = {**dict.fromkeys(FIGURES, 0.0), "evictions": float(gone)}
            keep_figures(rules, evictions, self._uid, {})

    @contextmanager
    def _user_folder(self) -> Iterator[int]:
        with opened(paths.RUN_FOLDER) as run, opened(str(self._uid), run) as folder:
            yield folder

    def _names_of_job(self, folder: int) -> list[str]:
        with os.scandir(folder) as entries:
            names = (entry.name for entry in entries)
            mine = (name for name in names if name.partition(".")[0] == str(self._job))
            return list(islice(mine, _NAME_LIMIT))

    def _ask(self, uid: int, options: Sequence[str], rules: Rules) -> dict[str, Any]:
        """Run `stager.copies.tidy` as the user. Return its answer, or nothing if it fails."""
        command = [sys.executable, "-I", "-m", "stager.copies.tidy"]
        command += ["--config", self._config, *options]
        if rules.textfile:
            command.append("--usage")
        try:
            answer = json.loads(run_as(uid, *groups_of(uid), command))
        except (OSError, ValueError, RecursionError) as error:
            syslog.syslog(
                syslog.LOG_WARNING,
                f"the clean-up as uid {uid} failed or gave no answer in time: {error}; look for a "
                "filesystem of that user that does not answer",
            )
            return {}
        return answer if isinstance(answer, dict) else {}


if __name__ == "__main__":
    sys.exit(main())
