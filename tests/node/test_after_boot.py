"""After a boot, all users are asked once to remove what they were writing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from stager.base.rules import Rules
from stager.node import prolog
from stager.node.prolog import remove_unfinished
from tests.support.users import give_records_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.root


class Node:
    """A node whose /run is ``run``, and the users whom its clean-ups ask."""

    def __init__(self, run: Path, root: Path) -> None:
        self.waiting = run / "after-boot.json"
        self.asked: list[int] = []
        self.silent: set[int] = set()
        self._rules = Rules([str(root), "/nowhere"], [], 0, 0, "")

    def end_job(self, uid: int) -> list[int]:
        """Clean up after a job of this user; return who else was asked."""
        self.asked.clear()
        remove_unfinished(self._rules, self._ask, uid)
        return list(self.asked)

    def _ask(
        self, uid: int, options: Sequence[str], rules: Rules, limit: float
    ) -> dict[str, Any] | None:
        assert (options, rules, limit) == ([], self._rules, 2)
        self.asked.append(uid)
        return None if uid in self.silent else {}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    for uid in (5001, 5002, 5003):
        give_records_folder(tmp_path / "nvme", uid)
    (tmp_path / "nvme/.slurm-stage/notes").mkdir()
    return Node(tmp_path, tmp_path / "nvme")


def test_all_other_users_are_asked_after_the_first_job_and_not_again(node: Node) -> None:
    assert node.end_job(5002) == [5001, 5003]
    assert node.end_job(5001) == []
    node.waiting.unlink()  # a boot
    assert node.end_job(5001) == [5002, 5003]


def test_who_was_not_asked_in_time_is_asked_after_the_next_job(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prolog, "_LIMIT", 0.0)
    assert node.end_job(5002) == []
    assert json.loads(node.waiting.read_text()) == {"5001": 5, "5003": 5}
    monkeypatch.undo()
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(node.waiting.parent))
    assert node.end_job(5003) == [5001]
    assert node.end_job(5003) == []


def test_who_does_not_answer_is_asked_five_times_and_last(node: Node) -> None:
    node.silent.add(5001)
    asked = [node.end_job(5002) for _ in range(6)]
    assert asked == [[5001, 5003], [5001], [5001], [5001], [5001], []]


def test_nothing_is_written_where_nobody_has_to_be_asked(node: Node) -> None:
    node.end_job(5002)
    before = node.waiting.stat().st_ino
    node.end_job(5002)
    assert node.waiting.stat().st_ino == before
