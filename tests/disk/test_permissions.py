"""A copy gives nobody more rights than its source, whoever they are."""

from __future__ import annotations

import os
import stat
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.disk.cache import open_cache
from stager.disk.partial import Partial
from stager.disk.permissions import (
    file_mode,
    folder_mode,
    give_permissions,
    other_group_mode,
    private_mode,
    unpacked_mode,
)
from tests.support.users import USER, as_user

if TYPE_CHECKING:
    from collections.abc import Callable

READ = 0o4
#: Every combination of permission bits.
ALL_MODES = range(0o10000)
MODES = st.integers(0, 0o7777)
BOTH = pytest.mark.parametrize("rule", [file_mode, folder_mode])


def rights(mode: int, *, member: bool) -> int:
    """The rights of somebody who is not the owner: bits of rwx."""
    return (mode >> 3 if member else mode) & 0o7


@BOTH
def test_no_rule_gives_a_right_that_the_source_did_not_give(rule: Callable[[int], int]) -> None:
    for mode in ALL_MODES:
        for member in (True, False):
            granted = rights(rule(mode), member=member)
            assert granted & ~rights(mode, member=member) == 0
            assert granted == rights(mode, member=member) & 0o5


@BOTH
def test_with_another_group_no_member_of_either_gets_more(rule: Callable[[int], int]) -> None:
    for mode in ALL_MODES:
        copied = other_group_mode(rule(mode))
        # Somebody may be in the group of the source, of the copy, in both or in neither.
        for before, after in product((True, False), repeat=2):
            granted = rights(copied, member=after)
            assert granted & ~rights(mode, member=before) == 0


@BOTH
def test_the_owner_may_read_and_keeps_the_right_to_write(rule: Callable[[int], int]) -> None:
    for mode in ALL_MODES:
        for copied in (rule(mode), other_group_mode(rule(mode))):
            assert copied & stat.S_IRUSR
            assert copied & stat.S_IWUSR == mode & stat.S_IWUSR


def test_no_file_keeps_a_special_bit_and_no_folder_its_setuid() -> None:
    for mode in ALL_MODES:
        assert file_mode(mode) & 0o7000 == 0
        assert folder_mode(mode) & 0o7000 == mode & 0o3000
        assert other_group_mode(folder_mode(mode)) & 0o7000 == mode & 0o1000


def test_a_private_mode_is_what_the_owner_has() -> None:
    for mode in ALL_MODES:
        assert private_mode(mode) == mode & 0o700


@given(MODES, MODES)
def test_nobody_enters_an_unpacked_folder_who_may_not_read_the_archive(
    mode: int, archive_mode: int
) -> None:
    same_group = unpacked_mode(mode, archive_mode)
    for member in (True, False):
        may_read = rights(archive_mode, member=member) & READ
        assert may_read or not rights(same_group, member=member)
        assert rights(same_group, member=member) & ~rights(mode, member=member) == 0
    for before, after in product((True, False), repeat=2):
        may_read = rights(archive_mode, member=before) & READ
        assert may_read or not rights(other_group_mode(same_group), member=after)


@given(MODES, MODES)
def test_the_rule_for_an_unpacked_folder_is_no_wider_than_that_for_a_folder(
    mode: int, archive_mode: int
) -> None:
    assert unpacked_mode(mode, archive_mode) & ~folder_mode(mode) == 0


@pytest.mark.parametrize(
    ("mode", "given_mode"),
    [(0o644, 0o644), (0o755, 0o755), (0o640, 0o600), (0o2775, 0o755), (0o604, 0o600)],
    ids=oct,
)
def test_without_its_group_a_copy_gives_what_group_and_others_both_had(
    mode: int, given_mode: int
) -> None:
    assert other_group_mode(mode) == given_mode


@pytest.mark.root
@pytest.mark.parametrize("known", [True, False], ids=["group known", "group looked up"])
def test_root_gives_a_file_its_group_and_mode(tmp_path: Path, *, known: bool) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        current = os.fstat(file.fileno()).st_gid if known else None
        give_permissions(file.fileno(), 0o640, 4242, current_group=current)
    facts = path.stat()
    assert (stat.S_IMODE(facts.st_mode), facts.st_gid) == (0o640, 4242)


@pytest.mark.root
@pytest.mark.parametrize(("mode", "given"), [(0o644, 0o644), (0o640, 0o600), (0o755, 0o755)])
def test_a_group_that_the_user_is_not_in_gives_its_right_to_nobody(mode: int, given: int) -> None:
    def act() -> int:
        with tempfile.TemporaryDirectory() as folder:
            partial = Partial(open_cache(folder, os.getuid()), direct=True)
            partial.seal(mode, 4242, 0)
            path = Path(folder) / "file"
            partial.publish(str(path))
            partial.close()
            return stat.S_IMODE(path.stat().st_mode)

    assert as_user(USER, act) == given
