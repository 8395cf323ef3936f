"""MooseFS on simulated nodes, for benchmarks: machines of their own for networks and mounts.

Their networks meet in that of the benchmark, which is its own, too.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from stager.base import linux
from tests.prolog.test_shared_fs import DRIVERS, USER, Job, Node

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: This machine's address among the nodes, their network, and what each of them calls its link.
HOST, NETWORK, LINK = "10.9.0.254", "10.9.0.0/24", "e"
#: What a process of the filesystem's user keeps of root's rights: it enters the nodes.
_KEPT = "+sys_admin,+sys_chroot,+sys_ptrace,+dac_override,+dac_read_search"
RIGHTS = (
    "setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", f"--inh-caps={_KEPT}",
    f"--ambient-caps={_KEPT}",
)  # fmt: skip


class Filesystem(NamedTuple):
    """Where each node has it, and the command that enters the node; and what keeps it running.

    The ``servers`` have the data, the ``others`` are mounts and the server of names.
    """

    disk: Path
    entered: list[list[str]]
    servers: list[int]
    others: list[int]


def make_network() -> None:
    """Give this process, and those that it starts, a network of their own."""
    linux.leave_network()
    line = f"ip link add br0 type bridge; ip addr add {HOST}/24 dev br0; ip link set br0 up"
    subprocess.run(["sh", "-ec", line], check=True)


def _plug(nodes: list[Node], rate: float) -> None:
    """Connect the nodes, each by a link of ``rate`` MB/s in either direction; 0 is no limit."""
    limit = f"root tbf rate {8 * rate}mbit burst 256kb latency 200ms"
    for number, node in enumerate(nodes, 1):
        here = f"v{number}"
        outside = f"ip link add {here} type veth peer name {LINK} netns {node.holder.pid}\n"
        outside += f"ip link set {here} master br0 up\n"
        inside = f"ip addr add 10.9.0.{number}/24 dev {LINK}; ip link set {LINK} up\n"
        if rate:
            outside += f"tc qdisc add dev {here} {limit}"
            inside += f"tc qdisc add dev {LINK} {limit}"
        entered = ["nsenter", "--net", "--target", f"{node.holder.pid}"]
        subprocess.run(["sh", "-ec", outside], check=True)
        subprocess.run([*entered, "sh", "-ec", inside], check=True)


def _pids(program: str, folder: Path) -> list[int]:
    """Return the processes of a program that serve this filesystem's nodes."""
    found = subprocess.run(
        ["pgrep", "-f", f"{program}.* /mnt/n[0-9]+/disk/{_number(folder)}/"],
        check=False, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return [int(pid) for pid in found.stdout.split()]


def _number(folder: Path) -> int:
    return 1 + sum(folder.name.encode()) % 9000


@contextmanager
def moosefs(folder: Path, count: int, rate: float = 0) -> Iterator[Filesystem]:
    """Make a filesystem of ``count`` nodes, whose disks are in ``folder``. ``rate``: as `_plug`."""
    shutil.copy(DRIVERS / "moosefs", folder)
    folder.chmod(0o755)
    names = [f"n{number}" for number in range(1, count + 1)]
    hosts = [f"10.9.0.{number} {name}\n" for number, name in enumerate(names, 1)]
    (folder / "hosts").write_text("".join(hosts))
    with ExitStack() as stack:
        nodes = []
        for name in names:
            nodes.append(Node(folder, name))
            stack.callback(nodes[-1].close)
        _plug(nodes, rate)
        job = Job(_number(folder), nodes)
        stack.callback(job.do, "stop")
        job.do("start")
        disk = folder / "disk"
        disk.mkdir()
        for node in nodes:  # each has it at the same place
            node.run("mount", "--bind", str(job.mount(node)), str(disk), user=0)
            stack.callback(node.run, "umount", str(disk), user=0)
            # Until the nodes stop, the ranks, which are no processes of theirs, see all processes.
            inside = ["nsenter", f"--mount=/proc/{node.holder.pid}/ns/mnt"]
            subprocess.run([*inside, "mount", "-t", "proc", "proc", "/proc"], check=True)
            stack.callback(subprocess.run, [*inside, "umount", "/proc"], check=True)
        yield Filesystem(
            disk,
            [["nsenter", "--mount", "--net", "--target", f"{node.holder.pid}"] for node in nodes],
            _pids("mfschunkserver", folder),
            _pids("mfs(mount|master)", folder),
        )
