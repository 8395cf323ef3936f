"""An unpacked archive: how much of the disk it may take."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from stager.base.rules import amount_of
from stager.rank import decoder
from stager.rank.decoder import room_to_unpack
from stager.rank.tree_transfer import UnpackSink
from stager.request.items import Space
from stager.store.space import FreeSpace

if TYPE_CHECKING:
    from pathlib import Path

    from stager.rank.plan import Task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    folder.chmod(0o755)
    return folder


def a_task(folder: Path, space: Space, source: str = "/shared/x.tar") -> Task:
    tree = SimpleNamespace(allocated=5000)
    cache = SimpleNamespace(folder=str(folder), load=lambda _: SimpleNamespace(tree=tree))
    item = SimpleNamespace(source=source, destination="/nvme/x", root="/nvme")
    facts = SimpleNamespace(allocated=8000)
    node = SimpleNamespace(disk="")
    task = SimpleNamespace(
        space=space, item=item, cache=cache, node=node, source=facts, receives=True
    )
    return cast("Task", task)


def test_the_room_is_what_the_disk_and_the_users_limit_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    kept = [
        SimpleNamespace(size=size, record=SimpleNamespace(destination=destination))
        for size, destination in ((300, "/nvme/x"), (200, "/nvme/y"))
    ]
    monkeypatch.setattr(decoder, "find_candidates", lambda *_: kept)
    monkeypatch.setattr(
        decoder,
        "free_space",
        lambda _, space: FreeSpace(free - amount_of(space.keep_free, 0), free),
    )
    assert room_to_unpack(a_task(folder, Space(keep_free=1000))) == free - 1000
    assert room_to_unpack(a_task(folder, Space(user_limit=1000))) == 800


@pytest.mark.parametrize(
    ("source", "need"), [("/shared/x.tar", 8000), ("/shared/x.zip", 8000 + 5000)]
)
def test_a_zip_archive_needs_room_beside_what_it_holds(
    folder: Path, source: str, need: int
) -> None:
    assert UnpackSink(a_task(folder, Space(), source)).need() == (need, 8000)
