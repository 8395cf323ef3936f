"""Ranks that fill a disk which all see, by this project and by commands of the shell, in turn.

``mpiexec -n N python -m tests.bench.shared_ranks PLAN`` prints a JSON line for each run. All ranks
run a command, each with its ``RANK`` of ``RANKS``, or the first alone. Each run is timed until all
ranks are done, and once more until the disk has it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from stager.source.endpoints import RemoteSettings
from stager.wire.layout import Settings
from tests.bench.moosefs import LINK
from tests.support.world import World, messages

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds between two looks of a rank that waits, so that it takes nothing from the others.
_PATIENCE = 0.005
#: Bytes of a sector in what the kernel counts.
_SECTOR = 512


def cpu() -> float:
    """Return the seconds that this process, and those that it waited for, had of the processors."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def cpu_of(pids: list[int]) -> float:
    """Return the seconds that other processes had of the processors."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def written(disk: Path, servers: list[int]) -> int:
    """Return the bytes that the ``servers`` ever wrote, or that ``disk``'s device was given."""
    if servers:
        texts = (Path(f"/proc/{pid}/io").read_text() for pid in servers)
        return sum(int(text.split("\nwrite_bytes:")[1].split()[0]) for text in texts)
    number = disk.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    return int(device.read_text().split()[6]) * _SECTOR


def received() -> int:
    """Return the bytes that came over this node's link, if it has one of its own."""
    rows = (line.split() for line in Path("/proc/net/dev").read_text().splitlines())
    return sum(int(row[1]) for row in rows if row[0] == f"{LINK}:")


def asked(log: str) -> int:
    """Return how many requests for an object's data the store's ``log`` has."""
    return (
        len(re.findall(r'"GET \S+\.gz\S* HTTP/1.1" 20[06] ', Path(log).read_text())) if log else 0
    )


class Nodes(World):
    """Ranks that all see one disk."""

    def __init__(self, comm: MPI.Intracomm, folder: Path, disk: Path) -> None:
        super().__init__(comm, folder, "copy", is_shared=True)
        self.disk = disk
        self.node = replace(self.node, disk=str(disk))
        self.copy = self.disk / "nvme/copy"
        self.phases: dict[str, float] = {}

    def meet(self) -> None:
        """Wait for all ranks."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(_PATIENCE)

    def stage(self, source: str, options: dict[str, Any]) -> None:
        """Stage from ``source``, and note the seconds of each phase."""
        outcome = self.run(
            items=self.items(source=source, **options),
            transfer=Settings(), remote=RemoteSettings(allow_http=True),
        )  # fmt: skip
        assert not outcome.failures, messages(outcome)
        self.phases = {name: round(value, 3) for name, value in outcome.phases.items()}

    def shell(self, line: str, *, alone: bool) -> None:
        """Run a command on each rank, or on the first ``alone``."""
        if alone and self.comm.rank:
            return
        own = {"RANK": f"{self.comm.rank}", "RANKS": f"{self.comm.size}", "COPY": f"{self.copy}"}
        subprocess.run(["bash", "-eo", "pipefail", "-c", line], env=os.environ | own, check=True)

    def forget(self) -> None:
        """Remove the copy, and what is known of it. Collective."""
        if not self.comm.rank:
            shutil.rmtree(self.disk / "nvme", ignore_errors=True)
            (self.disk / "nvme").mkdir()
            os.sync()
        self.meet()
        time.sleep(2)  # as long as mounts may remember what was there

    def measure(self, act: Callable[[], None], plan: dict[str, Any]) -> dict[str, float]:
        """Return seconds, the processors' seconds, bytes, and requests. Collective.

        Of the bytes received, those of the node that got most.
        """
        servers, others, log = plan["servers"], plan["others"], plan["log"]
        requests, came = asked(log), received()
        self.meet()
        wrote, used, begun = written(self.disk, servers), cpu(), time.monotonic()
        of_others = cpu_of(servers + others)
        act()
        self.meet()
        seconds = time.monotonic() - begun
        if not self.comm.rank:
            subprocess.run(["sync", "-f", self.disk], check=True)
        self.meet()
        return {
            "seconds": seconds,
            "synced": time.monotonic() - begun,
            "cpu": self.comm.allreduce(cpu() - used) + cpu_of(servers + others) - of_others,
            "written": written(self.disk, servers) - wrote,
            "received": self.comm.allreduce(received() - came, MPI.MAX),
            "asked": asked(log) - requests,
        }


def main() -> None:
    """Run what the plan says."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    nodes = Nodes(MPI.COMM_WORLD, Path(plan["folder"]), Path(plan["disk"]))
    for number in range(plan["rounds"] + 1):  # round 0 warms up
        for name, way in plan["ways"].items():
            nodes.forget()

            def act(way: dict[str, Any] = way) -> None:
                if "source" in way:
                    nodes.stage(
                        way["source"], {key: tuple(one) for key, one in way["options"].items()}
                    )
                else:
                    nodes.shell(way["line"], alone=way["alone"])

            result = {"round": number, "way": name} | nodes.measure(act, plan)
            if "source" in way:
                result["phases"] = nodes.phases
            if not nodes.comm.rank:
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
