"""Let one of the processes that run the same command line on all nodes stage; the others wait."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from stager.base.errors import Failure, LaunchError
from stager.base.outcome import Outcome
from stager.disk.line_status import wait_for_line

if TYPE_CHECKING:
    from stager.launch.line import Line
    from stager.request.items import StageRequest


def wait_for_first(line: Line, request: StageRequest, patience: float) -> Outcome:
    """Wait until the first process of the ``line`` has staged the ``request`` to this node.

    Return its outcome, which has no items. Raise LaunchError if no stage of the line works on this
    node for ``patience`` seconds.
    """
    begun = time.monotonic()
    code = wait_for_line(request.line, request.line_root, os.getuid(), line.task, patience)
    if code is None:
        raise LaunchError(
            f"{line.later}, so this waited for the first to stage, but for {patience:g} s no stage "
            "of this line ran on this node; see what the first says, and run the same line on all"
        )
    failures = []
    if code:
        text = (
            f"{line.later}: the first, which stages for all, failed (exit code {code}) and says why"
        )
        failures = [Failure(code, text, "")]
    return Outcome([], failures, time.monotonic() - begun)
