"""Ask Slurm which jobs have ended of those that seem to use what a stage would replace."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from stager.source.tool import run

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds in which squeue must answer; without it, none has ended.
_LIMIT = 10
#: What squeue needs of a rank's environment.
_NEEDED = ("PATH", "SLURM_CONF")


def ended_jobs(own: int, jobs: Sequence[int]) -> list[int]:
    """Return those of this user's ``jobs`` that neither run nor are about to end.

    The job ``own`` runs: squeue's answer counts only if it names it.
    """
    asked = ",".join(map(str, (own, *jobs)))
    command = ["squeue", "--noheader", f"--jobs={asked}", "--format=%A %T"]
    environment = {name: os.environ[name] for name in _NEEDED if name in os.environ}
    with suppress(OSError, TimeoutError):
        told = run(command, environment, "/", _LIMIT).output.decode(errors="replace")
        # One that was requeued has its number still, and has ended here.
        states = (line.split() for line in told.splitlines())
        alive = {state[0] for state in states if state[1:] != ["PENDING"]}
        if str(own) in alive:
            return [job for job in jobs if str(job) not in alive]
    return []
