"""Run ``stagectl`` as a user does, from a folder with a stage.toml of its own."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from stager.base import linux
from stager.cli import main
from tests.support.stagectl import STAGECTL, Ran, environment, run
from tests.support.users import forked

#: Added to the roots: one machine's ranks need no network, and start a second earlier without.
SITE = '[launch.environment]\nOMPI_MCA_btl = "self,sm"\n'
#: The environment of a job of this node alone, and of a job of three nodes.
JOB = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
JOB_OF_THREE = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3",
    "SLURMD_NODENAME": "n1",
}  # fmt: skip
#: Messages that more than one test expects.
STAGED = "stage: /nvme/img.sqsh: 293.0 KiB from {source} to {nodes} in T (R a node)"
ALL = "node[1-3] (3 nodes)"
NO_CONFIG = "is missing; tell the administrator (slurm-config/stage.toml is a template for it)"
OUTSIDE = (
    "not inside a Slurm job: use sbatch, salloc or srun first, --job ID for a job of yours that is "
    "running, --hosts or --hostfile to name nodes, or --local N to simulate N nodes on this machine"
)
MISSING = (
    "No such file or directory; check the path, and that the compute nodes mount this filesystem"
)
TWICE = (
    "/nvme/b is the destination of two directives: from /a (validate=stat) and from /c "
    "(validate=stat); remove one of them, or change its destination"
)
NOT_BENEATH = (
    "/b is not beneath a folder that this site stages to; choose a destination beneath /nvme"
)


def call(
    arguments: list[str],
    folder: Path,
    variables: dict[str, str] | None = None,
    stdin: bytes = b"",
    *,
    alone: bool = False,
) -> Ran:
    """Run stagectl in a fork of this process, which saves the start of an interpreter.

    If it is to be ``alone``, root's has a network of its own: elsewhere root starts no ranks.
    """
    inherited = variables or environment()
    with ExitStack() as stack:
        typed, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        typed.write(stdin)
        typed.seek(0)

        def act() -> int:
            if alone and os.getuid() == 0:
                linux.leave_network()
            for number, file in enumerate((typed, out, err)):
                os.dup2(file.fileno(), number)
            # As Python opens them under LC_ALL=C.UTF-8; they are flushed when the program ends.
            sys.stdin, sys.stdout, sys.stderr = (
                open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
                for number, mode in enumerate("rww")
            )
            os.environ.clear()
            os.environ.update(inherited)
            os.chdir(folder)
            sys.argv = ["stagectl", *arguments]
            with pytest.raises(SystemExit) as end:
                main.main()
            sys.stdout.flush()
            assert isinstance(end.value.code, int)
            return end.value.code

        code = forked(act)
        out.seek(0)
        err.seek(0)
        return Ran(code, out.read().decode(), err.read().decode())


class Desk:
    """A user's folder with a site's stage.toml, from which stagectl is run; see `call`."""

    def __init__(self, folder: Path, *, alone: bool = False) -> None:
        self.folder = folder
        self.alone = alone
        self.config = folder / "stage.toml"
        self.config.write_text(f'roots = ["/nvme"]\n{SITE}')
        self.source = folder / "img.sqsh"
        self.source.write_bytes(b"image\n" * 50_000)
        self.nodes = folder / "nodes"

    def stagectl(
        self, command: str, *arguments: str | Path, stdin: str = "", **variables: str
    ) -> Ran:
        """Run ``stagectl COMMAND --config stage.toml …`` in the user's folder."""
        line = [command, "--config", str(self.config), *map(str, arguments)]
        return call(line, self.folder, environment(**variables), stdin.encode(), alone=self.alone)

    def local(self, command: str, *values: str) -> Ran:
        """Run a command on three simulated nodes by ``python -m stager``; see `untimed`."""
        line = [command, "--config", self.config, "--local", "3", "--local-root", self.nodes]
        return untimed(run([*STAGECTL, *map(str, line), *values], self.folder))

    def simulated(self, command: str, *arguments: str) -> Ran:
        """Run a command about the copies on the nodes that `local` simulated."""
        return self.stagectl(command, "--local-root", self.nodes, *arguments)

    def in_job(self, command: str, *arguments: str) -> Ran:
        """Run a command in a job of three nodes; the desk's folder comes first in PATH."""
        path = f"{self.folder}:{os.environ['PATH']}"
        return self.stagectl(command, *arguments, **{**JOB_OF_THREE, "PATH": path})

    def copy(self, node: int, destination: str = "/nvme/img.sqsh") -> Path:
        """Return the path of a simulated node's copy."""
        return Path(f"{self.nodes}/node{node}{destination}")


def untimed(ran: Ran) -> Ran:
    """Return the output with T for each time and R for each rate, which vary between runs."""
    out = re.sub(r"\(\d[\d.]* [KMG]?i?B/s a node\)", "(R a node)", ran.out)
    return Ran(ran.code, re.sub(r"\d+\.\d s\b", "T", out), ran.err)


def without_free_space(text: str) -> str:
    """Return a status without the lines about this machine's disks, and with T for each age."""
    lines = [line for line in text.splitlines() if " free of " not in line]
    return "".join(f"{re.sub(r'[0-9]+ s ago', 'T ago', line)}\n" for line in lines)
