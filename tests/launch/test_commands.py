"""Where Slurm's commands are looked for, and what is said where there is no srun."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stager.base.errors import LaunchError
from stager.launch import job
from stager.launch.job import answer, complaint, find_srun, search_path
from tests.support.users import as_ordinary_user

if TYPE_CHECKING:
    from pathlib import Path


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\necho {text}\n")
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of the system."""
    monkeypatch.setattr(job, "FOLDERS", (str(tmp_path / "system"),))
    (tmp_path / "system").mkdir()
    (tmp_path / "opt").mkdir()
    return tmp_path


def test_the_commands_are_those_beside_the_srun_that_is_named(slurm: Path) -> None:
    program(slurm / "opt/srun", "srun")
    program(slurm / "opt/sinfo", "named")
    for name in ("sinfo", "squeue"):
        program(slurm / "system" / name, "system")
    srun = f"{slurm}/opt/srun"
    assert find_srun(srun) == srun
    assert answer(["sinfo"], srun, 5) == "named\n"
    assert answer(["squeue"], srun, 5) == "system\n"
    assert answer(["sinfo"], "srun", 5) == "system\n"
    assert answer(["scancel"], srun, 5) == ""


def test_why_a_command_fails(slurm: Path) -> None:
    program(slurm / "system/scontrol", "good")
    (slurm / "system/scancel").write_text("#!/bin/sh\necho no $WORD >&2; exit ${CODE-1}\n")
    (slurm / "system/scancel").chmod(0o755)
    variables = {"WORD": "right"}
    assert complaint(["scontrol"], "srun", 5, {}) == ""
    assert complaint(["scancel"], "srun", 5, variables) == "no right"
    assert complaint(["scancel"], "srun", 5, {"CODE": "0"}) == ""
    assert complaint(["sinfo"], "srun", 5, {}) == "sinfo: No such file or directory"


def test_a_bare_name_is_looked_for_in_the_systems_folders(slurm: Path) -> None:
    program(slurm / "system/srun", "srun")
    assert find_srun("srun") == f"{slurm}/system/srun"


def test_root_alone_looks_into_no_folder_of_path(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"bin::{slurm}/own:{slurm}/system")
    assert as_ordinary_user(lambda: search_path("srun")) == f"{slurm}/system:{slurm}/own"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert search_path("srun") == f"{slurm}/system"
    assert search_path("/opt/bin/srun") == f"/opt/bin:{slurm}/system"


def test_without_srun_the_folders_and_the_setting_are_named(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{slurm}/system")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    with pytest.raises(LaunchError) as caught:
        find_srun("srun")
    assert str(caught.value) == (
        f"n1: srun is in none of the folders {slurm}/system; tell the administrator to name it in "
        'stage.toml (srun = "/PATH/srun" in [launch])'
    )
    (slurm / "opt/srun").touch(mode=0o644)
    with pytest.raises(LaunchError) as caught:
        find_srun(f"{slurm}/opt/srun")
    assert str(caught.value) == (
        f"n1: {slurm}/opt/srun, which stage.toml names, is not there or cannot be run; tell the "
        "administrator to correct srun in [launch]"
    )
