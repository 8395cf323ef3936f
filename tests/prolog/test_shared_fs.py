"""The drivers of filesystems of a job's disks: MooseFS for real, BeeOND by its arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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

    driver, user = "moosefs", USER
    path = f"{MOOSEFS}/usr/sbin:{MOOSEFS}/usr/bin"

    def __init__(self, number: int, nodes: list[Node]) -> None:
        self.number = number
        self.nodes = nodes
        for node in nodes:
            for folder in (self.disk(node), self.mount(node)):
                path = node.folder.parent / folder.relative_to("/mnt")
                path.mkdir(mode=0o700, parents=True)
                os.chown(path, self.user, self.user)

    def disk(self, node: Node) -> Path:
        """Return the job's folder on the node's disk, as it is named there."""
        return Path(f"/mnt/{node.name}/disk/{self.number}")

    def mount(self, node: Node) -> Path:
        """Return the place of the job's filesystem on the node."""
        return Path(f"/mnt/{node.name}/mount/{self.number}")

    def drive(self, node: Node, action: str) -> subprocess.Popen[str]:
        """Begin the driver's work on the node."""
        told = {
            "PATH": f"{self.path}:/usr/bin:/bin",
            "STAGE_JOB": str(self.number),
            "STAGE_NODES": " ".join(each.name for each in self.nodes),
            "STAGE_NODE": node.name,
            "STAGE_UID": str(USER),
            "STAGE_GID": str(USER),
            "STAGE_FOLDER": str(self.disk(node)),
            "STAGE_MOUNT": str(self.mount(node)),
        }
        variables = (f"{name}={value}" for name, value in told.items())
        line = ["env", "-i", *variables, f"/mnt/{self.driver}", action]
        return subprocess.Popen(
            node.command(*line, user=self.user),
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


class BeeondJob(Job):
    """A job whose driver is told to use programs of the test's."""

    driver, user, path = "beeond", 0, "/mnt/bin"

    def hidden(self, node: Node) -> Path:
        """Return where BeeOND mounts."""
        return self.disk(node) / "mount"

    def assert_mounted(self, node: Node) -> None:
        """Assert that the filesystem is where the job looks for it, only there, and the user's."""
        mounts = map(str.split, node.run("cat", "/proc/self/mounts").splitlines())
        (point, options), *others = ((one[1], one[3]) for one in mounts if one[0] == "beegfs")
        assert (point, *others) == (str(self.mount(node)),)
        assert {"nosuid", "nodev"} <= {*options.split(",")}  # whoever reaches the servers writes
        assert node.run("stat", "-c", "%u %g %a", point, user=0) == f"{USER} {USER} 700\n"


#: Programs in the way of the driver's; `beeond` mounts what any user may write to, as BeeGFS does.
BEEOND = """#!/bin/bash
[ $# != 0 ] || { cat /mnt/usage; exit 1; }
echo "$@" >>/mnt/told
date +%s >>/mnt/told
point=$(sed 's/.* -c \\([^ ]*\\) .*/\\1/' <<<"$*")
mkdir -p "$point"
mount -t tmpfs -o mode=1777 beegfs "$point"
"""
SSH = """#!/bin/sh
echo "$@" >>/mnt/asked
[ ! -e /mnt/unreachable ] || { echo "no route to host" >&2; exit 255; }
[ -e /mnt/begun ]
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Node]]:
    """Two machines with BeeOND's programs, and /run of their own."""
    shutil.copy(DRIVERS / "beeond", tmp_path)
    (tmp_path / "hosts").touch()
    (tmp_path / "usage").touch()
    (tmp_path / "bin").mkdir()
    for name, text in (("beeond", BEEOND), ("ssh", SSH)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    made = [Node(tmp_path, "n1"), Node(tmp_path, "n2")]
    for node in made:
        node.run("mount", "-t", "tmpfs", "run", "/run", user=0)
    yield made
    for node in made:
        node.close()


def files_in_run(node: Node) -> list[str]:
    """Return what of BeeOND is in the machine's /run."""
    return [name for name in node.run("ls", "/run").split() if name.startswith("bee")]


def waited_for(reached: Callable[[], bool]) -> None:
    """Wait until it is so."""
    while not reached():
        time.sleep(0.01)


@pytest.mark.root
@pytest.mark.parametrize(("usage", "more"), [("", ""), ("-C needs conn.auth", " -C -P")])
def test_beeond_starts_from_the_first_node_when_all_have_begun(
    pair: list[Node], tmp_path: Path, usage: str, more: str
) -> None:
    (tmp_path / "usage").write_text(usage)
    if more:
        (tmp_path / "bin/pdsh").symlink_to("beeond")
    job = BeeondJob(2517, pair)
    started = job.drive(pair[0], "start")
    asked = tmp_path / "asked"
    where = [f" {node.name} test -d /run/beeond.2517" for node in pair]
    waited_for(lambda: asked.exists() and all(each in asked.read_text() for each in where))
    assert not (tmp_path / "told").exists()
    (tmp_path / "begun").touch()
    assert started.communicate() == ("", "")
    told, name = (tmp_path / "told").read_text().splitlines()
    disk = job.disk(pair[0])
    assert told == (
        f"start -q -n /run/beeond.2517/nodes -i /run/beeond.2517/status -d {disk} -L {disk} "
        f"-c {job.hidden(pair[0])} -p 4136 -f /etc/beegfs/beeond{more}"
    )
    assert pair[0].run("cat", "/run/beeond.2517/nodes") == "n1\nn2\n"
    assert re.fullmatch(r"job2517\.\w{8}", name)
    job.assert_mounted(pair[0])


@pytest.mark.root
def test_a_node_that_beeond_cannot_reach_is_told(pair: list[Node], tmp_path: Path) -> None:
    (tmp_path / "unreachable").touch()
    job = BeeondJob(17, pair)
    assert job.failure(pair[0]).endswith("no route to host\n")
    assert not (tmp_path / "told").exists()
    job.do("stop", pair[0])
    assert files_in_run(pair[0]) == []


@pytest.mark.root
def test_another_node_waits_until_all_have_what_beeond_makes(
    pair: list[Node], tmp_path: Path
) -> None:
    job = BeeondJob(17, pair)
    started = job.drive(pair[1], "start")
    waited_for(lambda: files_in_run(pair[1]) == ["beeond.17"])
    hidden = str(job.hidden(pair[1]))
    pair[1].run("mkdir", hidden, user=0)
    pair[1].run("mount", "-t", "tmpfs", "-o", "mode=700", "beegfs", hidden, user=0)
    assert started.poll() is None
    pair[1].run("chown", f"{USER}:{USER}", hidden, user=0)
    assert started.communicate() == ("", "")
    job.assert_mounted(pair[1])
    assert not (tmp_path / "told").exists()
    assert not (tmp_path / "asked").exists()


@pytest.mark.root
def test_beeond_is_stopped_on_a_node_without_another_one(pair: list[Node], tmp_path: Path) -> None:
    """Nor does it need what BeeOND has noted: a start may have been cut off."""
    job, node = BeeondJob(17, pair), pair[1]
    node.run("mount", "-t", "tmpfs", "beegfs", str(job.mount(node)), user=0)
    node.run("mkdir", "/run/beeond.17", user=0)
    node.run("touch", "/run/beegfs-meta-job17.a.pid", "/run/beegfs-meta-job170.a.pid", user=0)
    of_job, of_another, of_user = (
        subprocess.Popen(
            node.command("sh", "-c", "read x", "sh", f"storeX={disk}/beegfs-x", user=user),
            stdin=subprocess.PIPE,
        )
        for disk, user in ((job.disk(node), 0), (f"{job.disk(node)}0", 0), (job.disk(node), USER))
    )
    waited_for(lambda: node.run("ps", "-eo", "args").count("sh -c read x") == 3)
    job.do("stop", node)
    assert of_job.wait() != 0
    assert (of_another.poll(), of_user.poll()) == (None, None)
    assert files_in_run(node) == ["beegfs-meta-job170.a.pid"]
    assert str(job.mount(node)) not in node.run("cat", "/proc/self/mounts")
    assert not (tmp_path / "told").exists()
    assert not (tmp_path / "asked").exists()
    for process in (of_job, of_another, of_user):
        process.communicate()
