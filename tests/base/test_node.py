"""Which users root has made something for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.base.users import users_of
from tests.support.users import USER, give_records_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.root
def test_only_the_numbers_of_users_are_taken_for_users(tmp_path: Path) -> None:
    odd = ("0", "00", "017", "-1", "\u0663", "\u00b2", "1 2", "5001x", "lost+found", "README")
    largest = (1 << 32) - 2
    for name in ("4294967295", "99999999999", *odd):
        (tmp_path / ".slurm-stage" / name).mkdir(parents=True)
    for uid in (5002, 5001, largest):
        give_records_folder(tmp_path, uid)
    assert users_of(str(tmp_path)) == [5001, 5002, largest]


@pytest.mark.root
def test_no_number_counts_that_its_user_does_not_own(tmp_path: Path) -> None:
    """Whoever is first on a disk may make the parent, with very many numbers in it."""
    parent = tmp_path / ".slurm-stage"
    for uid in (5001, 5002, USER):
        give_records_folder(tmp_path, uid)
        (parent / str(uid + 10)).mkdir()
    assert users_of(str(tmp_path)) == [5001, 5002, USER]
    os.chown(parent, USER, USER)
    assert users_of(str(tmp_path)) == [USER]
    os.chown(parent, 0, USER)
    parent.chmod(0o775)
    assert users_of(str(tmp_path)) == []


def test_a_root_without_records_has_no_users(tmp_path: Path) -> None:
    assert users_of(str(tmp_path)) == []
