"""A user works in a folder while it is staged again, and loses nothing."""

from __future__ import annotations

import os
import random
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.support.meddler import Meddler
from tests.support.stagectl import STAGECTL, environment

if TYPE_CHECKING:
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
    line = [
        *STAGECTL, "stage", "--config", str(desk.config), "--local", "3",
        "--local-root", str(desk.nodes), f"{source}:/nvme/set{option}",
    ]  # fmt: skip
    copy, disk = desk.copy(1, "/nvme/set"), desk.copy(1, "/nvme")
    partial = disk / f".slurm-stage/{os.getuid()}/partial"
    with closing(Meddler(copy, elsewhere, seed)) as meddler:
        with subprocess.Popen(line, stdout=subprocess.PIPE, env=environment()) as stage:
            while stage.poll() is None:
                # The survey, which finds and spares a user's files, is over.
                if any(partial.iterdir()):
                    meddler.act()
        assert stage.returncode == 0
        assert meddler.lost(disk, elsewhere) == set()
