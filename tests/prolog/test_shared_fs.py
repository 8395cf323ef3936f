"""The drivers of filesystems of a job's disks: MooseFS's servers for real, BeeOND's by its arguments."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
DRIVERS = REPOSITORY / "slurm-config/shared-fs"
MOOSEFS = REPOSITORY / "build/moosefs"
USER = 65534  # nobody: fusermount3 looks up the name
#: Of a node: its devices, names and network; /mnt is the test's folder. It ends with its input.
NODE = """set -e
mount --make-rprivate /
mount --bind "$1" /mnt
mknod -m 666 /mnt/fuse.$2 c 10 229
mount --bind /mnt/fuse.$2 /dev/fuse
mount --bind /mnt/hosts /etc/hosts
ip link set lo up
echo ready
exec cat
"""


class Node:
    """A machine of its own for networks and mounts, with a disk in a folder of the test's."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.folder = folder / name
        self.holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "bash", "-c", NODE, "node", folder, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.holder.stdout
        assert self.holder.stdout.readline() == b"ready\n"

    def command(self, *argv: str, user: int = USER) -> list[str]:
        """Return the arguments that run a command on the node as the user."""
        entered = ["nsenter", "--mount", "--net", "--target", str(self.holder.pid)]
        rights = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return [*entered, *rights, *argv]

    def run(self, *argv: str, user: int = USER) -> str:
        """Return what a command prints on the node."""
        line = self.command(*argv, user=user)
        return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout

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
