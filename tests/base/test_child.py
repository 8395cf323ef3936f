"""What runs as another user has limits, and whoever waits for it does not wait for long."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base.child import LateAnswerError, answer, answer_as
from tests.support.users import USER

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.root


def ask(act: Callable[[int], object], limit: float = 20) -> bytes:
    return answer_as(USER, USER, [], act, limit)


def test_it_runs_as_the_user_alone() -> None:
    def act(output: int) -> None:
        os.write(output, repr((os.getresuid(), os.getresgid(), os.getgroups())).encode())

    ids = (USER, USER, USER)
    assert ask(act) == repr((ids, ids, [])).encode()


def test_it_starts_no_other_process() -> None:
    def act(output: int) -> None:
        try:
            os.fork()
        except BlockingIOError:
            os.write(output, b"refused")

    assert ask(act) == b"refused"


def test_its_memory_processor_and_files_are_limited() -> None:
    def act(output: int) -> None:
        try:
            bytearray(2 << 30)
        except MemoryError:
            os.write(output, b"no memory ")
        limits = [resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE]
        os.write(output, repr([resource.getrlimit(one) for one in limits]).encode())

    assert ask(act) == b"no memory [(20, 20), (0, 0), (0, 0)]"


def test_it_can_run_as_its_caller() -> None:
    def act(output: int) -> None:
        os.write(output, repr((os.getresuid(), os.getsid(0) == os.getpid())).encode())

    assert answer(act, 20) == repr((os.getresuid(), True)).encode()


def answer_in_part(output: int) -> None:
    os.write(output, b"a part")
    time.sleep(60)


@pytest.mark.parametrize(
    ("act", "so_far"),
    [
        (lambda _: time.sleep(60), b""),
        (lambda _: os.kill(os.getpid(), signal.SIGSTOP), b""),
        (answer_in_part, b"a part"),
    ],
    ids=["hangs", "is stopped", "answers in part"],
)
def test_one_that_does_not_end_is_killed(act: Callable[[int], object], so_far: bytes) -> None:
    begun = time.monotonic()
    with pytest.raises(LateAnswerError) as late:
        ask(act, 0.5)
    assert late.value.so_far == so_far
    assert time.monotonic() - begun < 15


def test_one_that_fails_answers_nothing() -> None:
    assert ask(lambda _: 1 // 0) == b""


def test_one_that_never_stops_writing_is_cut_off() -> None:
    def act(output: int) -> None:
        while True:
            os.write(output, bytes(65536))

    assert len(ask(act)) < (2 << 20)


def test_it_holds_nothing_open_that_root_had() -> None:
    """Who reads root's output does not wait for a process that is left."""

    def act(output: int) -> None:
        names = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
        os.write(output, f"{len(os.listdir('/proc/self/fd'))} {names[0]} {names[2]}".encode())

    with open("/etc/passwd") as file:
        os.set_inheritable(file.fileno(), True)
        # The fourth is that of the listing.
        assert ask(act) == b"4 /dev/null /dev/null"


def test_it_ends_with_its_parent() -> None:
    """The clean-up itself may be killed by Slurm."""
    parent = os.fork()
    if not parent:
        ask(lambda _: time.sleep(60), 60)
        os._exit(0)
    children = Path(f"/proc/{parent}/task/{parent}/children")
    wait_for(lambda: children.read_text() != "")
    child = int(children.read_text())
    limits = Path(f"/proc/{child}/limits")  # the last of its preparations
    wait_for(lambda: re.search(r"Max processes +1 ", limits.read_text()) is not None)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(lambda: not Path(f"/proc/{child}").exists() or "zombie" in status_of(child))


def status_of(process: int) -> str:
    return Path(f"/proc/{process}/status").read_text()


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)
