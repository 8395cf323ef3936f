"""What is under construction leaves nothing behind, and no sweep takes it from its writer."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from stager.fs.partial_file import UnnamedFile, fresh_name, make_partial_folder
from tests.support.disks import NEW, partial_names
from tests.support.users import forked

if TYPE_CHECKING:
    from pathlib import Path

    from stager.store.cache import Cache


def test_a_file_under_construction_has_a_name_only_where_it_needs_one(
    cache: Cache, naming: str
) -> None:
    with closing(UnnamedFile(cache.partial)):
        assert len(partial_names(cache)) == (0 if naming == "unnamed" else 1)
    assert partial_names(cache) == []


@pytest.mark.usefixtures("naming")
def test_a_renamed_file_is_whole_and_stays(cache: Cache, disk: Path) -> None:
    folder = os.open(disk, os.O_RDONLY | os.O_DIRECTORY)
    with closing(UnnamedFile(cache.partial)) as file:
        os.write(file.descriptor, NEW)
        file.rename("file", folder)
    os.close(folder)
    assert (disk / "file").read_bytes() == NEW
    assert partial_names(cache) == []


def test_a_folder_under_construction_is_swept_once_it_is_closed(cache: Cache) -> None:
    path, lock = make_partial_folder(cache.partial)
    name = os.path.basename(path)
    forked(cache.sweep)
    assert sorted(partial_names(cache)) == [name, f"{name}.lock"]
    lock.close()
    cache.sweep()
    assert partial_names(cache) == []


def test_nothing_is_swept_while_a_name_is_chosen(cache: Cache) -> None:
    with fresh_name(cache.partial) as path:
        os.mkdir(path)
        forked(cache.sweep)
        assert partial_names(cache) == [os.path.basename(path)]
    cache.sweep()
    assert partial_names(cache) == []
