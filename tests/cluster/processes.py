"""The processes of the test cluster's nodes, which the machine that runs the tests can see.

Which of them belong to a stage, what they have open, and how to end them.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Cluster

_STEP = re.compile(r"slurmstepd: \[\d+\.\d+\]")


@dataclass(frozen=True)
class Process:
    """A process of a node, with its PID on this machine."""

    pid: int
    node: str
    name: str
    words: tuple[str, ...]

    def user(self) -> int | None:
        """Return the uid that it runs as; None if it has ended."""
        with suppress(OSError):
            return os.stat(f"/proc/{self.pid}").st_uid
        return None

    def has_open(self, path: str) -> bool:
        """Return whether it has the file open; the path is the node's."""
        return path in self._open_files()

    def has_open_beneath(self, folder: str) -> bool:
        """Return whether it has a file beneath the folder open, even one without a name."""
        return any(path.startswith(f"{folder}/") for path in self._open_files())

    def _open_files(self) -> Iterator[str]:
        with suppress(OSError):
            for entry in Path(f"/proc/{self.pid}/fd").iterdir():
                with suppress(OSError):
                    yield os.readlink(entry)

    def written(self) -> int:
        """Return the bytes that it has written so far, to files, pipes and sockets; 0 if ended."""
        with suppress(OSError):
            counts = Path(f"/proc/{self.pid}/io").read_text()
            return int(counts.partition("wchar: ")[2].split()[0])
        return 0

    def signal(self, number: int) -> bool:
        """Send it a signal; return whether it was still running."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def kill(self) -> bool:
        """Kill it; return whether it was still running."""
        return self.signal(signal.SIGKILL)


def processes(site: Cluster) -> list[Process]:
    """Return all processes that run on the nodes."""
    own = {os.readlink(site.path(node, "/").parent / "ns/pid"): node for node in site.nodes}
    found: list[Process] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            node = own.get(os.readlink(folder / "ns/pid"))
            if node:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                name = (folder / "comm").read_text().strip()
                found.append(Process(int(folder.name), node, name, tuple(words[:-1])))
    return sorted(found, key=lambda process: (process.node, process.pid))


def is_rank(process: Process) -> bool:
    """Return whether it is one of the ranks that move the bytes."""
    return _has_to_do_with_ranks(process) and not is_srun(process)


def is_srun(process: Process) -> bool:
    """Return whether it is a process of the srun that starts the ranks, and that has a helper."""
    return _has_to_do_with_ranks(process) and process.name == "srun"


def _has_to_do_with_ranks(process: Process) -> bool:
    return "stager.rank" in process.words


def is_gate(process: Process) -> bool:
    """Return whether it is the task that holds the job until its stage is over."""
    return process.name == "stage-gate"


def is_helper(process: Process) -> bool:
    """Return whether it is the program that the gate waits for."""
    return process.words[2:5] == ("-m", "stager", "gate")


def is_step(process: Process) -> bool:
    """Return whether it is the slurmstepd of a step that srun began, as the helper does."""
    return process.name == "slurmstepd" and bool(_STEP.match(process.words[0]))


def is_batch(process: Process) -> bool:
    """Return whether it is the slurmstepd of the batch step.

    The gate, its child, has the same command line under another name. The slurmstepd of an epilog
    is excluded: Slurm would drain the node.
    """
    return process.name == "slurmstepd" and process.words[0].endswith(".batch]")
