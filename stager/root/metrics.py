"""TODO."""

from __future__ import annotations

import fcntl
import json
import math
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from stager.base import paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stager.root.rules import Rules

#: Most bytes that are read of a job's figures, and of what a user's part says.
_MOST_FIGURES, _MOST_SAID = 64 * 1024, 1 << 20
#: What a line of a job's figures counts, in the order of `store.note_figures`.
FIGURES = ("hits", "misses", "evictions", "failures", "seconds")
#: No node counts further; what says so is no figure.
_MOST, _MOST_OF_JOB = 1e15, 1e9
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_figures(folder: int, name: str) -> dict[str, float]:
    """The sums of a job's figures; a line that is not of plain figures counts for nothing."""
    sums = dict.fromkeys(FIGURES, 0.0)
    try:
        descriptor = os.open(name, _READ, dir_fd=folder)
    except OSError:
        return sums
    try:
        plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
        text = os.read(descriptor, _MOST_FIGURES) if plain else b""
    finally:
        os.close(descriptor)
    for line in text.splitlines():
        with suppress(ValueError):
            gains = dict(zip(FIGURES, map(as_number, line.split()), strict=True))
            sums = {
                figure: min(sums[figure] + gain, _MOST_OF_JOB) for figure, gain in gains.items()
            }
    return sums


def as_number(text: object) -> float:
    try:
        value = float(text) if isinstance(text, bytes | int | float) else math.nan
    except OverflowError:
        value = math.inf
    if not 0 <= value <= _MOST:
        raise ValueError("no figure")
    return value


def or_zero(said: object) -> float:
    try:
        return as_number(said)
    except (ValueError, TypeError):
        return 0.0


# Figures for Prometheus


def keep_figures(rules: Rules, gains: dict[str, float], uid: int, said: dict[str, Any]) -> None:
    """Add to the node's figures, and write them for node_exporter in one step."""
    roots = [*rules.roots, *rules.shared_roots]
    with locked(f"{paths.RUN_FOLDER}/figures.lock"):
        path = f"{paths.RUN_FOLDER}/figures.json"
        figures = _load(path)
        totals = {name: or_zero(figures.get("totals", {}).get(name)) for name in FIGURES}
        totals = {name: min(totals[name] + gains[name], _MOST) for name in FIGURES}
        usage = dict(figures.get("usage", {}))
        if isinstance(said.get("usage"), dict):
            usage[str(uid)] = {
                root: [or_zero(number) for number in pair][:2]
                for root, pair in said["usage"].items()
                if root in roots and isinstance(pair, list) and len(pair) == 2
            }
        _write(path, json.dumps({"totals": totals, "usage": usage}), 0o600)
        _write(rules.textfile, textfile(roots, totals, usage), 0o644)


def textfile(roots: Sequence[str], totals: dict[str, float], usage: dict[str, Any]) -> str:
    """The node's figures in Prometheus' text format. Pure."""
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
    "bytes": "Bytes of staged copies, as of each user's last job here.",
    "entries": "Staged copies, as of each user's last job here.",
}
_COUNTERS = {
    "hits": "Files that a job wanted and that were current here.",
    "misses": "Files that a job wanted and that were brought here.",
    "evictions": "Copies that were removed to make room.",
    "failures": "Stages that failed.",
    "seconds": "Seconds that jobs waited for their stages.",
}


@contextmanager
def locked(path: str) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _load(path: str) -> dict[str, Any]:
    with suppress(OSError, ValueError), open(path, "rb") as file:
        data = json.load(file)
        if isinstance(data, dict):
            return data
    return {}


def _write(path: str, text: str, mode: int) -> None:
    fresh = f"{path}.{os.getpid()}"  # not a name that node_exporter reads
    descriptor = os.open(
        fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode
    )
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        os.fchmod(descriptor, mode)
        file.write(text)
    os.rename(fresh, path)
