"""Where filesystems are mounted is read from the kernel's own table. FUSE: cluster/test_attacks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.base import mounts as module
from stager.base.mounts import has_own_rules, mount_of, mounted_by_stranger, mounts
from tests.support.users import on_tmpfs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_the_mounts_of_this_machine_are_read() -> None:
    found = {mount.point: mount for mount in mounts()}
    assert found["/proc"].kind == "proc"
    assert "/" in found


@pytest.mark.root
def test_white_space_in_a_name_makes_no_line_and_no_field_of_its_own(tmp_path: Path) -> None:
    """Any user can mount FUSE at such a name. The kernel escapes only some white space."""
    folder = tmp_path / "a\r1 2\x0b\u2003 - b"
    folder.mkdir()
    points = on_tmpfs(folder, "size=64k", lambda: [mount.point for mount in mounts()])
    assert str(folder).replace(" ", r"\040") in points


@pytest.fixture
def proc() -> Iterator[int]:
    """A file on a filesystem without a block device."""
    descriptor = os.open("/proc/self/status", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_the_mount_of_an_open_file_is_found(proc: int) -> None:
    mount = mount_of(proc)
    assert mount is not None
    assert (mount.point, mount.kind) == ("/proc", "proc")
    assert not has_own_rules(proc)
    assert mounted_by_stranger(proc) == 0


@pytest.mark.parametrize(
    ("kind", "options", "stranger", "own_rules"),
    [
        ("fuse.sshfs", "rw,user_id={me},group_id=0", 0, True),
        ("fuse.sshfs", "rw,user_id={me},group_id=0,allow_other", 0, False),
        ("fuse.sshfs", "rw,user_id=77,group_id=0,allow_other", 77, False),
        ("fuse", "rw,user_id=0,group_id=0,allow_other", 0, False),
        ("fuse.x", "rw,group_id=77,allow_other", 0, False),
        ("nfs4", "rw,user_id=77", 0, False),
        ("cifs", "rw", 0, True),
        ("afs", "rw", 0, True),
    ],
)
def test_who_mounted_it_and_who_may_enter_is_told_by_its_options(
    monkeypatch: pytest.MonkeyPatch,
    proc: int,
    *,
    kind: str,
    options: str,
    stranger: int,
    own_rules: bool,
) -> None:
    true = mount_of(proc)
    assert true is not None
    # FUSE's device cannot be opened everywhere: the table that the kernel would show.
    fields = f"{true.number} 1 0:9 / /x rw - {kind} none {options.format(me=os.getuid())}"
    monkeypatch.setattr(module, "_lines", lambda: [fields.encode()])
    assert mounted_by_stranger(proc) == stranger
    assert has_own_rules(proc) is own_rules
