"""What a node's old copy has of a new tree."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from stager.rank.reuse import _names
from stager.tree.table import Table
from stager.tree.walk import walk

if TYPE_CHECKING:
    from pathlib import Path


def test_another_name_that_a_staged_file_got_since_the_survey_was_not_there(tmp_path: Path) -> None:
    for name in ("same", "sub/other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    staged = walk(str(tmp_path))
    table = Table.of(staged, staged, bytes(16 * len(staged)), {})
    (tmp_path / "own").write_text("before the survey")
    time.sleep(0.02)  # the kernel's clock for files has ticks of up to 10 ms
    since = time.time_ns()
    names = [b"", b"own", b"same", b"sub", b"sub/other"]
    assert [*_names(walk(str(tmp_path)), table, since)] == names
    time.sleep(0.02)
    for name in ("before", "tagged"):  # each side of its file in the order of a listing
        os.link(tmp_path / "same", tmp_path / name)
    assert [*_names(walk(str(tmp_path)), table, since)] == names
