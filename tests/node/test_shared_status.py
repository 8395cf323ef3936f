"""What `stagectl status` tells of the filesystem of a job's disks, by drivers that run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.base.shared_note import FAILED, READY, SharedNote
from stager.cli.tables import shared_lines
from stager.node.shared_status import shared_room
from stager.store.cache import open_cache
from stager.store.states import NodeStatus, SharedRoom, node_status
from tests.support.trees import stage_folder
from tests.support.users import USER, as_user, ordinary_home, within

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ME = os.getuid()


@pytest.fixture
def mount() -> Iterator[Path]:
    with ordinary_home() as folder:
        yield folder


def note_of(mount: Path, script: str = "", state: str = READY, uid: int = ME) -> SharedNote:
    driver = mount / "driver"
    driver.write_text(f"#!/bin/sh\n{script}\n")
    driver.chmod(0o755)
    environment = {"STAGE_UID": str(uid), "STAGE_MOUNT": str(mount), "STAGE_NODES": "n1 n2"}
    return SharedNote(state, environment, str(driver), uid)


def asked_by_user(mount: Path, script: str) -> list[str]:
    """Return what the driver says to the job's user, who is an ordinary one."""
    uid = ME or USER
    note = note_of(mount, script, uid=uid)
    told = as_user(uid, lambda: shared_room(note)) if ME == 0 else shared_room(note)
    assert told is not None
    assert 0 < told.free <= told.size
    assert (told.mount, told.nodes, told.problem) == (str(mount), 2, "")
    return told.lines


def test_the_drivers_lines_are_told_with_its_own_environment_alone(mount: Path) -> None:
    script = 'echo "$1 on $STAGE_NODES"; echo "${HOME-none}" >&2; exit 3'
    assert asked_by_user(mount, script) == ["status on n1 n2", "none"]


def test_a_driver_that_hangs_is_not_waited_for(mount: Path) -> None:
    lines = within(20, lambda: asked_by_user(mount, "echo data: running; sleep 4242 & wait"))
    assert lines == ["data: running", f"{mount}/driver status takes longer than 2 s"]


def test_a_filesystem_that_did_not_start_tells_why(mount: Path) -> None:
    told = shared_room(note_of(mount, "echo not asked", f"{FAILED}no port"))
    assert told == SharedRoom(str(mount), 2, 0, 0, "no port", [])
    assert node_status("", [], [], shared=told).entries == []
    status = NodeStatus(shared=told)
    lines = shared_lines({"n1": status, "n2": status})
    assert lines == [f"{mount}: no port (n[1-2])"]


@pytest.mark.skipif(ME != 0, reason="needs root")
def test_other_users_see_nothing_and_root_asks_no_driver(mount: Path) -> None:
    note = note_of(mount, "echo asked", uid=USER)
    assert as_user(USER + 1, lambda: shared_room(note)) is None
    told = shared_room(note)
    assert told is not None
    assert told.lines == []
    assert 0 < told.free <= told.size


def test_copies_in_it_are_listed_and_its_room_is_told_once(mount: Path) -> None:
    mount.chmod(0o755)
    os.chown(mount, ME, -1)
    stage_folder(open_cache(str(mount), ME), f"{mount}/set")
    told = shared_room(note_of(mount))
    status = node_status("", [], [], shared=told)
    assert [entry.destination for entry in status.entries] == [f"{mount}/set"]
    assert status.rooms == []
    [line] = shared_lines({"n1": status, "n2": status})[:1]
    assert line.startswith(f"{mount}: ")
    assert line.endswith(", made of the disks of 2 nodes (n[1-2])")
