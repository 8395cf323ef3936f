"""A copy is its owner's alone, unless it is shared; then others may read it, and never write."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from stager.base.options import Share
from stager.fs.files import copy_mode, give_permissions

if TYPE_CHECKING:
    from pathlib import Path

#: Every combination of permission bits.
ALL_MODES = range(0o10000)


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_who_may_do_what_with_a_copy(*, is_folder: bool) -> None:
    for mode in ALL_MODES:
        alone, group, everybody = (
            copy_mode(mode, share, is_folder=is_folder)
            for share in (Share.NONE, Share.GROUP, Share.ALL)
        )
        assert alone & ~stat.S_IRWXU == 0, "no others, and no setuid"
        assert alone == mode & stat.S_IRWXU | (0o500 if is_folder else 0o400)
        readable = alone & 0o500
        assert group == alone | readable >> 3
        assert everybody == group | readable >> 6


@pytest.mark.root
@pytest.mark.parametrize("known", [True, False], ids=["group known", "group looked up"])
def test_root_gives_a_file_its_group_and_mode(tmp_path: Path, *, known: bool) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        current = os.fstat(file.fileno()).st_gid if known else None
        give_permissions(file.fileno(), 0o640, 4242, current_group=current)
    facts = path.stat()
    assert (stat.S_IMODE(facts.st_mode), facts.st_gid) == (0o640, 4242)
