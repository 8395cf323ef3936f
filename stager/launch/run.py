"""A JobContext, a Policy and a StageRequest in; argv and environment of the ranks out; one `run`.

The ranks' environment is built from an allow-list: a job's own SLURM_, PMIX_ and OMPI_ variables
would shape a nested srun in ways that were meant for the user's program.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stager.base.errors import MPI_REMEDY, LaunchError
from stager.base.outcome import Outcome
from stager.base.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Lines of the launcher's own output that a failure's message repeats.
_TAIL = 12
#: Seconds of one wait for output; the kernel takes no endless number of them.
_LONGEST_WAIT = 3600.0


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    start_timeout: float,
    on_event: Callable[[dict[str, Any]], None],
) -> Outcome:
    """Start the ranks, pass their events on, and return the Outcome they agreed on.

    Its time is from the launch to the launcher's end.

    Raises LaunchError where the launcher cannot be started, no rank begins within
    ``start_timeout`` seconds, or the ranks end without an Outcome.
    """
    begun = time.monotonic()
    try:
        process = subprocess.Popen(
            argv, env=dict(environment), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from None
    except ValueError as error:  # a NUL or '=' where none can be
        raise LaunchError(f"{argv[0]} cannot be started: {error}") from None
    with process:
        listener = _Listener(process, time.monotonic() + start_timeout, on_event)
        try:
            outcome = listener.listen()
        except BaseException:
            _end(process)
            raise
        if listener.timed_out:
            _end(process)
    if outcome is None:
        raise LaunchError(_no_outcome(argv, process.returncode, listener, start_timeout))
    return _with_launch(outcome, listener.told - begun, time.monotonic() - listener.told)


def _with_launch(outcome: Outcome, until_told: float, since: float) -> Outcome:
    """The ranks' ``outcome`` with the launcher's own time before and after it, in seconds."""
    phases = {Phase.LAUNCH: max(0.0, until_told - outcome.seconds), **outcome.phases}
    phases[Phase.END] = phases.get(Phase.END, 0.0) + since
    return replace(outcome, phases=phases, seconds=sum(phases.values()))


def _no_outcome(argv: Sequence[str], code: int, listener: _Listener, start_timeout: float) -> str:
    launcher = os.path.basename(argv[0])
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    if listener.timed_out:
        problem = f"MPI did not start within {start_timeout:g} s; {MPI_REMEDY}"
    elif not listener.begun:
        problem = f"MPI did not start: {launcher} {ended}; {MPI_REMEDY}"
    else:
        why = listener.crash or f"{launcher} {ended}"
        problem = f"the ranks ended before the stage was done: {why}; submit again"
    return problem + "".join(f"\n  {line}" for line in listener.tail)


class _Listener:
    """Reads what the ranks and their launcher print, until all of it is said."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        deadline: float,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._process = process
        self._deadline = deadline
        self._on_event = on_event
        #: The launcher's last words, whether a rank has begun, and whether that took too long.
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.begun = False
        self.timed_out = False
        #: Why the first rank that failed unexpectedly did so.
        self.crash = ""
        #: When the Outcome came, on the monotonic clock.
        self.told = 0.0

    def listen(self) -> Outcome | None:
        """The Outcome, or None where the output ended, or the time to begin, without one."""
        outcome = None
        with selectors.DefaultSelector() as selector:
            for stream in (self._process.stdout, self._process.stderr):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, data=bytearray())
            while selector.get_map() and not self.timed_out:
                ready = selector.select(self._patience())
                self.timed_out = not self.begun and time.monotonic() >= self._deadline
                for key, _ in ready:
                    block = os.read(key.fd, 65536)
                    key.data.extend(block or b"\n")
                    if not block:
                        selector.unregister(key.fileobj)
                    *lines, rest = key.data.split(b"\n")
                    key.data[:] = rest
                    for line in lines:
                        outcome = self._hear(line.decode(errors="replace")) or outcome
        return outcome

    def _patience(self) -> float | None:
        left = self._deadline - time.monotonic()
        return None if self.begun else min(max(0.0, left), _LONGEST_WAIT)

    def _hear(self, line: str) -> Outcome | None:
        event = _as_event(line)
        if event is None:
            if line.strip():
                self.tail.append(line.rstrip())
            return None
        self.begun = True
        if event["event"] == "result":
            self.told = time.monotonic()
            return Outcome.from_json(event["outcome"])
        if event["event"] == "crashed":
            self.crash = self.crash or f"{event['node']}: {event['error']}"
            return None
        self._on_event(event)
        return None


def _as_event(line: str) -> dict[str, Any] | None:
    if line.startswith('{"event": '):
        with suppress(ValueError):
            event: dict[str, Any] = json.loads(line)
            return event
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher: politely first, so that it takes its ranks along."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
        return
    process.kill()
