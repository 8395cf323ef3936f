"""The wheel alone, in an empty environment, stages a file: it holds every package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.install


def run(*line: str | Path, folder: Path) -> str:
    """Run a program in ``folder``, without this checkout on any search path. Return its output."""
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: building leaves files beside the source."""
    folder = tmp_path_factory.mktemp("wheel")
    copied: list[str | Path] = [
        "git",
        "-C",
        REPOSITORY,
        "checkout-index",
        "--all",
        f"--prefix={folder}/source/",
    ]
    run(*copied, folder=folder)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, f"{folder}/source", folder=folder)
    (built,) = folder.glob("slurm_stage-*.whl")
    return built


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.endswith(".py")}
    listed = run("git", "ls-files", "stager/*.py", folder=REPOSITORY).split()
    assert held == set(listed)


def test_an_installed_wheel_stages_a_file_and_then_skips_it(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "env", folder=tmp_path)
    pip: list[str | Path] = [tmp_path / "env/bin/pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "install", f"{wheel}[local]", folder=tmp_path)
    (tmp_path / "img").write_bytes(b"image" * 1000)
    stage: list[str | Path] = [
        tmp_path / "env/bin/stagectl",
        "stage",
        "--local",
        "2",
        f"{tmp_path}/img:/nvme/img",
    ]
    first, second = (run(*stage, folder=tmp_path) for _ in range(2))
    assert first.startswith(f"stage: /nvme/img: 4.9 KiB from {tmp_path}/img to node[1-2] (2 nodes)")
    assert second.startswith("stage: /nvme/img: current on node[1-2] (2 nodes), nothing moved")
    copies = [(tmp_path / f"stage-nodes/node{n}/nvme/img").read_bytes() for n in (1, 2)]
    assert copies == [b"image" * 1000] * 2
