"""Which users root has made something for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.base.node import users_of

if TYPE_CHECKING:
    from pathlib import Path


def test_only_the_numbers_of_users_are_taken_for_users(tmp_path: Path) -> None:
    odd = ("0", "00", "017", "-1", "\u0663", "\u00b2", "1 2", "5001x", "lost+found", "README")
    largest = str((1 << 32) - 2)
    for name in ("5002", "5001", largest, "4294967295", "99999999999", *odd):
        (tmp_path / ".slurm-stage" / name).mkdir(parents=True)
    assert users_of(str(tmp_path)) == [5001, 5002, int(largest)]


def test_a_root_without_records_has_no_users(tmp_path: Path) -> None:
    assert users_of(str(tmp_path)) == []
