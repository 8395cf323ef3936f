"""End a rank before MPI_Init, and tell the launcher why."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from stager.base.errors import Failure
from stager.base.events import event
from stager.base.outcome import Outcome

#: Seconds in which the report reaches the launcher: srun drops what comes as it ends the step.
_REPORT_LEAD = 0.5


def refuse(code: int, message: str) -> NoReturn:
    """End this process with the exit ``code``; the ``message`` is the stage's failure."""
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    outcome = Outcome([], [Failure(code, message, node)], 0.0)
    sys.stdout.write(event("result", outcome=outcome.to_json()) + "\n")
    sys.stdout.flush()
    time.sleep(_REPORT_LEAD)
    os._exit(code)
