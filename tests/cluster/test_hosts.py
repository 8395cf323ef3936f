"""Staging without Slurm: over ssh, by several kinds of mpiexec, to hosts from several lists.

slurmctld and slurmd run here, but none of these tests submits a job.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base.outcome import Outcome
from tests.cluster.site import HANGS, MPICH, POLICY, PREFIX, PYTHON, STAGECTL, digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Command
    from tests.cluster.site import Site

#: Bytes to stage, and seconds by which a host is late; both are larger by hand.
SIZE = int(os.environ.get("STAGE_HOSTS_SIZE", "8388608"))
LATE = float(os.environ.get("STAGE_HOSTS_LATE", "0"))
ALL = "n[1-4] (4 nodes)"
MPICH_POLICY = f"""\
roots = ["/nvme"]
[launch]
mpiexec = "{MPICH}/bin/mpiexec"
environment = {{ MPI4PY_MPIABI = "mpich", LD_LIBRARY_PATH = "{MPICH}/lib" }}
"""
RATE = re.compile(r"\d+\.\d [MG]iB from (.*) in \d+\.\d s \(\d+\.\d [KMG]iB/s a node\)")


@pytest.fixture
def nodes(site: Site) -> Iterator[Site]:
    """The nodes with sshd and without root's part, and a file to stage."""
    site.run(f"head -c {SIZE} /dev/urandom > /shared/a")
    with site.sshd(*site.nodes):
        for node in site.nodes:
            site.run("mount -t tmpfs -o mode=755 none /run/slurm-stage", user="root", on=node)
        yield site
        for node in site.nodes:
            site.run("umount /run/slurm-stage", user="root", on=node)


def stagectl(
    site: Site, *arguments: str, user: str = "alice", on: str = "n1", **variables: str
) -> tuple[int, list[str]]:
    """Return the exit code, and the lines on both streams without sizes, rates and times."""
    ran = site.run([STAGECTL, *arguments], user=user, on=on, env=variables, check=False)
    return ran.returncode, plain(ran.stdout + ran.stderr)


def plain(text: str) -> list[str]:
    """Return the lines without sizes, rates and times, and without those that tell progress."""
    text = re.sub(r"[(]\d+\.\d [MG]iB, \d+\.\d s[)]", "(T)", text)
    lines = RATE.sub(r"\1", text).splitlines()
    return [
        line for line in lines if not re.search(r"(?:/s| left| so far| since the start)$", line)
    ]


def by(mpi: str, origin: str, count: int = 4) -> str:
    return f"stage: by mpiexec of {mpi} on {count} nodes, from {origin}"


def open_mpi(site: Site) -> str:
    version = site.run("mpiexec --version").stdout
    return f"Open MPI {version.split()[3] if '(Open MPI)' in version else version.split()[2]}"


def staged(site: Site, path: str) -> bool:
    """Return whether all nodes have the whole file."""
    source = digest(site.shared("a"))
    return all(digest(site.copy(node, path)) == source for node in site.nodes)


def test_hosts_of_every_list_get_the_file_and_are_current_the_second_time(nodes: Site) -> None:
    site, value, mpi = nodes, "/shared/a:/nvme/a", open_mpi(nodes)
    named = by(mpi, "--hosts")
    assert stagectl(site, "plan", "--hosts", "n[1-4]", value)[0] == 0
    assert not site.copy("n1", "/nvme/.slurm-stage").exists()
    took = f"stage: /nvme/a: /shared/a to {ALL}"
    assert stagectl(site, "stage", "--hosts", "n[1-4]", value) == (0, [named, took])
    code, lines = stagectl(site, "prepare", "-w", "n[1-4]", on="login")
    assert code == 0, lines
    assert lines[0] == (
        f"stage: /nvme: ready on {ALL}: nothing had to be made; .slurm-stage belongs to you, so no "
        "other user can stage beneath it"
    )
    unprotected = (
        "without root's part, it is not known which copies are in use, so none is removed to make "
        "room (stagectl evict DST removes one), and lifetime=job removes nothing"
    )
    assert lines[1:] == [f"stage: note: on {ALL}, {unprotected}"]

    # Open MPI's own list; and each rank is the only one of its node.
    site.shared("hosts").write_text("n1 slots=16\nn2 slots=16\n# n9\nn[3-4]\nn1\n")
    hostfile = ["--hostfile", "/shared/hosts", value]
    current = f"stage: /nvme/a: current on {ALL}, nothing moved (T)"
    assert stagectl(site, "stage", *hostfile) == (0, [by(mpi, "--hostfile"), current])
    assert staged(site, "/nvme/a")

    # A job of PBS, whose file names each host for each slot, started on a machine outside.
    site.shared("pbs").write_text("n1\nn1\nn2\nn2\nn3\nn3\nn4\nn4\n")
    pbs = {"PBS_NODEFILE": "/shared/pbs", "PBS_JOBID": "123.server"}
    assert stagectl(site, "stage", value, on="login", **pbs) == (
        0, [by(mpi, "PBS_NODEFILE"), current]
    )  # fmt: skip
    code, lines = stagectl(site, "status", **pbs)
    assert (code, lines[1].split()[:2]) == (0, ["n[1-4]", "/nvme/a"])

    # dstack knows its nodes by their addresses. Programs read which launcher was taken.
    addresses = [site.address(node) for node in site.nodes]
    dstack = {"DSTACK_NODES_IPS": "\n".join(addresses), "DSTACK_NODE_RANK": "0"}
    site.run("rm /nvme/a", on="n3")
    ran = site.run([STAGECTL, "stage", "--json", value], on="n1", env=dstack)
    told = json.loads(ran.stdout)
    assert told.pop("launcher") == by(mpi, "DSTACK_NODES_IPS").removeprefix("stage: ")
    assert told.pop("version") == 1
    [item] = Outcome.from_json(told).items
    assert (item.received, item.current) == (["10.0.0.3"], ["10.0.0.1", "10.0.0.2", "10.0.0.4"])
    assert item.source_bytes_read == 0
    assert staged(site, "/nvme/a")


