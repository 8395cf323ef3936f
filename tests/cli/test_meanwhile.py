"""A user works in a folder while it is staged again, and loses nothing."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.meddler import Meddler
from tests.support.stagectl import STAGECTL, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.desk import Desk


def write_version(source: Path, number: int, chance: random.Random) -> None:
    """Write most files of a folder anew, and delete some files and folders of it."""
    for folder in (source / f"{above}/{inner}" for above in "abcd" for inner in "xyz"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in range(25):
            if chance.random() < 0.7:
                lines = chance.choice([1, 3000])
                (folder / f"f{name}").write_text(f"version {number}\n" * lines)
            elif number > 1:
                (folder / f"f{name}").unlink(missing_ok=True)


@contextmanager
def staging(desk: Desk, directive: str) -> Iterator[subprocess.Popen[bytes]]:
    line = [
        *STAGECTL, "stage", "--config", str(desk.config), "--local", "3",
        "--local-root", str(desk.nodes), directive,
    ]  # fmt: skip
    with (
        (desk.folder / "output").open("wb") as output,
        subprocess.Popen(line, stdout=output, env=environment()) as stage,
    ):
        yield stage


def is_past_survey(desk: Desk) -> bool:
    """Whether node1 has begun to write."""
    partial = desk.copy(1, "/nvme") / f".slurm-stage/{os.getuid()}/partial"
    return partial.is_dir() and any(partial.iterdir())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("option", ["", ",replace"])
def test_what_a_user_does_in_a_folder_while_it_is_staged_again_is_kept(
    desk: Desk, option: str, seed: int
) -> None:
    chance = random.Random(seed)
    source, elsewhere = desk.folder / "set", desk.folder / "elsewhere"
    write_version(source, 1, chance)
    assert desk.local("stage", f"{source}:/nvme/set").code == 0
    write_version(source, 2, chance)
    copy, disk = desk.copy(1, "/nvme/set"), desk.copy(1, "/nvme")
    with closing(Meddler(copy, elsewhere, seed)) as meddler:
        with staging(desk, f"{source}:/nvme/set{option}") as stage:
            while stage.poll() is None:
                # The survey, in which `replace` has a user's files deleted, is over.
                if is_past_survey(desk):
                    meddler.act()
        assert stage.returncode == 0
        assert meddler.lost(disk, elsewhere) == set()


@pytest.mark.parametrize("option", ["", ",replace"])
def test_a_folder_that_is_moved_to_the_destination_meanwhile_is_kept(
    desk: Desk, option: str
) -> None:
    source, mine, copy = desk.folder / "set", desk.folder / "mine", desk.copy(1, "/nvme/set")
    write_version(source, 1, random.Random(1))
    for name in ("notes", "a/x/f1", "deep/er/inner"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("mine")
    time.sleep(0.1)  # it is older than the stage
    with staging(desk, f"{source}:/nvme/set{option}") as stage:
        while not is_past_survey(desk):
            assert stage.poll() is None
        mine.rename(copy)
    assert stage.returncode == 0
    kept = [path for path in copy.rglob("*") if path.is_file() and path.read_text() == "mine"]
    beside = "a/x/f1.before-staging" if (source / "a/x/f1").exists() else "a/x/f1"
    assert {str(path.relative_to(copy)) for path in kept} == {"notes", beside, "deep/er/inner"}
    note = "stage: /nvme/set: note: on node1, what was written there during the stage was kept: "
    assert (desk.folder / "output").read_text().endswith(f"{note}{beside}, deep, notes\n")


@pytest.mark.parametrize("option", ["", ",replace"])
def test_what_gets_another_name_while_it_is_staged_again_is_kept(desk: Desk, option: str) -> None:
    source, copy = desk.folder / "set", desk.copy(1, "/nvme/set")
    write_version(source, 1, random.Random(1))
    for name in ("same", "gone/inner"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    assert desk.local("stage", f"{source}:/nvme/set").code == 0
    write_version(source, 2, random.Random(2))
    shutil.rmtree(source / "gone")
    with staging(desk, f"{source}:/nvme/set{option}") as stage:
        while not is_past_survey(desk):
            assert stage.poll() is None
        (copy / "gone").rename(copy / "kept")
        (copy / "linked").hardlink_to(copy / "same")
    assert stage.returncode == 0
    found = {name: (copy / name).read_text() for name in ("same", "linked", "kept/inner")}
    assert found == {"same": "same", "linked": "same", "kept/inner": "gone/inner"}


@contextmanager
def failing(desk: Desk, directive: str) -> Iterator[None]:
    """Stage, and run the body when the survey is over; node2 fails when it is to publish."""
    announced = desk.copy(2, "/nvme") / f".slurm-stage/{os.getuid()}/announced"
    with staging(desk, directive) as stage:
        while not is_past_survey(desk):
            assert stage.poll() is None
        yield
        announced.rename(f"{announced}-gone")
        announced.touch()  # it is no folder
    announced.unlink()
    assert stage.returncode == 6


@pytest.mark.parametrize("option", ["", ",replace"])
def test_what_was_written_during_a_stage_that_failed_is_not_taken_for_staged(
    desk: Desk, option: str
) -> None:
    source, copy = desk.folder / "set", desk.copy(1, "/nvme/set")
    write_version(source, 1, random.Random(1))
    assert desk.local("stage", f"{source}:/nvme/set").code == 0
    (copy / "before").write_text("mine")
    if not option:
        (copy / "before").unlink()
    write_version(source, 2, random.Random(2))
    with failing(desk, f"{source}:/nvme/set{option}"):
        (copy / "result").write_text("mine")
    own = ["before", "result"] if option else ["result"]
    what = f"{len(own)} files that were" if option else "1 file that was"
    again = desk.local("stage", f"{source}:/nvme/set")
    assert (again.code, f"holds {what} added or changed after staging" in again.err) == (6, True)
    evicted = desk.simulated("evict", "/nvme/set")
    assert evicted.code == 3, evicted
    assert [(copy / name).read_text() for name in own] == ["mine"] * len(own)
    assert desk.local("stage", f"{source}:/nvme/set,replace").code == 0
    assert desk.simulated("verify").code == 0


def test_a_folder_that_was_moved_there_during_a_stage_that_failed_is_not_taken_for_staged(
    desk: Desk,
) -> None:
    source, copy = desk.folder / "set", desk.copy(1, "/nvme/set")
    mine = desk.copy(1, "/nvme") / "mine"
    write_version(source, 1, random.Random(1))
    assert desk.local("stage", f"{source}:/nvme/set").code == 0
    mine.mkdir()
    (mine / "thesis").write_text("mine")
    write_version(source, 2, random.Random(2))
    with failing(desk, f"{source}:/nvme/set"):
        copy.rename(desk.folder / "away")
        mine.rename(copy)
    assert desk.local("stage", f"{source}:/nvme/set").code == 6
    assert (copy / "thesis").read_text() == "mine"


def write_to_taken_over(desk: Desk, directive: str, name: str) -> int:
    """Stage, write to a file of the copy once it is taken over, and return the code."""
    copy = desk.copy(1, directive.partition(":")[2].partition(",")[0])
    partial = desk.copy(1, "/nvme") / f".slurm-stage/{os.getuid()}/partial"
    with staging(desk, directive) as stage:
        while not [*partial.glob(f"*/{name}")]:
            assert stage.poll() is None
        with (copy / name).open("a") as file:
            file.write(" and mine")
    return stage.returncode


@pytest.mark.parametrize("name", ["same", "bin/activate"])
def test_a_staged_file_that_is_written_to_meanwhile_is_staged_anew_and_kept_beside(
    desk: Desk, name: str
) -> None:
    """In an environment, some files are changed after they are received."""
    source = desk.folder / "set"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", source], check=True)
    (source / "same").write_text("staged")
    write_version(source / "data", 1, random.Random(1))
    directive = f"{source}:/nvme/set,relocate=venv"
    assert desk.local("stage", directive).code == 0
    staged = desk.copy(2, f"/nvme/set/{name}").read_text()
    write_version(source / "data", 2, random.Random(2))
    assert write_to_taken_over(desk, directive, name) == 0
    assert [desk.copy(n, f"/nvme/set/{name}").read_text() for n in (1, 2, 3)] == [staged] * 3
    beside = desk.copy(1, f"/nvme/set/{name}.before-staging")
    assert beside.read_text() == f"{staged} and mine"
    beside.unlink()
    assert desk.simulated("verify").code == 0


def test_a_staged_file_that_is_written_to_and_cannot_be_read_again_is_kept(desk: Desk) -> None:
    """The source has it compressed."""
    source = desk.folder / "set"
    write_version(source, 1, random.Random(1))
    (source / "same.gz").write_bytes(gzip.compress(b"staged"))
    directive = f"{source}:/nvme/set,decompress=*.gz"
    assert desk.local("stage", directive).code == 0
    write_version(source, 2, random.Random(2))
    assert write_to_taken_over(desk, directive, "same") == 6
    again = desk.local("stage", directive)
    assert (again.code, "1 file that was added or changed after staging: same;" in again.err) == (
        6,
        True,
    )
    assert desk.copy(1, "/nvme/set/same").read_text() == "staged and mine"
