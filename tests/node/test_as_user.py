"""A program runs as its user with nothing of root's, and no longer than it may."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from stager.node.as_user import groups_of, run_as
from stager.node.folders import locked

if TYPE_CHECKING:
    from pathlib import Path


def python(text: str) -> list[str]:
    # The system's, which every user may run.
    return ["/usr/bin/python3", "-I", "-c", text]


@pytest.mark.root
def test_a_program_runs_as_the_user_with_nothing_of_roots() -> None:
    output = run_as(
        65534, 65534, [], python("import os; print(os.getresuid(), os.getresgid(), os.getgroups(), "
        "sorted(os.environ), os.getcwd(), sorted(map(int, os.listdir('/proc/self/fd')))[:3])"), 20,
    )  # fmt: skip
    ids = "(65534, 65534, 65534)"
    assert output.decode() == f"{ids} {ids} [] ['LANG', 'PATH'] / [0, 1, 2]\n"


@pytest.mark.root
def test_a_program_that_hangs_is_ended_and_told() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        run_as(65534, 65534, [], python("import time; print(1, flush=True); time.sleep(60)"), 0.5)
    assert time.monotonic() - begun < 20


@pytest.mark.root
def test_a_program_that_is_left_keeps_the_lock_of_its_kind(tmp_path: Path) -> None:
    """So that there is never more than one that cannot be killed; here it lives as long as it may.

    The limits end it in another test.
    """
    wait = python("import time; time.sleep(2)")
    with locked(f"{tmp_path}/lock", 1) as lock:
        child = os.fork()
        if not child:
            run_as(65534, 65534, [], wait, 10, lock)
            os._exit(0)
    try:
        time.sleep(0.5)
        with (
            pytest.raises(TimeoutError, match="another process has this lock"),
            locked(f"{tmp_path}/lock", 0.2),
        ):
            pass
    finally:
        os.waitpid(child, 0)
    with locked(f"{tmp_path}/lock", 1):
        pass


@pytest.mark.root
def test_the_lock_that_a_program_keeps_cannot_be_written_to(tmp_path: Path) -> None:
    """Its user can take the descriptor from it, and has no limit there: the file is in /run."""
    look = python("import fcntl, os; print(fcntl.fcntl(3, fcntl.F_GETFL) & os.O_ACCMODE)")
    with locked(f"{tmp_path}/lock", 1) as lock:
        assert run_as(65534, 65534, [], look, 20, lock) == b"%d\n" % os.O_RDONLY


@pytest.mark.root
def test_a_program_that_floods_is_ended() -> None:
    flood = python("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert len(run_as(65534, 65534, [], flood, 20)) < (2 << 20)


def test_the_groups_of_a_user_are_those_of_the_system() -> None:
    assert groups_of(0)[0] == 0
    assert 0 in groups_of(0)[1]


def test_a_user_whom_the_node_does_not_know_is_in_no_group() -> None:
    assert groups_of(47_112) == (65534, [])