def on_all(
    site: Site, variable: str, *arguments: str, **variables: str
) -> list[tuple[int, list[str]]]:
    """Stage by one line on all nodes, to which ``variable`` gives numbers; n1 begins last.

    Return the exit code and the lines of each.
    """
    running = [
        site.popen(
            [STAGECTL, "stage", *arguments], on=f"n{rank + 1}",
            env={**variables, variable: str(rank)},
        )
        for rank in reversed(range(4))
    ]  # fmt: skip
    said = [plain("".join(one.communicate(timeout=120))) for one in running]
    return [(one.returncode, lines) for one, lines in zip(running, said, strict=True)][::-1]


#: What all but the first say when it has failed with code 4.
FAILED = "the first, which stages for all, failed (exit code 4) and says why"


def waits(variable: str, rank: int) -> str:
    return f"stage: {variable} is {rank}: the first stages, this one waits"


def test_one_line_on_all_nodes_stages_once_and_all_end_with_its_code(nodes: Site) -> None:
    addresses = [nodes.address(node) for node in nodes.nodes]
    dstack = {"DSTACK_NODES_IPS": "\n".join(addresses)}
    named, to = by(open_mpi(nodes), "DSTACK_NODES_IPS"), "10.0.0.[1-4] (4 nodes)"
    rank, index = "DSTACK_NODE_RANK", "JOB_COMPLETION_INDEX"
    took, current = f"/shared/a to {to}", f"current on {to}, nothing moved (T)"
    for done in (took, current):  # the second run does not take the end of the first for its own
        ended = on_all(nodes, rank, "/shared/a:/nvme/a", **dstack)
        assert ended == [
            (0, [named, f"stage: /nvme/a: {done}"]), *((0, [waits(rank, n)]) for n in (1, 2, 3))
        ]  # fmt: skip
        assert staged(nodes, "/nvme/a")

    # An Indexed Job of Kubernetes, whose hosts the line names, and whose first node fails.
    line = ["--hosts", "n[1-4]", "/shared/none:/nvme/b"]
    first, *others = on_all(nodes, index, *line)
    assert first[0] == 4
    assert others == [(4, [waits(index, n), f"stage: {index} is {n}: {FAILED}"]) for n in (1, 2, 3)]
    # A line that only the second runs.
    in_vain = (
        f"stage: {index} is 1, so this waited for the first to stage, but for 1 s no stage of this "
        "line ran on this node; see what the first says, and run the same line on all"
    )
    with nodes.policy(f"{POLICY}[launch]\nstart_timeout = 1\n"):
        alone = stagectl(nodes, "stage", *line, on="n2", **{index: "1"})
    assert alone == (8, [waits(index, 1), in_vain])


def test_a_folder_that_another_user_has_made_for_mpiexec_is_no_obstacle(nodes: Site) -> None:
    nodes.run("mkdir -m 700 /tmp/ompi.n1.5001", user="bob", on="n1")
    took = f"stage: /nvme/a: /shared/a to {ALL}"
    told = by(open_mpi(nodes), "--hosts")
    value = "/shared/a:/nvme/a"
    try:
        assert stagectl(nodes, "stage", "--hosts", "n[1-4]", value) == (0, [told, took])
        again = stagectl(nodes, "stage", "--hosts", "n[1-4]", value, TMPDIR="/var/tmp")
        assert again == (0, [told, f"stage: /nvme/a: current on {ALL}, nothing moved (T)"])
    finally:
        nodes.run("rmdir /tmp/ompi.n1.5001", user="bob", on="n1")


def test_mpich_starts_ranks_too(nodes: Site) -> None:
    nodes.install_mpich()
    with nodes.policy(MPICH_POLICY):
        value = "/shared/a:/nvme/m"
        code, lines = stagectl(nodes, "stage", "--hosts", "n[1-4]", value)
        assert (code, lines[1:]) == (0, [f"stage: /nvme/m: /shared/a to {ALL}"])
        assert re.fullmatch(by("MPICH [0-9.]+", "--hosts"), lines[0])
        code, lines = stagectl(nodes, "stage", "--hosts", "n[1-4]", value)
        assert (code, lines[1:]) == (
            0, [f"stage: /nvme/m: current on {ALL}, nothing moved (T)"]
        )  # fmt: skip
    assert staged(nodes, "/nvme/m")


