"""Connections by ssh are shared where they can be; those to real hosts are in tests/cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stager.launch.reach import Agents, shares_nothing_yet, sharing

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT = {"PATH": os.defpath}
#: ssh without the settings of whoever runs the tests.
SSH = ("/usr/bin/ssh", "-F", "none", "-o", "BatchMode=yes")


def agents(folder: Path, agent: tuple[str, ...] = SSH, hosts: int = 2) -> Agents:
    names = [f"n{number + 1}" for number in range(hosts)]
    with sharing(agent, names, str(folder), ENVIRONMENT) as found:
        assert list(folder.iterdir()) == []
        return found


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path leaves room for the name of a socket."""
    return tmp_path_factory.mktemp("s")


def test_the_question_leaves_a_connection_that_mpiexec_then_uses(folder: Path) -> None:
    path = ("-o", f"ControlPath={folder}/ssh-%n")
    keep = ("-o", "ControlMaster=auto", "-o", "ControlPersist=10")
    assert agents(folder) == Agents((*SSH, *path, *keep), (*SSH, *path))
    assert agents(folder, hosts=64) == agents(folder)


def test_nothing_is_shared_where_that_cannot_work(folder: Path) -> None:
    plain = Agents(SSH, SSH)
    assert agents(folder, hosts=65) == agents(folder, hosts=0) == plain
    for name in ("a b", "a:b", "a" * 60, "é"):
        (folder / name).mkdir()
        assert agents(folder / name) == plain
        (folder / name).rmdir()
    with sharing(SSH, ["n1"], f"{folder}/none", ENVIRONMENT) as found:
        assert found == plain
    other = ("/bin/true", "-q")
    assert agents(folder, other) == Agents(other, other)
    broken = (*SSH, "-o", "NoSuchOption=yes")
    assert agents(folder, broken) == Agents(broken, broken)


@pytest.mark.parametrize(
    "setting", ["ControlPath /home/alice/.ssh/%C", "ControlMaster auto", "ControlMaster autoask"]
)
def test_the_users_own_connections_are_used(tmp_path: Path, folder: Path, setting: str) -> None:
    config = tmp_path / "config"
    config.write_text(f"Host n*\n{setting}\n")
    config.chmod(0o600)
    agent = ("/usr/bin/ssh", "-F", str(config))
    assert agents(folder, agent) == Agents(agent, agent)
    config.write_text(f"Host n2\n{setting}\n")  # the last one
    assert agents(folder, agent) == Agents(agent, agent)
    config.write_text(f"Host other\n{setting}\n")
    assert agents(folder, agent) != Agents(agent, agent)


def test_ssh_that_tells_no_settings_shares_nothing() -> None:
    assert not shares_nothing_yet("")


def test_a_socket_without_a_process_is_no_obstacle_at_the_end(folder: Path) -> None:
    with sharing(SSH, ["n1"], str(folder), ENVIRONMENT):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(f"{folder}/left")
        (folder / "hosts").write_text("n1 slots=1\n")
    assert (folder / "hosts").exists()


def test_the_end_tells_each_process_that_keeps_a_connection(tmp_path: Path, folder: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"""#!/bin/sh
[ "$1" = -G ] && echo 'controlmaster false' && exit
echo "$*" >>{tmp_path}/told
"""
    )
    ssh.chmod(0o755)
    code = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])"
    with sharing((str(ssh),), ["n1", "n2"], str(folder), ENVIRONMENT) as found:
        assert found.start == (str(ssh), "-o", f"ControlPath={folder}/ssh-%n")
        for name in ("1", "2"):
            subprocess.run([sys.executable, "-c", code, f"{folder}/{name}"], check=True)
    assert sorted((tmp_path / "told").read_text().splitlines()) == [
        f"-F none -S {folder}/{name} -O exit host" for name in ("1", "2")
    ]
