"""A launcher as a child process: start it, read its output line by line, and end it."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from stager.base.errors import LaunchError
from stager.base.linux import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

#: Bytes of one read.
_BLOCK = 1 << 16
#: Bytes of the longest line; what is longer is dropped. The lines of ranks and nodes are short
#: (`base.events`, `launch.nodes`).
_LONGEST_LINE = 1 << 20
#: Seconds of one wait for output at most; longer ones overflow in the kernel.
_LONGEST_WAIT = 3600.0
#: Seconds for the launcher to end its tasks, where the caller sets none.
_END_PATIENCE = 10.0


class Process:
    """A running launcher. When left as a context manager, its pipes are closed and it is awaited;
    when left by an exception, it is ended.

    If it is ``bound``, it is terminated when this process is killed. That is for a caller with one
    thread: it needs Python code between fork and exec. Raise LaunchError if it cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], *, bound: bool = False
    ) -> None:
        self._selector = selectors.DefaultSelector()
        came: list[int] = []
        try:
            with _held_back(came):
                self._child = subprocess.Popen(
                    argv, env=dict(environment), stdin=subprocess.DEVNULL,
                    cwd=_working_folder(),
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    preexec_fn=partial(_end_with, os.getpid()) if bound else None,  # noqa: PLW1509
                )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from None
        except ValueError as error:  # a NUL or '=' where an environment can have none
            raise LaunchError(f"{argv[0]} cannot be started: {error}") from None
        try:
            for number in came:
                signal.raise_signal(number)
            for stream in (self._child.stdout, self._child.stderr):
                assert stream is not None
                self._selector.register(stream, selectors.EVENT_READ, data=bytearray())
        except BaseException as error:  # a signal too: nothing else would end the launcher
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._selector.close()
        if error is not None and self._child.poll() is None:
            self.end()
        self._child.__exit__(kind, error, traceback)

    @property
    def code(self) -> int:
        """The exit code, below zero for a signal, once the launcher has ended."""
        assert self._child.returncode is not None
        return self._child.returncode

    @property
    def is_open(self) -> bool:
        """Whether more output may come."""
        return bool(self._selector.get_map())

    def read_lines(self, timeout: float | None) -> list[str]:
        """Return the lines of both streams that come within ``timeout`` seconds, None for any time.

        Return as soon as there is something to read, which may be less than a line.
        """
        lines: list[str] = []
        if timeout is not None:
            timeout = min(max(0.0, timeout), _LONGEST_WAIT)
        for key, _ in self._selector.select(timeout):
            block = os.read(key.fd, _BLOCK)
            if not block:
                self._selector.unregister(key.fileobj)
            key.data.extend(block or b"\n")  # the last line may lack its newline
            if b"\n" not in block and block and len(key.data) <= _LONGEST_LINE:
                continue
            *whole, rest = key.data.split(b"\n")
            key.data[:] = rest if len(rest) <= _LONGEST_LINE else b""
            lines += [line.decode(errors="replace") for line in whole]
        return lines

    def ends_within(self, seconds: float) -> bool:
        """Wait that long for the launcher to end by itself. Return whether it did."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(seconds)
            return True
        return False

    def end(self, patience: float = _END_PATIENCE) -> None:
        """Terminate the launcher, so that it ends its tasks; kill it after ``patience`` seconds."""
        self._child.terminate()
        if not self.ends_within(patience):
            self._child.kill()


@contextmanager
def _held_back(came: list[int]) -> Iterator[None]:
    """Note in ``came`` the signals that would raise an exception in the body.

    Nobody would end a launcher that has begun while `subprocess.Popen` is at work. Only the main
    thread gets signals.
    """
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                handlers[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for held, handler in handlers.items():
            signal.signal(held, handler)


def _working_folder() -> str | None:
    """Return another working folder if this process's was removed: srun would not start there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def _end_with(parent: int) -> None:
    """Have this new process terminated when ``parent`` ends, so that a launcher ends its tasks."""
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)
