"""``stagectl plan``: it tells what would move, and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.desk import ALL, Desk
from tests.support.stagectl import Ran

if TYPE_CHECKING:
    from pathlib import Path


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """All that lies beneath ``folder``, with inode and mtime in nanoseconds."""
    return {
        str(path): ((facts := path.lstat()).st_ino, facts.st_mtime_ns) for path in folder.rglob("*")
    }


def test_a_plan_prints_what_would_move_and_changes_nothing(staged: tuple[Desk, Ran]) -> None:
    desk, _ = staged
    before = snapshot(desk.folder)
    ran = desk.local("plan", f"{desk.source}:/nvme/img.sqsh; {desk.source}:/nvme/a/b")
    assert ran == Ran(
        0,
        f"stage: /nvme/img.sqsh: current on {ALL}, nothing would move\n"
        f"stage: /nvme/a/b: 293.0 KiB would move from {desk.source} to {ALL} (absent)\n",
        "",
    )
    assert snapshot(desk.folder) == before


def test_a_plan_for_new_nodes_makes_nothing(desk: Desk) -> None:
    before = snapshot(desk.folder)
    ran = desk.local("plan", f"{desk.source}:/nvme/img.sqsh")
    assert ran == Ran(
        0,
        f"stage: /nvme/img.sqsh: 293.0 KiB would move from {desk.source} to {ALL} (absent)\n",
        "",
    )
    assert snapshot(desk.folder) == before
