"""A site without Slurm, where each test writes the programs that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stager.launch.job import JobContext
from stager.launch.nodes import Answer, ask, frames, hello
from stager.node.agent import Status
from stager.request.policy import Launch, Policy

if TYPE_CHECKING:
    from pathlib import Path

    from stager.node.agent import Command

NODES = ("n1", "n2", "n3", "n4")
#: Says on which node each task is, as srun does.
LAUNCHED = "".join(
    f"echo 'srun: launching StepId=17.0 on host {node}, 1 tasks: {number}' >&2\n"
    for number, node in enumerate(NODES)
)
JOB = JobContext(job=17, nodes="n[1-4]", node_count=4)
STATUS = Status(("/nvme",))


class Site:
    """Scripts in place of srun, sinfo and ssh; each test writes those that it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: Whether lines of a node begin with the number of its task, as srun prints them.
        self.labels = True
        self.policy = Policy(roots=("/nvme",), launch=Launch(srun=f"{folder}/srun"))

    def program(self, name: str, script: str) -> None:
        path = self.folder / name
        tasks = LAUNCHED if name == "srun" else ""
        path.write_text(f"#!/bin/bash\n{tasks}{script}\n")
        path.chmod(0o755)

    def answer(self, node: str, content: dict[str, Any]) -> str:
        """Return the path of a file with all lines of the node's answer."""
        path = self.folder / f"{node}.answer"
        label = f"{NODES.index(node)}: " if self.labels else ""
        lines = (hello(node), *frames(node, content))
        path.write_text("".join(f"{label}{line}\n" for line in lines))
        return str(path)

    def ask(
        self, nodes: str, command: Command = STATUS, job: JobContext | None = JOB
    ) -> list[Answer]:
        names = nodes.split()
        return ask(names, command, job, self.policy, {"SLURM_JOB_ID": "17", "SECRET": "1"})
