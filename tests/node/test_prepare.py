"""Root prepares all disks of a node for a user and marks the job."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stager.node.prolog import main, prepare
from tests.support.disks import owners
from tests.support.users import USER, on_tmpfs

#: A user that every system knows, since `prepare` looks for the user's group.
KNOWN = 65534  # nobody

NOT_ROOTS = "roots is not a list of absolute paths"
#: Faults of a stage.toml, and how they are complained of behind "uid N, FILE: ".
FAULTS: dict[str, tuple[bytes, str]] = {
    "a string": (b'roots = "/nvme"', NOT_ROOTS),
    "a number among them": (b'roots = ["/nvme", 1]', NOT_ROOTS),
    "a relative path": (b'roots = ["nvme"]', NOT_ROOTS),
    "an empty path": (b'roots = [""]', NOT_ROOTS),
    "a table": (b"[roots]", NOT_ROOTS),
    "no roots": (b"lock_timeout = 5", "roots is missing"),
    "not TOML": (b"roots = [", "Invalid value (at end of document)"),
    "not UTF-8": (
        b'roots = ["/\xff"]',
        "'utf-8' codec can't decode byte 0xff in position 11: invalid start byte",
    ),
}


@pytest.mark.parametrize(("text", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_stage_toml_is_reported_and_nothing_is_made(
    tmp_path: Path, text: bytes, fault: str
) -> None:
    config = tmp_path / "stage.toml"
    config.write_bytes(text)
    complaints: list[str] = []
    assert prepare(str(config), KNOWN, complaints.append) == 1
    assert complaints == [f"no folders were made for uid {KNOWN}: {config}: {fault}; correct it"]


def test_a_missing_stage_toml_is_reported(tmp_path: Path) -> None:
    complaints: list[str] = []
    assert prepare(f"{tmp_path}/none", KNOWN, complaints.append) == 1
    absent = "No such file or directory; restore it, or correct config= in plugstack.conf"
    assert complaints == [f"no folders were made for uid {KNOWN}: {tmp_path}/none: {absent}"]


def test_a_user_whom_the_node_does_not_know_is_reported(tmp_path: Path) -> None:
    config = tmp_path / "stage.toml"
    config.write_text("roots = []")
    complaints: list[str] = []
    assert prepare(str(config), USER, complaints.append) == 1
    remedy = f"check its user database (getent passwd {USER})"
    assert complaints == [
        f"no folders were made for uid {USER}: this node knows no such user; {remedy}"
    ]


# A whole run


def prepared(root: Path, roots: list[str]) -> tuple[int, list[str], list[str]]:
    """Return the code and complaints of `prepare` for KNOWN, and what it made in a private /run."""
    config = root / "stage.toml"
    config.write_text(f"roots = {json.dumps(roots)}")

    def act() -> tuple[int, list[str], list[str]]:
        complaints: list[str] = []
        code = prepare(str(config), KNOWN, complaints.append)
        return code, complaints, sorted(owners(Path("/run")))

    return on_tmpfs(Path("/run"), "mode=755", act)


#: What is there once a user's folder was looked at.
LOCKED = ["slurm-stage", "slurm-stage/taken.lock"]
#: What a run that made all leaves for the plugin.
NOTED = ["slurm-stage", f"slurm-stage/{KNOWN}.prepared"]


@pytest.mark.root
def test_a_user_gets_a_folder_on_every_disk(root: Path) -> None:
    for name in ("one", "two"):
        (root / name).mkdir()
    assert prepared(root, [f"{root}/one", f"{root}/two"]) == (0, [], NOTED)
    for name in ("one", "two"):
        assert owners(root / name) == {
            ".slurm-stage": (0, 0, "drwxr-xr-x"),
            f".slurm-stage/{KNOWN}": (KNOWN, KNOWN, "drwx------"),
        }


@pytest.mark.root
def test_without_a_user_root_has_its_folder_on_every_disk(root: Path) -> None:
    """So it is when slurmd starts: then no user can take the name."""
    config = root / "stage.toml"
    config.write_text(f'roots = ["{root}/one", "{root}/absent"]')
    (root / "one").mkdir()
    assert main(["--config", str(config)]) == 0
    assert owners(root / "one") == {".slurm-stage": (0, 0, "drwxr-xr-x")}


@pytest.mark.root
def test_the_note_has_the_version_of_stage_toml_and_the_parents_of_all_folders(
    root: Path,
) -> None:
    config = root / "stage.toml"
    config.write_text(f'roots = ["{root}"]')

    def act() -> list[tuple[int, str]]:
        found = []
        note = Path(f"/run/slurm-stage/{KNOWN}.prepared")
        for _ in range(2):
            found.append((prepare(str(config), KNOWN, print), note.read_text()))
        assert stat.filemode(note.stat().st_mode) == "-rw-------"
        return found

    facts = config.stat()
    text = f"{facts.st_dev} {facts.st_ino} {facts.st_ctime_ns}\n{root}/.slurm-stage\n"
    assert on_tmpfs(Path("/run"), "mode=755", act) == [(0, text)] * 2


@pytest.mark.root
def test_a_missing_disk_is_no_error(root: Path) -> None:
    assert prepared(root, [f"{root}/nowhere"]) == (0, [], [])


@pytest.mark.root
def test_a_disk_that_cannot_be_prepared_is_reported_and_the_others_are_prepared(
    root: Path,
) -> None:
    for name in ("bad", "good"):
        (root / name).mkdir()
    (root / "bad/.slurm-stage").mkdir()
    os.chown(root / "bad/.slurm-stage", USER, USER)
    (root / "bad/.slurm-stage/0").mkdir()
    bad = f"{root}/bad/.slurm-stage"
    complaint = (
        f"{bad} belongs to uid {USER}, not to root; if it has folders of several users, it has the "
        f"records of all copies: chown root {bad}; else remove it"
    )
    assert prepared(root, [f"{root}/bad", f"{root}/good"]) == (1, [complaint], LOCKED)
    assert list(owners(root / "good")) == [".slurm-stage", f".slurm-stage/{KNOWN}"]


@pytest.mark.root
def test_what_was_moved_out_of_the_way_is_reported(root: Path) -> None:
    (root / ".slurm-stage").mkdir()
    os.chown(root / ".slurm-stage", USER, USER)
    code, [complaint], note = prepared(root, [str(root)])
    [aside] = root.glob(".slurm-stage.of-*")
    assert complaint == f"{root}/.slurm-stage belonged to uid {USER}; it was moved to {aside}"
    assert (code, note) == (0, [*NOTED, "slurm-stage/taken.lock"])


def test_the_program_ends_with_1_where_it_could_not_prepare(tmp_path: Path) -> None:
    assert main(["--config", f"{tmp_path}/none", str(KNOWN)]) == 1


@pytest.mark.root
def test_the_program_ends_with_0_where_all_is_made(root: Path) -> None:
    (root / "stage.toml").write_text(f'roots = ["{root}"]')

    def act() -> tuple[int, str, list[str]]:
        done = subprocess.run(
            [sys.executable, "-I", "-m", "stager.node.prolog",
             "--config", root / "stage.toml", str(KNOWN)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, sorted(owners(root))

    names = [".slurm-stage", f".slurm-stage/{KNOWN}", "stage.toml"]
    assert on_tmpfs(Path("/run"), "mode=755", act) == (0, "", names)


@pytest.mark.parametrize("arguments", [[], ["--config", "x", "root"], ["0"]], ids=" ".join)
def test_the_program_ends_with_2_where_it_is_called_wrongly(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(
        "usage: stager.node.prolog [-h] --config CONFIG [--job JOB]\n"
    )


#: Runs the module as ``python -m`` does, and prints the modules that this took.
IMPORTS = """
import json, runpy, sys
before = set(sys.modules)
try:
    runpy.run_module("stager.node.prolog", run_name="__main__", alter_sys=True)
except SystemExit as end:
    names = {name.partition(".")[0] for name in set(sys.modules) - before}
    print(json.dumps([end.code, sorted(names - sys.stdlib_module_names)]))
"""


def test_root_imports_only_the_standard_library_and_this_project(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('not the standard library')")
    done = subprocess.run(
        [sys.executable, "-I", "-c", IMPORTS, "--config", f"{tmp_path}/none", str(KNOWN)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout) == [1, ["stager"]]
