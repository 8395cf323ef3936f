"""Stage, have the power fail, and stage again: a real disk that loses what was not flushed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "support/logged_disk.c"
#: How often the power is cut. By hand: STAGE_POWER_CUTS=50 STAGE_POWER_SEED=2 pytest …
CUTS = int(os.environ.get("STAGE_POWER_CUTS", "6"))
SEED = os.environ.get("STAGE_POWER_SEED", "1")
#: What is left of the file and of the folder: nothing, the old one or the new one.
LEFT = ("0", "1", "2")


@pytest.mark.root
def test_after_a_power_failure_each_copy_is_absent_old_or_whole_and_the_next_job_stages(
    tmp_path: Path,
) -> None:
    program = tmp_path / "logged_disk"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-I/usr/include/fuse3"]
    subprocess.run(["gcc", "-o", str(program), *flags, str(SOURCE), "-lfuse3"], check=True)
    power = ["unshare", "--mount", sys.executable, "-m", "tests.support.power"]
    line = [*power, str(tmp_path), str(program), SEED, str(CUTS)]
    said = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout
    lines = [line for line in said.splitlines() if not line.startswith("{")]  # no event
    after = [line.partition(" ")[2] for line in lines]
    expected = {f"{file} {folder} then 2 2" for file in LEFT for folder in LEFT}
    assert [line for line in after if line not in expected] == []
    assert len(after) == CUTS
