"""The lines that a stage leaves in a node's system log."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from stager.base import log as log_module
from stager.base.log import log, result_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Listen in the place of the system's log daemon."""
    path = str(tmp_path / "log")
    monkeypatch.setattr(log_module, "_LOG_SOCKET", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(10)
        yield listener


def test_a_line_has_its_priority_and_nothing_that_does_not_print(daemon: socket.socket) -> None:
    log("bytes=1\n<8>forged")
    assert daemon.recv(2000) == b"<14>slurm-stage: bytes=1?<8>forged"


def test_a_line_is_cut_to_what_every_log_daemon_takes(daemon: socket.socket) -> None:
    log("x" * 5000)
    assert daemon.recv(5000) == b"<14>slurm-stage: " + b"x" * (1000 - 17)


def test_nobody_waits_for_a_log_daemon_that_reads_nothing(daemon: socket.socket) -> None:
    for number in range(2000):  # the kernel keeps some ten (net.unix.max_dgram_qlen)
        log(f"line {number}")
    assert daemon.recv(2000) == b"<14>slurm-stage: line 0"


def test_without_a_log_daemon_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_LOG_SOCKET", "/nowhere/log")
    log("lost")


def test_a_failure_is_told_in_one_line() -> None:
    line = result_line(17, "alice", 0, 1.25, 4, "n1: /shared/none: Permission denied")
    assert line == (
        "job=17 user=alice bytes=0 seconds=1.250 code=4: n1: /shared/none: Permission denied"
    )
