"""How much memory is left in control groups of both versions, by files as the kernel has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stager.base import memory
from stager.base.memory import is_in_memory, memory_left

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("most", "used", "prefix"),
    [
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_the_group_with_the_least_left_counts_without_what_the_kernel_gives_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str, used: str, prefix: str
) -> None:
    groups = [tmp_path / "job", tmp_path / "job/step", tmp_path / "job/step/task"]
    groups[-1].mkdir(parents=True)
    no_limit = "max" if most == "memory.max" else "9223372036854771712"
    for group, limit, in_use, cached in zip(
        groups, ("1000", "700", no_limit), ("600", "250", "250"), (500, 0, 0), strict=True
    ):
        (group / most).write_text(f"{limit}\n")
        (group / used).write_text(f"{in_use}\n")
        stat = f"inactive_file 1\n{prefix}inactive_file {cached}\n{prefix}active_file 10\nshmem 9\n"
        (group / "memory.stat").write_text(stat)
    monkeypatch.setattr(memory, "_groups", lambda: iter(map(str, groups)))
    assert memory_left() == min(1000 - 600 + 500 + 10, 700 - 250 + 10)
    monkeypatch.setattr(memory, "_groups", lambda: iter([str(groups[-1]), str(tmp_path)]))
    assert memory_left() is None


def test_a_folder_is_in_memory_or_not() -> None:
    assert (is_in_memory("/dev/shm"), is_in_memory("/proc")) == (True, False)
