"""Hosts are asked until all answer, here with a script in the place of ssh."""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from typing import TYPE_CHECKING

import pytest

from stager.base.errors import LaunchError
from stager.launch import reach
from stager.launch.reach import judge, ssh_agent, wait_for

if TYPE_CHECKING:
    from pathlib import Path

REMEDY = "leave it out, or wait longer (--wait SECONDS)"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that answers for n1 to n4, for late when a file is there, and for others not."""
    monkeypatch.setattr(reach, "_PAUSE", 0.05)
    monkeypatch.setattr(reach, "_PERIOD", 0.3)
    path = tmp_path / "our-ssh"
    path.write_text(
        f"""#!/bin/sh
printf '%s\\n' "$*" >>{tmp_path}/asked
case $1 in
n*) [ "$*" = "$1 test -x {sys.executable}" ];;
late) [ -e {tmp_path}/go ] || {{ echo 'ssh: connect to host late port 22: Connection refused' >&2
    exit 255; }};;
gone*) echo 'Warning: x' >&2; echo "ssh: connect to host $1 port 22: No route to host" >&2
    exit 255;;
key*) echo "u@$1: Permission denied (publickey)." >&2; exit 255;;
strange) echo 'No ED25519 host key is known' >&2; echo 'Host key verification failed.' >&2
    exit 255;;
bare) exit 1;;
hangs) exec sleep 60;;
shared*) sleep 5 & echo "Shared connection to $1" >&2; exit "${{1#shared}}";;
esac
"""
    )
    path.chmod(0o755)
    return path


def waited(ssh: Path, hosts: list[str], limit: float = 20) -> list[tuple[list[str], float]]:
    told: list[tuple[list[str], float]] = []
    environment = {"PATH": os.defpath}
    wait_for(hosts, [str(ssh)], environment, limit, lambda names, at: told.append((names, at)))
    return told


def refused(ssh: Path, hosts: list[str], limit: float = 20) -> str:
    with pytest.raises(LaunchError) as caught:
        waited(ssh, hosts, limit)
    return str(caught.value)


def test_hosts_that_answer_are_asked_once(ssh: Path) -> None:
    hosts = [f"n{number}" for number in range(200)]
    waited(ssh, hosts)
    asked = (ssh.parent / "asked").read_text().splitlines()
    assert sorted(asked) == sorted(f"{host} test -x {sys.executable}" for host in hosts)
    assert waited(ssh, []) == []


def test_a_late_host_is_waited_for_and_told_while_it_lasts(ssh: Path) -> None:
    told: list[list[str]] = []

    def tell(names: list[str], _: float) -> None:
        told.append(names)
        (ssh.parent / "go").touch()

    wait_for(["n1", "late"], [str(ssh)], {"PATH": os.defpath}, 20, tell)
    assert told[0] == ["late"]


def test_hosts_that_never_answer_are_named_with_their_reasons(ssh: Path) -> None:
    begun = time.monotonic()
    text = refused(ssh, ["n1", "late", "gone1", "gone2", "hangs"], 0.6)
    assert sorted(text.split("\n  ")) == [
        f"gone[1-2]: no answer within 0.6 s (No route to host); try ssh gone1 true, {REMEDY}",
        f"hangs: no answer within 0.6 s; try ssh hangs true, {REMEDY}",
        f"late: no answer within 0.6 s (Connection refused); try ssh late true, {REMEDY}",
    ]
    assert time.monotonic() - begun < 5


def test_a_process_that_the_agent_leaves_behind_is_not_waited_for(
    ssh: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ssh leaves one with ControlPersist, which holds what ssh writes to."""
    begun = time.monotonic()
    waited(ssh, ["shared0"], 4)
    assert refused(ssh, ["shared9"], 0.6) == (
        "shared9: no answer within 0.6 s (Shared connection to shared9); try ssh shared9 true, "
        f"{REMEDY}"
    )
    assert time.monotonic() - begun < 4
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_a_host_that_never_will_answer_ends_the_wait(ssh: Path) -> None:
    begun = time.monotonic()
    text = refused(ssh, ["n1", "key1", "key2", "strange", "bare", "gone1"], 600)
    install = "install slurm-stage there as on this host, at the same path"
    assert sorted(text.split("\n  ")) == [
        f"bare: {sys.executable} is not there; {install}",
        "key[1-2]: Permission denied (publickey); let your key log in there (ssh-copy-id key1)",
        "strange: Host key verification failed; accept its host key (ssh strange)",
    ]
    assert time.monotonic() - begun < 5


def test_ssh_asks_for_no_password_and_another_agent_gets_its_own_options(ssh: Path) -> None:
    assert ssh_agent("ssh -p 2222") == ["/usr/bin/ssh", "-o", "BatchMode=yes", "-p", "2222"]
    assert ssh_agent(f"{ssh} -q") == [str(ssh), "-q"]
    with pytest.raises(LaunchError) as caught:
        ssh_agent("none-such-agent -q")
    assert caught.value.message == (
        "none-such-agent is not installed here, by which other hosts are reached; install it, or "
        "name another program in stage.toml (agent in [launch])"
    )


def test_a_host_that_greets_may_still_say_that_it_lacks_the_python() -> None:
    assert judge(0, "Welcome\n", by_ssh=True) == ""
    with pytest.raises(Exception, match="^" + re.escape(sys.executable) + " is not there; install"):
        judge(1, "Welcome\n", by_ssh=True)
    # kubectl ends with 1 where the container does not run yet.
    said = 'error: unable to upgrade connection: container not found ("worker")\n'
    assert judge(1, said, by_ssh=False) == 'container not found ("worker")'
    assert judge(137, "", by_ssh=True) == "it ended with code 137"