def arguments_and_environments() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the arguments and the environment of each process of this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            lines = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        yield words, dict(line.partition("=")[::2] for line in lines)


def logins(site: Site) -> list[int]:
    """Return how often alice has logged in by ssh on n1 to n4."""
    logs = (site.base / "log" / f"sshd-n{number}.log" for number in range(1, 5))
    return [log.read_text().count("Accepted publickey for alice") for log in logs]


def ssh_left(site: Site) -> int:
    """Return how many of alice's ssh keep a connection of n1 open."""
    return int(site.run("pgrep -fc '^ssh: .*mux'", on="n1", check=False).stdout)


def test_each_host_is_logged_in_to_once_unless_the_user_shares_connections(nodes: Site) -> None:
    before, value = logins(nodes), ["--hosts", "n[1-4]", "/shared/a:/nvme/a"]
    assert stagectl(nodes, "stage", *value)[0] == 0
    once = [0, 1, 1, 1]
    assert [now - then for now, then in zip(logins(nodes), before, strict=True)] == once
    assert ssh_left(nodes) == 0

    own = "ControlMaster auto\nControlPath ~/.ssh/own-%h\nControlPersist 60\n"
    config = nodes.base / "home/alice/.ssh/config"
    config.write_text(own)
    before = logins(nodes)
    for _ in range(2):
        assert stagectl(nodes, "stage", *value)[0] == 0
    assert [now - then for now, then in zip(logins(nodes), before, strict=True)] == once
    assert ssh_left(nodes) == 3
    for host in ("n2", "n3", "n4"):
        nodes.run(f"ssh -O exit {host}", on="n1")
    config.unlink()


def test_ranks_prove_themselves_and_no_argument_list_has_a_secret(nodes: Site) -> None:
    seen: dict[str, dict[str, str]] = {}
    value = "/shared/a:/nvme/a,verify=readback"
    with nodes.popen([STAGECTL, "stage", "--hosts", "n[1-4]", value], on="n1") as running:
        while running.poll() is None:
            for words, environment in arguments_and_environments():
                # A process that ends has no environment any more.
                seen.setdefault(words, {}).update(environment)
    assert running.returncode == 0
    rank = f"{PYTHON} -I -m stager.rank"
    environment = next(found for words, found in seen.items() if words.strip() == rank)
    assert environment["LD_PRELOAD"] == f"{PREFIX}/lib/stage_peers.so"
    assert environment["HOME"] == "/"
    secrets = [environment["STAGE_PEER_KEY"], json.loads(environment["STAGE_REQUEST"])["key"]]
    assert [len(secret) > 16 for secret in secrets] == [True, True]
    assert not any(secret in words for words in seen for secret in secrets)


def read_until(running: Command, text: str) -> str:
    """Return what the command has printed, up to the first line that begins with ``text``."""
    assert running.stdout
    said = ""
    for line in running.stdout:
        said += line
        if line.startswith(text):
            return said
    raise AssertionError(f"no {text!r} in {said!r}")


def test_hosts_are_waited_for_and_those_that_do_not_answer_are_named(nodes: Site) -> None:
    mpi = open_mpi(nodes)
    nodes.stop_sshd("n4")
    hosts = ["--hosts", "n[1-4]", "/shared/a:/nvme/a"]
    with nodes.popen([STAGECTL, "stage", "--wait", "60", *hosts], on="n1") as running:
        said = read_until(running, "stage: waiting for")
        time.sleep(LATE)
        nodes.start_sshd("n4")
        rest, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (0, "")
    assert plain(said + rest) == [by(mpi, "--hosts"), f"stage: /nvme/a: /shared/a to {ALL}"]

    nodes.stop_sshd("n4")
    begun = time.monotonic()
    named = by(mpi, "--hosts")
    silent = (
        "stage: n4: no answer within 2 s (Connection refused); try ssh n4 true, leave it out, or "
        "wait longer (--wait SECONDS)"
    )
    assert stagectl(nodes, "stage", "--wait", "2", *hosts) == (8, [named, silent])
    assert time.monotonic() - begun < HANGS
    # bob has no key, and does not know the hosts' keys.
    unknown = "stage: n[2-3]: Host key verification failed; accept its host key (ssh n2)"
    assert stagectl(nodes, "stage", *hosts, user="bob") == (8, [named, unknown])
    known = (nodes.base / "home/alice/.ssh/known_hosts").read_text()
    nodes.run("mkdir -m 700 .ssh; cat > .ssh/known_hosts", user="bob", input=known)
    denied = (
        "stage: n[2-3]: Permission denied (publickey,password,keyboard-interactive); let your key "
        "log in there (ssh-copy-id n2)"
    )
    assert stagectl(nodes, "stage", *hosts, user="bob") == (8, [named, denied])
    nodes.run("rm -r .ssh", user="bob")
    assert stagectl(nodes, "stage", *hosts, user="root") == (
        3, ["stage: root cannot stage: stage as an ordinary user"]
    )  # fmt: skip
