"""The program that runs these tests in a root of another Debian makes that in its own folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.stagectl import Ran, environment, run

pytestmark = pytest.mark.nightly

PROGRAM = Path(__file__).parent / "majors"


@pytest.mark.parametrize("suite", ["../../tests", "..", "/tmp", "-x", "Sid", "a b", ""])
def test_what_is_no_name_of_a_suite_is_refused_before_anything_is_made_or_removed(
    tmp_path: Path, suite: str
) -> None:
    folder = tmp_path / "tests/cluster"
    folder.mkdir(parents=True)
    program = str(shutil.copy(PROGRAM, folder))
    refused = run([program, suite], tmp_path, environment(PACKAGES="slurmd"))
    usage = f"usage: PACKAGES='...' [SLURM_SOURCE=FOLDER] {program} SUITE [ARGUMENT OF PYTEST]...\n"
    assert refused == Ran(2, "", usage)
    assert [*tmp_path.rglob("*")] == [tmp_path / "tests", folder, folder / "majors"]


def test_a_folder_that_is_no_source_of_slurm_is_refused(tmp_path: Path) -> None:
    program = str(shutil.copy(PROGRAM, tmp_path))
    (tmp_path / "META").write_text("  Version:\t../..\n")
    variables = environment(PACKAGES="slurmd", SLURM_SOURCE=str(tmp_path))
    refused = run([program, "trixie"], tmp_path, variables)
    assert refused == Ran(
        2,
        "",
        f"{program}: SLURM_SOURCE={tmp_path} is not the source of a release of Slurm: it has no "
        "configure, or no META with a version\n",
    )
