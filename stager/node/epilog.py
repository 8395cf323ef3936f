"""Clean up on one node after a job has ended, as root.

The plugin or a site's Epilog runs ``python -I -m stager.node.epilog --config stage.toml JOB UID``.
It removes the job's mark, stops the filesystem of its disks, runs `stager.node.tidy` as the user to
remove what the job left, makes headroom, removes what was left at the last boot, keeps figures, and
removes the rooms of users without a job. Root works in its own folders only, by descriptors that
follow no link. Of what users' programs answer, it takes numbers alone, and waits for them for a
limited time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import syslog
from typing import TYPE_CHECKING, Any

from stager.base import paths
from stager.base.rules import Rules, fault_text, read_rules
from stager.node.as_user import groups_of, run_as
from stager.node.folders import locked
from stager.node.headroom import make_headroom
from stager.node.metrics import keep_figures, read_figures
from stager.node.prolog import remove_unfinished
from stager.node.runtime import end_job, forget_job, remove_rooms
from stager.node.shared_fs import stop, stop_leftovers

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds for all of it: Slurm keeps the node waiting meanwhile. It takes a second more if a
#: user's process cannot be killed. The plugin's own limit in stage.h is longer.
_TIME_LIMIT = 40
#: Seconds for the clean-up as the job's user.
_USER_LIMIT = 10.0
#: Seconds after which nothing more is stopped of what other jobs left.
_LEFTOVERS_LIMIT = 1.0
#: Seconds to wait for an earlier clean-up of the same user.
_EARLIER_LIMIT = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Clean up after the job. Return 1 if that failed, which syslog then explains."""
    parser = argparse.ArgumentParser(prog="stager.node.epilog", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("job", type=int)
    parser.add_argument("uid", type=int)
    options = parser.parse_args(arguments)
    syslog.openlog("slurm-stage", syslog.LOG_PID)
    signal.signal(signal.SIGALRM, _raise_late)
    # Again every second, as Python swallows what is raised where an object is deleted.
    signal.setitimer(signal.ITIMER_REAL, _TIME_LIMIT, 1)
    try:
        Epilog(options.config, options.job, options.uid).run()
    except _LateError:
        signal.setitimer(signal.ITIMER_REAL, 0)
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
        signal.setitimer(signal.ITIMER_REAL, 0)
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
        #: What the copies of each user take now, as far as users were asked (`metrics`).
        self._usage: dict[int, dict[str, Any]] = {}

    def run(self) -> None:
        """Do all of it, and first what no user can prevent: release what the job used."""
        seconds = end_job(self._job, self._uid)
        try:
            stop(self._job)
            self._clean_up(self._rules(), seconds)
        finally:
            forget_job(self._job, self._uid)
            remove_rooms()

    def _rules(self) -> Rules:
        """Return the site's rules. If they cannot be read, the job's own files go all the same."""
        try:
            return read_rules(self._config)
        except (OSError, ValueError) as error:
            self._ask_about_job(None)
            raise ValueError(fault_text(self._config, error)) from None

    def _clean_up(self, rules: Rules, seconds: float) -> None:
        answer = self._ask_about_job(rules) or {}
        figures = read_figures(answer.get("figures"), seconds)
        try:
            figures["evictions"] += make_headroom(rules, self._ask)
            remove_unfinished(rules, self._ask, self._uid)
            stop_leftovers(rules.shared_fs, _LEFTOVERS_LIMIT)
        finally:
            if rules.textfile:
                self._keep(figures, rules)

    def _ask_about_job(self, rules: Rules | None) -> dict[str, Any] | None:
        return self._ask(self._uid, ["--job", str(self._job)], rules, _USER_LIMIT)

    def _keep(self, figures: dict[str, float], rules: Rules) -> None:
        """Keep the figures for metrics. That they cannot be kept is logged, and stops nothing."""
        try:
            keep_figures(rules, figures, self._usage)
        except OSError as error:
            folder = os.path.dirname(rules.textfile)
            why = str(error) if os.path.isdir(folder) else f"folder {folder} is missing: make it"
            syslog.syslog(syslog.LOG_ERR, f"metrics.textfile: {why}")

    def _ask(
        self, uid: int, options: Sequence[str], rules: Rules | None, limit: float
    ) -> dict[str, Any] | None:
        """Run `stager.node.tidy` as the user. Return its answer, or None if it has none.

        Without ``rules``, as stage.toml is wrong, only the files of a job that ended are removed:
        they would say that it still uses its copies.
        """
        command = [sys.executable, "-I", "-m", "stager.node.tidy", *options]
        if rules:
            command += ["--config", self._config, *(["--usage"] if rules.textfile else [])]
        try:
            # One that waits for a dead filesystem cannot be killed: there must not be more of them.
            with locked(f"{paths.RUN_FOLDER}/{uid}.tidy", _EARLIER_LIMIT) as lock:
                answer = json.loads(run_as(uid, *groups_of(uid), command, limit, lock))
        except (OSError, ValueError, RecursionError) as error:
            syslog.syslog(
                syslog.LOG_WARNING,
                f"the clean-up as uid {uid} failed or gave no answer in time: {error}; it is done "
                "after that user's next job here; look for a filesystem of that user that does "
                "not answer",
            )
            return None
        if not isinstance(answer, dict):
            return None
        if isinstance(answer.get("usage"), dict):
            self._usage[uid] = answer["usage"]
        return answer


if __name__ == "__main__":
    sys.exit(main())
