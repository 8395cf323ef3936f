"""The drivers of filesystems of a job's disks: MooseFS for real, BeeOND by its arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
DRIVERS = REPOSITORY / "slurm-config/shared-fs"
MOOSEFS = REPOSITORY / "build/moosefs"
#: Nobody: fusermount3 looks up the name.
USER = 65534
#: Of a node: its devices, names and network; /mnt is the test's folder. It ends with its input, and
#: with it all of its processes.
NODE = """set -e
mount --make-rprivate /
mount --bind "$1" /mnt
mknod -m 666 /mnt/fuse.$2 c 10 229
mount --bind /mnt/fuse.$2 /dev/fuse
mount --bind /mnt/hosts /etc/hosts
ip link set lo up
echo ready
cat
"""


class Node:
    """A machine of its own for processes, networks and mounts, with a disk in the test's folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder / name
        self.holder = subprocess.Popen(
            [
                *("unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc"),
                *("bash", "-c"),
                NODE,
                "node",
                folder,
                name,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.holder.stdout
        assert self.holder.stdout.readline() == b"ready\n"
        children = f"/proc/{self.holder.pid}/task/{self.holder.pid}/children"
        self.pid = Path(children).read_text().strip()

    def command(self, *argv: str, user: int = USER) -> list[str]:
        """Return the arguments that run a command on the node as the user."""
        entered = ["nsenter", "--mount", "--net", "--pid", "--target", self.pid]
        rights = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return [*entered, *rights, *argv]

    def run(self, *argv: str, user: int = USER) -> str:
        """Return what a command prints on the node."""
        line = self.command(*argv, user=user)
        return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout

    def processes(self) -> list[str]:
        """Return a line with the number of each of MooseFS's processes."""
        lines = self.run("ps", "-eo", "pid,stat,args").splitlines()
        return [line for line in lines if " mfs" in line]

    def close(self) -> None:
        """End the machine, and with it its mounts and its network."""
        self.holder.communicate()


class Job:
    """A job on some nodes, and what the driver is told of it."""

    def __init__(self, number: int, nodes: list[Node]) -> None:
        self.number = number
        self.nodes = nodes
        for node in nodes:
            for folder in (self.disk(node), self.mount(node)):
                path = node.folder.parent / folder.relative_to("/mnt")
                path.mkdir(mode=0o700, parents=True)
                os.chown(path, USER, USER)

    def disk(self, node: Node) -> Path:
        """Return the job's folder on the node's disk, as it is named there."""
        return Path(f"/mnt/{node.name}/disk/{self.number}")

    def mount(self, node: Node) -> Path:
        """Return the place of the job's filesystem on the node."""
        return Path(f"/mnt/{node.name}/mount/{self.number}")

    def drive(self, node: Node, action: str) -> subprocess.Popen[str]:
        """Begin the driver's work on the node."""
        told = {
            "PATH": f"{MOOSEFS}/usr/sbin:{MOOSEFS}/usr/bin:/usr/bin:/bin",
            "STAGE_JOB": str(self.number),
            "STAGE_NODES": " ".join(each.name for each in self.nodes),
            "STAGE_NODE": node.name,
            "STAGE_UID": str(USER),
            "STAGE_GID": str(USER),
            "STAGE_FOLDER": str(self.disk(node)),
            "STAGE_MOUNT": str(self.mount(node)),
        }
        return subprocess.Popen(
            node.command(
                "env", "-i", *(f"{k}={v}" for k, v in told.items()), "/mnt/moosefs", action
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def do(self, action: str, *nodes: Node) -> list[str]:
        """Run the driver on the nodes at once, all of them by default; return what each printed."""
        driven = [self.drive(node, action) for node in nodes or self.nodes]
        ended = [(*each.communicate(timeout=60), each.returncode) for each in driven]
        assert [code for *_, code in ended] == [0] * len(driven), ended
        return [out for out, *_ in ended]

    def failure(self, node: Node) -> str:
        """Return what the driver says of a start that fails on the node."""
        driven = self.drive(node, "start")
        out, failure = driven.communicate(timeout=60)
        assert (out, driven.returncode != 0) == ("", True)
        return failure

    def assert_stopped(self) -> None:
        """Assert that of the job nothing but data is left."""
        ports = [f":{12000 + 4 * self.number + i} " for i in range(4)]
        for node in self.nodes:
            assert str(self.mount(node)) not in node.run("cat", "/proc/self/mounts")
            listening = node.run("ss", "-Hltn")
            assert not [port for port in ports if port in listening]
            assert not [line for line in node.processes() if f"/{self.number}" in line]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Four machines on one network, of which the first one has the bridge."""
    tmp_path = tmp_path_factory.mktemp("nodes")
    shutil.copy(DRIVERS / "moosefs", tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "hosts").write_text("".join(f"10.9.0.{i} n{i}\n" for i in range(1, 5)))
    made = [Node(tmp_path, f"n{i}") for i in range(1, 5)]
    first = ["nsenter", "--net", "--target", made[0].pid, "sh", "-ec"]
    script = "ip link add br0 type bridge; ip addr add 10.9.0.1/24 dev br0; ip link set br0 up\n"
    for i, node in enumerate(made[1:], 2):
        script += f"ip link add v{i} type veth peer name e netns {node.pid}\n"
        script += f"ip link set v{i} master br0 up\n"
    subprocess.run([*first, script], check=True)
    for i, node in enumerate(made[1:], 2):
        inside = ["nsenter", "--net", "--target", node.pid, "sh", "-ec"]
        plug = f"ip addr add 10.9.0.{i}/24 dev e; ip link set e up"
        subprocess.run([*inside, plug], check=True)
    yield made
    for node in made:
        node.close()


@pytest.mark.root
def test_two_jobs_on_the_same_nodes(nodes: list[Node]) -> None:
    jobs = [Job(17, nodes), Job(18, nodes[:1])]
    for job in jobs:
        job.do("start")
        job.nodes[0].run("sh", "-c", f"echo {job.number} >{job.mount(nodes[0])}/file")
    assert [n.run("cat", f"{jobs[0].mount(n)}/file") for n in nodes] == ["17\n"] * 4
    told = [[line.split(":")[0] for line in out.splitlines()] for out in jobs[0].do("status")]
    assert told == [["metadata server", "data server", "used"]] + [["data server", "used"]] * 3
    jobs[0].do("stop", nodes[0])
    jobs[0].do("stop")
    jobs[0].assert_stopped()
    assert nodes[0].run("cat", f"{jobs[1].mount(nodes[0])}/file") == "18\n"
    jobs[1].do("stop")
    assert "LISTEN" not in "".join(node.run("ss", "-Hltn") for node in nodes)


@pytest.mark.root
def test_stop_after_the_first_node_is_lost(nodes: list[Node]) -> None:
    job = Job(19, nodes[:2])
    job.do("start")
    lost = [line.split()[0] for line in nodes[0].processes()]
    assert len(lost) > 2
    nodes[0].run("kill", "-KILL", *lost)
    job.do("stop", nodes[1])
    job.do("stop", nodes[0])
    job.assert_stopped()


@pytest.mark.root
@pytest.mark.parametrize(("port", "server"), [(2, "metadata server"), (3, "data server")])
def test_another_program_has_the_port(nodes: list[Node], port: int, server: str) -> None:
    job = Job(20 + port, nodes[:1])
    taken = 12000 + 4 * job.number + port
    listens = f"import socket; s = socket.create_server(('', {taken})); print(flush=True); input()"
    taker = subprocess.Popen(
        nodes[0].command(sys.executable, "-c", listens, user=0),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert taker.stdout
    assert taker.stdout.readline() == b"\n"
    failure = job.failure(nodes[0])
    taker.communicate(b"\n")
    assert failure.startswith(f"moosefs: n1: no {server}: ")
    assert "EADDRINUSE" in failure
    assert failure.count("\n") == 1
    job.do("stop")
    job.assert_stopped()


@pytest.mark.root
def test_a_disk_with_little_space(nodes: list[Node]) -> None:
    job = Job(24, nodes[:1])
    disk = str(job.disk(nodes[0]))
    nodes[0].run("mount", "-t", "tmpfs", "-o", f"size=1m,uid={USER}", "tmpfs", disk, user=0)
    assert job.failure(nodes[0]) == f"moosefs: n1: less than 4 GiB are free below {disk}\n"
    job.do("stop")


@pytest.mark.root
@pytest.mark.nightly
def test_start_has_a_limit(nodes: list[Node]) -> None:
    job = Job(25, nodes[:2])
    last = job.failure(nodes[1]).splitlines()[-1]
    assert last.startswith("moosefs: n2: no mount after 25 s: can't connect to mfsmaster")
    job.do("stop", nodes[1])
    job.assert_stopped()


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_beeond_is_driven_from_the_first_node(tmp_path: Path, node: str) -> None:
    recorder = tmp_path / "beeond"
    recorder.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/told\n')
    recorder.chmod(0o755)
    told = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STAGE_NODE": node, "STAGE_NODES": "n1 n2"}
    told |= {"STAGE_FOLDER": str(tmp_path), "STAGE_MOUNT": "/mnt/stage/17"}
    for action in ("start", "stop"):
        subprocess.run([DRIVERS / "beeond", action], check=True, env=told)
    if node != "n1":
        assert [path.name for path in tmp_path.iterdir()] == ["beeond"]
        return
    nodes = tmp_path / "nodes"
    start = f"start -n {nodes} -d {tmp_path}/data -c /mnt/stage/17 -P -F -L {tmp_path}"
    assert (tmp_path / "told").read_text() == f"{start}\nstop -n {nodes} -L -d\n"
    assert nodes.read_text() == "n1\nn2\n"
