"""What root does with notes and data of jobs' filesystems that are not as it made them."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import pytest

from stager.base import paths
from stager.base.shared_note import SharedNote
from stager.node import shared_fs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"state": "ready", "environment": {}, "driver": "/d"}', '{"more": 1}'],
)
def test_a_note_of_another_version_stays_and_stops_nothing_else(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").write_text(text)
    monkeypatch.setattr(paths, "SHARED_NOTES", str(tmp_path))
    read = partial(SharedNote.read, folder=str(tmp_path))
    monkeypatch.setattr(SharedNote, "read", read)
    assert not shared_fs.stop(7)
    assert os.listdir(tmp_path) == ["7"]


def test_data_deeper_than_a_path_may_be_long_goes(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_PATH)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=folder)
        folder = os.open("d" * 200, os.O_PATH, dir_fd=folder)
        with open("file", "w", opener=partial(os.open, dir_fd=folder, mode=0)):
            pass
    os.chmod(tmp_path / ("d" * 200), 0)
    shared_fs._empty(str(tmp_path))
    assert os.listdir(tmp_path) == []
