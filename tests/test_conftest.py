"""What the tests of all packages find: a temporary folder that no other run of pytest removes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_a_run_has_a_temporary_folder_of_its_own_that_all_users_may_enter(tmp_path: Path) -> None:
    own, *others = [folder for folder in tmp_path.parents if folder.stat().st_mode & 0o777 == 0o755]
    assert not any(folder.name.startswith("pytest-of-") for folder in (own, *others))
    assert tmp_path.stat().st_mode & 0o777 == 0o755
