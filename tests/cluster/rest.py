"""What a job must not leave behind on the test cluster, whatever happened to it."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from tests.cluster.processes import is_gate, is_helper, processes

if TYPE_CHECKING:
    from tests.cluster.site import Site


def unrest(site: Site, patience: float = 30) -> list[str]:
    """Return what is wrong after the last job: nodes that are not idle, and what is left on them.

    Nodes get ``patience`` seconds to become idle; those that do not are resumed.
    """
    return [*_taken_away(site, patience), *_left_behind(site)]


def _taken_away(site: Site, patience: float) -> list[str]:
    deadline = time.monotonic() + patience
    while set((states := site.node_states()).values()) != {"idle"}:
        if time.monotonic() > deadline:
            reasons = site.run(["sinfo", "--list-reasons"], user="root").stdout
            site.resume()
            return [f"nodes after {patience} s: {states}\n{reasons}"]
        time.sleep(0.2)
    return []


def _left_behind(site: Site) -> list[str]:
    left = [f"left: {what}" for what in [*site.leftovers(), *_remains(site)]]
    return left + [f"locked: {lock}" for lock in _locks_held(site)]


def _remains(site: Site) -> list[str]:
    """Return helpers and gates that outlived their jobs."""
    return [
        f"{process.node}: {process.name} {' '.join(process.words)}"
        for process in processes(site)
        if is_gate(process) or is_helper(process)
    ]


def _locks_held(site: Site) -> list[str]:
    """Return the locks of destinations that some process still holds."""
    with open("/proc/locks", encoding="ascii") as lines:
        held = set(re.findall(r" ([0-9a-f]+:[0-9a-f]+:\d+) ", lines.read()))
    return [
        str(path)
        for node in site.nodes
        for path in site.path(node, "/nvme").glob(".slurm-stage/*/lock")
        if _lock_name(path.stat()) in held
    ]


def _lock_name(facts: os.stat_result) -> str:
    """Return a file's name in /proc/locks. Its inode alone could also be a file of another disk."""
    return f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
