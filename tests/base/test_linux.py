"""The system calls do what their names say, and failures are errors."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from stager.base import linux
from stager.base.linux import (
    Quota,
    is_alone,
    leave_network,
    quota_of,
    set_dumpable,
    sync_filesystem,
)
from tests.support.users import USER, as_user, forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Open = Callable[[int, bytes, int], int]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_space_is_reserved_where_the_filesystem_can(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        linux.reserve(file.fileno(), 0, 1 << 20)
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 20
        with pytest.raises(OSError, match="Invalid argument") as caught:
            linux.reserve(file.fileno(), 0, -1)
        assert caught.value.errno == errno.EINVAL
    with open("/proc/self/comm", "r+b", buffering=0) as cannot:
        linux.reserve(cannot.fileno(), 0, 1 << 20)


def test_a_filesystem_is_synced_by_any_of_its_descriptors(folder: int) -> None:
    sync_filesystem(folder)
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        sync_filesystem(-1)
    assert caught.value.errno == errno.EBADF


def owner_of_memory() -> int:
    return os.stat(f"/proc/{os.getpid()}/mem").st_uid


@pytest.mark.root
def test_the_memory_of_a_process_that_is_not_dumpable_belongs_to_root() -> None:
    def act() -> tuple[int, int]:
        set_dumpable(True)
        before = owner_of_memory()
        set_dumpable(False)
        return before, owner_of_memory()

    assert as_user(USER, act) == (USER, 0)


BENEATH = pytest.mark.parametrize("open_it", [linux.open_beneath, linux.open_step_by_step])


@pytest.fixture
def outer(tmp_path: Path) -> Iterator[int]:
    """A folder with a file, and links that lead to it and out."""
    (tmp_path / "in/a/b").mkdir(parents=True)
    (tmp_path / "in/a/b/file").write_text("inside")
    (tmp_path / "file").write_text("outside")
    (tmp_path / "in/a/link").symlink_to("b/file")
    (tmp_path / "in/out").symlink_to("..")
    descriptor = os.open(tmp_path / "in", os.O_PATH)
    yield descriptor
    os.close(descriptor)


@BENEATH
def test_what_is_beneath_a_folder_is_opened(outer: int, open_it: Open) -> None:
    with open(open_it(outer, b"a/b/file", os.O_RDONLY)) as file:
        assert file.read() == "inside"
        assert not os.get_inheritable(file.fileno())
    descriptor = open_it(outer, b"", os.O_RDONLY | os.O_DIRECTORY)
    assert os.path.samestat(os.fstat(descriptor), os.fstat(outer))
    os.close(descriptor)


@BENEATH
@pytest.mark.parametrize("path", [b"a/link", b"out/file", b"out", b"a/b/file/x"])
def test_no_link_beneath_a_folder_is_followed(outer: int, open_it: Open, path: bytes) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"symbolic links|Not a directory") as caught:
        open_it(outer, path, os.O_RDONLY)
    assert caught.value.errno in linux.IS_LINK
    assert os.listdir("/proc/self/fd") == before


def test_a_kernel_without_openat2_opens_step_by_step(
    outer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "_OPENAT2", 99_999)  # no system call has this number
    os.close(linux.open_beneath(outer, b"a/b/file", os.O_RDONLY))
    with pytest.raises(NotADirectoryError):
        linux.open_beneath(outer, b"out/file", os.O_RDONLY)


@pytest.mark.root
def test_a_process_that_leaves_the_network_has_its_own_loopback_and_nothing_else() -> None:
    def act() -> tuple[bool, bool, bytes]:
        outer = socket.create_server(("127.0.0.1", 0))
        port = outer.getsockname()[1]
        leave_network()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)
        with socket.create_server(("127.0.0.1", 0)) as inner:
            with socket.create_connection(inner.getsockname(), 1) as one:
                one.sendall(b"x")
            return is_alone(), os.path.exists("/proc/self/net/dev"), inner.accept()[0].recv(1)

    assert forked(act) == (True, True, b"x")


def test_only_root_can_leave_the_network() -> None:
    if os.getuid() == 0:
        with pytest.raises(PermissionError):
            as_user(USER, leave_network)
    else:
        with pytest.raises(PermissionError):
            leave_network()


def test_a_disk_without_quotas_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^\[Errno (2|3|22|25|38|95)\] "):
        quota_of(os.getuid(), str(tmp_path))


@pytest.mark.parametrize(
    ("hard", "soft", "holds_from", "quota"),
    [
        (100, 0, 0, Quota(102_400, 5000)),
        (0, 0, 0, None),
        (100, 4, 0, Quota(102_400, 5000)),
        (100, 4, 2**40, Quota(102_400, 5000)),
        (100, 4, 1, Quota(4096, 5000)),
        (0, 4, 1, Quota(4096, 5000)),
    ],
    ids=["hard", "none", "soft", "passed", "run out", "soft alone"],
)
def test_a_quota_is_the_limit_that_holds_now(
    monkeypatch: pytest.MonkeyPatch, hard: int, soft: int, holds_from: int, quota: Quota | None
) -> None:
    # The kernel's answer is put on: to build in quotas is a choice of its configuration. It is a
    # struct if_dqblk of linux/quota.h.
    answer = struct.pack("8QI4x", hard, soft, 5000, 0, 0, 7, holds_from, 0, 63)
    monkeypatch.setattr(linux, "_ask_quota", lambda *_: answer)
    assert quota_of(5001, "/nvme") == quota
