"""Start the ranks by a launcher, pass their events on, and return the Outcome they agreed on.

Ranks write events on their stdout, a JSON object a line (`base.outcome.event`). All other lines are
the launcher's own; the last of them are part of the message if there is no Outcome.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stager.base.errors import MPI_REMEDY, LaunchError
from stager.base.outcome import Outcome
from stager.base.phases import Phase
from stager.launch.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Lines of the launcher's own output that the message of a failure repeats.
_TAIL = 12


class NotStartedError(LaunchError):
    """No rank has begun."""


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    start_timeout: float,
    on_event: Callable[[dict[str, Any]], None],
) -> Outcome:
    """Start the ranks, pass their events on, and return the Outcome they agreed on.

    Its time is from the launch to the launcher's end.

    Raise LaunchError if the launcher cannot be started or the ranks end without an Outcome,
    NotStartedError if no rank begins within ``start_timeout`` seconds or at all.
    """
    begun = time.monotonic()
    with Process(argv, environment) as process:
        listener = _Listener(time.monotonic() + start_timeout, on_event)
        listener.listen(process)
        if listener.timed_out:
            process.end()
    if listener.outcome is None:
        launcher = os.path.basename(argv[0])
        kind = LaunchError if listener.begun else NotStartedError
        raise kind(_no_outcome(launcher, process.code, listener, start_timeout))
    return _with_launch(
        listener.outcome,
        before=listener.outcome_at - begun,
        after=time.monotonic() - listener.outcome_at,
    )


def _with_launch(outcome: Outcome, *, before: float, after: float) -> Outcome:
    """Return ``outcome`` with the launcher's own time added, given the seconds before and after."""
    phases = {Phase.LAUNCH: max(0.0, before - outcome.seconds), **outcome.phases}
    phases[Phase.END] = phases.get(Phase.END, 0.0) + after
    return replace(outcome, phases=phases, seconds=sum(phases.values()))


def _no_outcome(launcher: str, code: int, listener: _Listener, start_timeout: float) -> str:
    """Return the message for ranks that ended, or did not begin, without an Outcome."""
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    if listener.timed_out:
        problem = f"MPI did not start within {start_timeout:g} s; {MPI_REMEDY}"
    elif not listener.begun:
        problem = f"MPI did not start: {launcher} {ended}; {MPI_REMEDY}"
    else:
        why = listener.crash or f"{launcher} {ended}"
        problem = f"staging ended early: {why}; submit again"
    return problem + "".join(f"\n  {line}" for line in listener.tail)


class _Listener:
    """Takes what the ranks and their launcher print. At ``deadline``, some rank must have begun."""

    def __init__(self, deadline: float, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._deadline = deadline
        self._on_event = on_event
        #: The launcher's last lines.
        self.tail: deque[str] = deque(maxlen=_TAIL)
        #: Whether a rank has begun, and whether none had at the deadline.
        self.begun = False
        self.timed_out = False
        #: The first rank that failed unexpectedly, and why.
        self.crash = ""
        #: What the ranks agreed on, and when it came, on the monotonic clock.
        self.outcome: Outcome | None = None
        self.outcome_at = 0.0

    def listen(self, process: Process) -> None:
        """Take all output, unless no rank begins in time."""
        while process.is_open and not self.timed_out:
            timeout = None if self.begun else self._deadline - time.monotonic()
            lines = process.read_lines(timeout)
            self.timed_out = not self.begun and time.monotonic() >= self._deadline
            for line in lines:
                self._take(line)

    def _take(self, line: str) -> None:
        event = _as_event(line)
        if event is None:
            if line.strip():
                self.tail.append(line.rstrip())
            return
        self.begun = True
        if event["event"] == "result":
            self.outcome_at = time.monotonic()
            self.outcome = Outcome.from_json(event["outcome"])
        elif event["event"] == "crashed":
            self.crash = self.crash or f"{event['node']}: {event['error']}"
        else:
            self._on_event(event)


def _as_event(line: str) -> dict[str, Any] | None:
    if line.startswith('{"event": '):
        with suppress(ValueError):
            event: dict[str, Any] = json.loads(line)
            return event
    return None
