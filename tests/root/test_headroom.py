"""The least recently used copies of all users are evicted, and no more than necessary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from stager.root.headroom import make_headroom, shares
from stager.root.rules import Rules

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

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


def test_users_are_asked_only_where_headroom_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    asked: list[tuple[int, list[str]]] = []
    (tmp_path / ".slurm-stage/5001").mkdir(parents=True)
    (tmp_path / ".slurm-stage/notes").mkdir()

    def ask(uid: int, options: Any, rules: Rules) -> dict[str, Any]:
        asked.append((uid, list(options)))
        return {"may_go": [[1, 1 << 40], ["x"], [2, -1], [1, 10**400]], "evicted": 1}

    root = str(tmp_path)
    assert make_headroom(Rules([root], [], 0, 0, 1, ""), ask) == 0
    assert asked == []
    assert make_headroom(Rules([root, "/nowhere"], [], 0, 0, 1 << 59, ""), ask) == 1
    assert asked == [(5001, ["--root", root]), (5001, ["--root", root, "--oldest", "1"])]
