"""An environment whose interpreter is on shared storage: that is noticed, or staged with it."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from stager.tree.venv import Interpreter, find_interpreter, note, rehomed, relinked, staged_at
from tests.support.stagectl import STAGECTL, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own, as shared storage is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def make(folder: Path, interpreter: Path | str) -> str:
    """An environment with links as `python3 -m venv` makes them."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to("python3")
    (folder / "bin/python3").symlink_to(interpreter)
    return str(folder)


@pytest.mark.root
def test_an_interpreter_beside_the_source_is_on_shared_storage(shared: Path) -> None:
    interpreter = shared / "home/python-3.12.1/bin/python3.12"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    (shared / "home/python-3.12").symlink_to("python-3.12.1")
    environment = make(shared / "env", shared / "home/python-3.12/bin/python3.12")
    (shared / "env/bin/python3-dbg").symlink_to("../../home/python-3.12/bin/python3.12")
    (shared / "env/bin/python2").symlink_to("/usr/bin/env")
    links = frozenset({b"bin/python3", b"bin/python3-dbg"})
    found = Interpreter(str(interpreter), links, is_shared=True)
    assert find_interpreter(environment, environment) == found
    (shared / "env/bin/python").unlink()
    assert find_interpreter(environment, environment) == found


@pytest.mark.root
def test_one_of_the_system_is_not(shared: Path) -> None:
    environment = make(shared / "env", "/usr/bin/env")
    found = Interpreter("/usr/bin/env", frozenset({b"bin/python3"}), is_shared=False)
    assert find_interpreter(environment, environment) == found


@pytest.mark.root
def test_an_environment_may_have_its_own(shared: Path) -> None:
    environment = make(shared / "env", "python3.12")
    (shared / "env/bin/python3.12").touch()
    assert find_interpreter(environment, environment) is None


def test_an_interpreter_that_is_nowhere_is_none(tmp_path: Path) -> None:
    environment = make(tmp_path / "env", "/nowhere/python3")
    assert find_interpreter(environment, environment) is None
    assert find_interpreter(str(tmp_path), str(tmp_path)) is None


def test_it_lies_where_its_installation_is_staged(tmp_path: Path) -> None:
    (tmp_path / "python-3.12.1/bin").mkdir(parents=True)
    (tmp_path / "python-3.12").symlink_to("python-3.12.1")
    interpreter = f"{tmp_path}/python-3.12.1/bin/python3.12"
    for source in ("python-3.12", "python-3.12.1"):
        places = [("/shared/data", "/nvme/data"), (f"{tmp_path}/{source}", "/nvme/python")]
        assert staged_at(interpreter, places) == "/nvme/python/bin/python3.12"
    assert staged_at(interpreter, [(f"{tmp_path}/python", "/nvme/python")]) == ""
    assert staged_at("", [("/", "/nvme/all")]) == ""


def test_the_links_to_it_and_no_others_are_led_there() -> None:
    paths = [b"", b"bin/python", b"bin/python3", b"bin/tool", b"lib64"]
    targets = {1: b"python3", 2: b"../../inst/bin/python3.12", 3: b"/home/a/tool", 4: b"lib"}
    links = frozenset({b"bin/python3"})
    path = "/home/a/inst/bin/python3.12"
    for at, now in (
        ("/nvme/inst/bin/python3.12", b"/nvme/inst/bin/python3.12"),
        ("", path.encode()),
    ):
        found = Interpreter(path, links, is_shared=True, at=at)
        assert relinked(targets, paths, found) == {**targets, 2: now}


def test_pyvenv_cfg_names_its_folder() -> None:
    config = b"home = /home/a/bin\nversion = 3.12.1\nhomes = /x\n"
    expected = b"home = /nvme/p\\1/bin\nversion = 3.12.1\nhomes = /x\n"
    assert rehomed(config, os.fsdecode(rb"/nvme/p\1/bin/python3")) == expected


def test_the_user_is_told_what_to_add() -> None:
    path = "/home/a/python-3.12/bin/python3.12"
    text = f"its interpreter {path} is read from shared storage"
    assert note(path, may_be_staged=False) == text
    assert note(path, may_be_staged=True) == f"{text}; add --stage=/home/a/python-3.12:DST"


@pytest.mark.root
def test_an_environment_uses_the_interpreter_that_is_staged_with_it(
    shared: Path, tmp_path: Path
) -> None:
    python = shared / "python/bin/python3.12"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    make(shared / "env", python)
    (shared / "env/pyvenv.cfg").write_text(f"home = {python.parent}\n")
    rules = tmp_path / "stage.toml"
    rules.write_text('roots = ["/nvme"]\n[launch.environment]\nOMPI_MCA_btl = "self,sm"\n')
    environment, installation = f"{shared}/env:/nvme/env,relocate=venv", f"{shared}/python:/nvme/py"
    copy = tmp_path / "disks/node2/nvme/env"

    def stage(*wishes: str) -> str:
        line = [*STAGECTL, "stage", "--local", "2", "--config", str(rules)]
        ran = run([*line, "--local-root", str(tmp_path / "disks"), *wishes])
        assert ran.code == 0, ran
        return ran.out

    told = f"stage: /nvme/env: its interpreter {python} is read from shared storage"
    assert f"{told}; add --stage={shared}/python:DST\n" in stage(environment)
    assert os.readlink(copy / "bin/python3") == str(python)
    for _ in range(2):
        assert "its interpreter" not in stage(environment, installation)
        assert os.readlink(copy / "bin/python3") == "/nvme/py/bin/python3.12"
        assert os.readlink(copy / "bin/python") == "python3"
        assert (copy / "pyvenv.cfg").read_text() == "home = /nvme/py/bin\n"
    assert "nothing moved" in stage(environment, installation)
    # The environment of a job that stages it alone must not depend on what may go.
    assert told in stage(environment)
    assert os.readlink(copy / "bin/python3") == str(python)
    assert (copy / "pyvenv.cfg").read_text() == f"home = {python.parent}\n"
