"""The choice of copies to evict, and the candidates for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.store.space import Candidate, Held, choose, find_candidates, oldest
from tests.support.copies import MIB, Node, kept
from tests.support.users import on_tmpfs

if TYPE_CHECKING:
    from pathlib import Path


KEPT = st.lists(
    st.builds(
        kept, st.text("abc", min_size=1, max_size=3), st.integers(0, 9), st.integers(0, 5),
        held=st.sampled_from([None, Held.PINNED]), job=st.booleans(),
    ),
    max_size=8, unique_by=lambda one: one.record.destination,
)  # fmt: skip


@given(KEPT, st.integers(-5, 40))
def test_the_selection_is_enough_and_minimal(every: list[Candidate], goal: int) -> None:
    chosen = choose(every, goal)
    freed = sum(one.size for one in chosen)
    assert freed >= goal or chosen == oldest(every)
    assert all(one.may_go for one in chosen)
    if freed >= goal:
        assert all(freed - one.size < goal for one in chosen)


@given(KEPT)
def test_copies_for_a_job_go_first_and_then_the_least_recently_used(
    every: list[Candidate],
) -> None:
    keys = [(one.record.lifetime != "job", one.record.used_at) for one in oldest(every)]
    assert keys == sorted(keys)
    assert {one.record.destination for one in oldest(every)} == {
        one.record.destination for one in every if one.may_go and one.size
    }


def test_a_large_copy_that_must_go_spares_the_small_ones_before_it() -> None:
    small, large, late = kept("a", 1, 1), kept("b", 10, 2), kept("c", 10, 3)
    assert choose([late, large, small], 10) == [large]
    assert choose([late, large, small], 11) == [small, large]


def test_a_cache_in_which_nothing_was_staged_yet_is_empty(node: Node) -> None:
    os.rmdir(f"{node.cache.folder}/records")
    assert find_candidates(node.cache) == []


@pytest.mark.root
def test_a_copy_on_another_filesystem_or_behind_a_link_frees_nothing(
    node: Node, tmp_path: Path
) -> None:
    """Only a forged record names such a path; the filesystem there may not answer."""
    for name in ("link", "mounted"):
        (node.disk / name).mkdir()
        node.put(f"{name}/a", MIB)
    (node.disk / "link").rename(tmp_path / "elsewhere")
    (node.disk / "link").symlink_to(tmp_path / "elsewhere")

    def act() -> list[int]:
        sizes = [one.size for one in find_candidates(node.cache)]
        assert node.remove("mounted/a") is not None
        return sizes

    assert on_tmpfs(node.disk / "mounted", "size=4m", act) == [0, 0]
    assert (node.disk / "mounted/a").exists()


def test_removing_a_copy_with_a_second_name_frees_nothing(node: Node) -> None:
    node.put("a", 100_000)
    (node.disk / "b").hardlink_to(node.disk / "a")
    assert [one.size for one in find_candidates(node.cache)] == [0]
