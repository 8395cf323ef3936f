"""Sum up what the stages of this node did, and write it for Prometheus.

Ranks append lines of figures to a file of their job (`stager.store.leases.note_figures`). At the
job's end `stager.node.tidy` reads it as the user, and root adds it to the node's totals, which
node_exporter reads from a text file. A user may lie, so a job adds no more than is plausible, and
users' copies take no more than the disk holds.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stager.base import paths
from stager.base.mounts import stranger_at
from stager.node.as_user import MOST, or_zero
from stager.node.folders import locked, replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stager.base.rules import Rules

#: The figures of one line, in the order of `stager.store.leases.note_figures`.
FIGURES = ("hits", "misses", "evictions", "failures", "seconds", "slow")
#: What the file for node_exporter has for each root, and for the node: names and meanings.
GAUGES = {
    "bytes": "Bytes of staged copies, at the end of each user's last job on this node.",
    "entries": "Staged copies, at the end of each user's last job on this node.",
}
COUNTERS = {
    "hits": "Requested copies that were already current on this node.",
    "misses": "Requested copies that were transferred to this node.",
    "evictions": "Copies that were removed to make room.",
    "failures": "Stages that failed.",
    "seconds": "Seconds that jobs waited for their stages.",
    "slow": "Stages that this node's slow disk held back.",
}
#: The most that one job adds to each figure but the seconds: more paths than a job stages.
_MOST_OF_JOB = 10_000.0
#: Seconds to wait for another clean-up that writes the figures.
_LOCK_LIMIT = 2


def read_figures(answer: object, seconds: float) -> dict[str, float]:
    """Return a job's figures, from what its user's process answers.

    The job waited no longer than the ``seconds`` since root marked it.
    """
    if not isinstance(answer, list) or len(answer) != len(FIGURES):
        return dict.fromkeys(FIGURES, 0.0)
    figures = dict(zip(FIGURES, map(or_zero, answer), strict=True))
    most = dict.fromkeys(FIGURES, _MOST_OF_JOB) | {"seconds": seconds}
    return {figure: min(number, most[figure]) for figure, number in figures.items()}


def keep_figures(
    rules: Rules, gains: Mapping[str, float], usage_now: Mapping[int, Mapping[str, Any]]
) -> None:
    """Add ``gains`` to the node's totals, and replace the file for node_exporter in one step.

    ``usage_now`` is what the copies of some users take now, by uid and cache root. Raise OSError.
    """
    roots = [*rules.roots, *rules.shared_roots]
    with locked(f"{paths.RUN_FOLDER}/figures.lock", _LOCK_LIMIT):
        path = f"{paths.RUN_FOLDER}/figures.json"
        figures = _load(path)
        totals = {name: or_zero(figures.get("totals", {}).get(name)) for name in FIGURES}
        totals = {name: min(totals[name] + gains[name], MOST) for name in FIGURES}
        usage = dict(figures.get("usage", {}))
        for uid, pairs in usage_now.items():
            usage[str(uid)] = {
                root: [or_zero(number) for number in pair]
                for root, pair in pairs.items()
                if root in roots and isinstance(pair, list) and len(pair) == 2
            }
        replace_file(path, json.dumps({"totals": totals, "usage": usage}), 0o600)
        replace_file(rules.textfile, textfile(held_by(roots), totals, usage), 0o644)


def held_by(roots: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the bytes and the files that each root's disk holds; those of a missing one are 0."""
    held = dict.fromkeys(roots, (0.0, 0.0))
    for root in roots:
        with suppress(OSError):
            if stranger_at(root):
                continue
            disk = os.statvfs(root)
            size = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            # Some filesystems do not count their files.
            held[root] = float(size), float(disk.f_files - disk.f_ffree if disk.f_files else MOST)
    return held


def textfile(
    held: Mapping[str, tuple[float, float]], totals: dict[str, float], usage: dict[str, Any]
) -> str:
    """Return the node's figures in the text format of Prometheus. Pure.

    ``held`` is what each root's disk holds: all copies beneath it are no more than that.
    """
    lines: list[str] = []
    for number, (name, text) in enumerate(GAUGES.items()):
        lines += [f"# HELP slurm_stage_{name} {text}", f"# TYPE slurm_stage_{name} gauge"]
        for root, most in held.items():
            value = sum(or_zero(of.get(root, [0, 0])[number]) for of in usage.values())
            value = min(value, most[number])
            label = root.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            lines.append(f'slurm_stage_{name}{{root="{label}"}} {value:.15g}')
    for name, text in COUNTERS.items():
        lines += [f"# HELP slurm_stage_{name}_total {text}"]
        lines += [f"# TYPE slurm_stage_{name}_total counter"]
        lines += [f"slurm_stage_{name}_total {totals[name]:.15g}"]
    return "\n".join(lines) + "\n"


def _load(path: str) -> dict[str, Any]:
    with suppress(OSError, ValueError), open(path, "rb") as file:
        data = json.load(file)
        if isinstance(data, dict):
            return data
    return {}
