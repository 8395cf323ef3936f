"""Run a program of the node, such as skopeo, as a child of this rank.

What the program reads and writes counts as progress, because it may be silent for long. It begins
as ``python -m stager.source.tool``, which has the kernel kill it if the rank dies, and then becomes
the program. (A rank, which has threads, could not do that between fork and exec.)
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple

from stager.base.linux import end_with_parent
from stager.base.telemetry import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Bytes that are kept of a program's answer, such as a manifest, and of its errors: the last ones.
_MOST_OUTPUT, _MOST_ERRORS = 8 << 20, 16 << 10
#: Bytes read at a time, and the seconds between two looks at what the program got done.
_BLOCK, _PERIOD = 1 << 16, 0.5
#: Bytes that count as a sign of life. Threads of a program that hangs still wake each other by
#: writing single bytes (Go).
_SIGN = 128 << 10
#: The codes by which a shell says that a program cannot be run, or is not there.
_NOT_RUN, _NOT_FOUND = 126, 127


class Finished(NamedTuple):
    """How a program ended: its exit code, negative for a signal, and what it wrote."""

    code: int
    output: bytes
    errors: str


def run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    limit: float = 0,
    check: Callable[[], None] = lambda: None,
) -> Finished:
    """Run ``argv`` in ``folder`` to its end, with no other environment than this one.

    ``check`` is called now and then. If it raises an error, the program is killed.

    Raise TimeoutError if it takes more than ``limit`` seconds (0: no limit), OSError if it cannot
    be started.
    """
    with closing(_Child(argv, environment, folder)) as child:
        return child.finish(limit, check)


class _Child:
    """A running program, which `close` kills."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        begin = (sys.executable, "-I", "-m", __name__, str(os.getpid()), folder, *argv)
        self._pid = 0
        self._output, output = os.pipe()
        self._errors, errors = os.pipe()
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, errors, 2),
        ]
        try:
            self._pid = os.posix_spawn(sys.executable, begin, environment, file_actions=actions)
        except OSError:
            self.close()
            raise
        finally:
            os.close(output)
            os.close(errors)

    def finish(self, limit: float, check: Callable[[], None]) -> Finished:
        """Read what the program writes, and wait for its end. Raise as `run` does."""
        deadline = time.monotonic() + limit if limit else None
        kept = {self._output: b"", self._errors: b""}
        poll = select.poll()
        for descriptor in kept:
            poll.register(descriptor, select.POLLIN)
        left, done = len(kept), 0
        while left:
            if deadline and time.monotonic() > deadline:
                raise TimeoutError
            for descriptor, _ in poll.poll(_PERIOD * 1000):
                block = os.read(descriptor, _BLOCK)
                if not block:
                    poll.unregister(descriptor)
                    left -= 1
                kept[descriptor] += block
            kept[self._errors] = kept[self._errors][-_MOST_ERRORS:]
            kept[self._output] = kept[self._output][:_MOST_OUTPUT]
            if (now := self._done()) >= done + _SIGN:
                done = now
                count()
            check()
        status = os.waitpid(self._pid, 0)[1]
        self._pid = 0
        errors = kept[self._errors].decode(errors="replace")
        return Finished(os.waitstatus_to_exitcode(status), kept[self._output], errors)

    def _done(self) -> int:
        """Return the bytes that the program has read and written, also over the network."""
        with suppress(OSError), open(f"/proc/{self._pid}/io", encoding="ascii") as table:
            return sum(int(line.split()[1]) for line in (table.readline(), table.readline()))
        return 0

    def close(self) -> None:
        """Kill the program if it runs, and close the pipes."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._output)
        os.close(self._errors)


def main(parent: str, folder: str, *argv: str) -> None:
    """Become the program ``argv``, as the child of the process ``parent``."""
    end_with_parent()
    if os.getppid() != int(parent):  # it died before
        sys.exit(1)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and programs would inherit
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what the MPI library left open for its children
    try:
        os.chdir(folder)
        os.execvp(argv[0], argv)  # noqa: S606 - a shell is not wanted
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        sys.exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN)


if __name__ == "__main__":
    main(*sys.argv[1:])
