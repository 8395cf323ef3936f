"""The program that runs these tests in a root of another Debian makes that in its own folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.stagectl import Ran, environment, run

PROGRAM = Path(__file__).parent / "majors"


@pytest.mark.parametrize("suite", ["../../tests", "..", "/tmp", "-x", "Sid", "a b", ""])
def test_what_is_no_name_of_a_suite_is_refused_before_anything_is_made_or_removed(
    tmp_path: Path, suite: str
) -> None:
    folder = tmp_path / "tests/cluster"
    folder.mkdir(parents=True)
    program = str(shutil.copy(PROGRAM, folder))
    refused = run([program, suite], tmp_path, environment(PACKAGES="slurmd"))
    usage = f"usage: PACKAGES='...' {program} SUITE [ARGUMENT OF PYTEST]...\n"
    assert refused == Ran(2, "", usage)
    assert [*tmp_path.rglob("*")] == [tmp_path / "tests", folder, folder / "majors"]
