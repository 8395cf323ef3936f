"""Sum up what the stages of this node did, and write it for Prometheus.

Ranks append lines of figures to a file of their job (`stager.disk.jobs.note_figures`). At the job's
end root adds them to the node's totals, which node_exporter reads from a text file.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stager.base import paths
from stager.root.folders import locked, opened
from stager.root.untrusted import MOST, as_number, or_zero

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.root.rules import Rules

#: Bytes of a job's figures that are read.
_FIGURES_LIMIT = 64 * 1024
#: The figures of one line, in the order of `stager.disk.jobs.note_figures`.
FIGURES = ("hits", "misses", "evictions", "failures", "seconds")
#: The most that one job may add to a figure.
_MOST_OF_JOB = 1e9
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_REPLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def read_figures(folder: int, name: str) -> dict[str, float]:
    """Return the sums of a job's figures, from the file ``name`` in the descriptor ``folder``.

    Ignore lines that do not hold exactly one number for each figure.
    """
    sums = dict.fromkeys(FIGURES, 0.0)
    text = b""
    with suppress(OSError), opened(name, folder, flags=_READ) as descriptor:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            text = os.read(descriptor, _FIGURES_LIMIT)
    for line in text.splitlines():
        with suppress(ValueError):
            gains = dict(zip(FIGURES, map(as_number, line.split()), strict=True))
            sums = {
                figure: min(sums[figure] + gain, _MOST_OF_JOB) for figure, gain in gains.items()
            }
    return sums


def keep_figures(rules: Rules, gains: dict[str, float], uid: int, answer: dict[str, Any]) -> None:
    """Add ``gains`` to the node's totals, and replace the file for node_exporter in one step.

    ``answer`` may hold what the user's copies take now, by cache root. Raise OSError.
    """
    roots = [*rules.roots, *rules.shared_roots]
    with locked(f"{paths.RUN_FOLDER}/figures.lock"):
        path = f"{paths.RUN_FOLDER}/figures.json"
        figures = _load(path)
        totals = {name: or_zero(figures.get("totals", {}).get(name)) for name in FIGURES}
        totals = {name: min(totals[name] + gains[name], MOST) for name in FIGURES}
        usage = dict(figures.get("usage", {}))
        if isinstance(answer.get("usage"), dict):
            usage[str(uid)] = {
                root: [or_zero(number) for number in pair][:2]
                for root, pair in answer["usage"].items()
                if root in roots and isinstance(pair, list) and len(pair) == 2
            }
        _write(path, json.dumps({"totals": totals, "usage": usage}), 0o600)
        _write(rules.textfile, textfile(roots, totals, usage), 0o644)


def textfile(roots: Sequence[str], totals: dict[str, float], usage: dict[str, Any]) -> str:
    """Return the node's figures in the text format of Prometheus. Pure."""
    lines: list[str] = []
    for number, (name, text) in enumerate(_GAUGES.items()):
        lines += [f"# HELP slurm_stage_{name} {text}", f"# TYPE slurm_stage_{name} gauge"]
        for root in roots:
            value = sum(or_zero(of.get(root, [0, 0])[number]) for of in usage.values())
            label = root.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            lines.append(f'slurm_stage_{name}{{root="{label}"}} {value:.15g}')
    for name, text in _COUNTERS.items():
        lines += [f"# HELP slurm_stage_{name}_total {text}"]
        lines += [f"# TYPE slurm_stage_{name}_total counter"]
        lines += [f"slurm_stage_{name}_total {totals[name]:.15g}"]
    return "\n".join(lines) + "\n"


_GAUGES = {
    "bytes": "Bytes of staged copies, at the end of each user's last job on this node.",
    "entries": "Staged copies, at the end of each user's last job on this node.",
}
_COUNTERS = {
    "hits": "Requested copies that were already current on this node.",
    "misses": "Requested copies that were transferred to this node.",
    "evictions": "Copies that were removed to make room.",
    "failures": "Stages that failed.",
    "seconds": "Seconds that jobs waited for their stages.",
}


def _load(path: str) -> dict[str, Any]:
    with suppress(OSError, ValueError), open(path, "rb") as file:
        data = json.load(file)
        if isinstance(data, dict):
            return data
    return {}


def _write(path: str, text: str, mode: int) -> None:
    fresh = f"{path}.{os.getpid()}"  # not a name that node_exporter reads
    with opened(fresh, flags=_REPLACE, mode=mode) as descriptor:
        os.fchmod(descriptor, mode)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(text.encode("utf-8", "surrogateescape"))
    os.rename(fresh, path)
