"""The least recently used copies of all users are evicted, and no more than necessary."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base.rules import Rules, amount_of
from stager.node.headroom import make_headroom, shares, shortfall

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ENTRIES = st.lists(
    st.tuples(st.integers(0, 9).map(float), st.integers(1, 50).map(float)), max_size=6
)


@given(st.dictionaries(st.integers(5000, 5003), ENTRIES.map(sorted)), st.integers(-10, 300))
def test_the_oldest_copies_are_chosen_and_no_more_than_necessary(
    may_go: dict[int, list[tuple[float, float]]], goal: int
) -> None:
    counts = shares(may_go, goal)
    gone = [pair for uid, count in counts.items() for pair in may_go[uid][:count]]
    left = [pair for uid, pairs in may_go.items() for pair in pairs[counts.get(uid, 0) :]]
    freed = sum(size for _, size in gone)
    assert freed >= goal or not left
    assert not gone or max(gone)[0] <= min([*left, (9.0, 0.0)])[0]
    # Without the last of them it were too little.
    last = max((pair[0] for pair in gone), default=0.0)
    assert not gone or freed - max(size for at, size in gone if at == last) < goal


class Users:
    """Users with copies on a disk, as `stager.node.tidy` would answer for them."""

    def __init__(self, root: Path, free: float) -> None:
        self.root = str(root)
        self.free = free
        #: Time of use, bytes that the user claims, bytes that are freed.
        self.copies: dict[int, list[tuple[float, float, float]]] = {}
        self.silent: set[int] = set()
        self.asked: list[tuple[int, int]] = []

    def add(self, uid: int, *copies: tuple[float, float, float]) -> None:
        self.copies[uid] = sorted(copies)

    def ask(
        self, uid: int, options: Sequence[str], rules: Rules, limit: float
    ) -> dict[str, Any] | None:
        count = int(options[3]) if "--oldest" in options else 0
        goal = float(options[5]) if count else 0
        self.asked.append((uid, count))
        if uid in self.silent:
            return None
        gone, begun = 0, self.free
        while gone < count and self.free - begun < goal and self.copies[uid]:
            self.free += self.copies[uid].pop(0)[2]
            gone += 1
        return {"evicted": gone, "may_go": [[at, size] for at, size, _ in self.copies[uid]]}

    def shortfall(self, root: str, rules: Rules) -> float:
        return amount_of(rules.headroom, 0) - self.free

    def make_headroom(self, headroom: int, roots: int = 1) -> int:
        self.asked.clear()
        return make_headroom(Rules([self.root] * roots, [], 0, headroom, ""), self.ask)


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Users:
    """A disk of which 100 bytes are free."""
    users = Users(tmp_path, 100)
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    monkeypatch.setattr("stager.node.headroom.shortfall", users.shortfall)
    monkeypatch.setattr("stager.node.headroom.users_of", lambda _: sorted(users.copies))
    return users


def test_users_are_asked_only_where_headroom_is_missing(users: Users) -> None:
    users.add(5001, (1, 50, 50), (2, 50, 50))
    assert (users.make_headroom(100), users.asked) == (0, [])
    assert (users.make_headroom(140), users.asked) == (1, [(5001, 0), (5001, 1)])


def test_a_forged_size_keeps_no_copy_of_others(users: Users) -> None:
    users.add(5001, (5, 50, 50), (6, 50, 50))
    users.add(5002, (1, 9e14, 1), (2, 9e14, 1))
    assert users.make_headroom(140) == 3
    # The second time user 5002's sizes count for nothing.
    assert users.asked == [(5001, 0), (5002, 0), (5002, 1), (5002, 1), (5001, 1)]
    assert [at for at, _, _ in users.copies[5001]] == [6]


def test_copies_that_free_less_than_their_size_are_made_up_for_and_no_more(users: Users) -> None:
    users.add(5001, *((at, 10, 5) for at in range(40)))
    assert users.make_headroom(180) == 16
    assert users.free == 180


def test_the_copies_of_a_forger_go_before_newer_ones_of_others(users: Users) -> None:
    users.add(5001, *((at, 10, 10) for at in range(20, 30)))
    users.add(5002, *((at, 9e14, 10) for at in range(10)))
    users.make_headroom(200)
    assert (len(users.copies[5001]), len(users.copies[5002])) == (10, 0)


def test_an_answer_that_is_no_list_of_numbers_evicts_nothing(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    users.add(5001)
    bad = {"may_go": [["x"], [2, -1], [1, 10**400], 7, None], "evicted": 10**6}
    monkeypatch.setattr(users, "ask", lambda *_: bad)
    assert users.make_headroom(200) == 0


def test_a_silent_user_is_asked_once_and_last_the_next_time(users: Users) -> None:
    users.add(5001, (1, 50, 50))
    users.add(5002, (2, 50, 50))
    users.silent.add(5001)
    assert users.make_headroom(1000, roots=2) == 1
    assert users.asked == [(5001, 0), (5002, 0), (5002, 1), (5002, 0)]
    users.make_headroom(1000)
    assert users.asked == [(5002, 0), (5001, 0)]
    users.silent.clear()
    users.make_headroom(1000)
    users.make_headroom(1000)
    assert users.asked[0] == (5001, 0)


def test_a_slow_user_is_asked_last_at_once_and_the_next_time(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or bob, who stops his process for a while each time, uses up the time for all others."""
    users.add(5001, (1, 9e14, 0), (2, 50, 0))
    users.add(5002, (3, 50, 50), (4, 50, 50))
    now = [0.0]
    monkeypatch.setattr("stager.node.headroom.time.monotonic", lambda: now[0])

    def ask(uid: int, *rest: Any) -> dict[str, Any] | None:
        now[0] += 4.9 * (uid == 5001)
        return Users.ask(users, uid, *rest)

    monkeypatch.setattr(users, "ask", ask)
    users.make_headroom(140)
    assert users.asked == [(5001, 0), (5002, 0), (5001, 1), (5002, 1)]
    users.make_headroom(1000)
    assert users.asked == [(5002, 0), (5001, 0), (5002, 1), (5001, 1)]


def test_no_user_is_asked_after_the_time_is_up(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    users.add(5001, (1, 50, 50))
    monkeypatch.setattr("stager.node.headroom._LIMIT", 0)
    assert (users.make_headroom(1000), users.asked) == (0, [])


def test_the_shortfall_of_a_disk_is_that_of_the_system(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    rules = Rules([], [], 0, 1 << 60, "")
    assert (
        abs(shortfall(str(tmp_path), rules) - (1 << 60) + disk.f_bavail * disk.f_frsize) < 1 << 33
    )
    assert shortfall(f"{tmp_path}/none", rules) == 0
    whole = disk.f_blocks * disk.f_frsize
    assert shortfall(str(tmp_path), replace(rules, keep_free=whole)) == 0
