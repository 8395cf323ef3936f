"""Root's part at a job's end on one node: the job unmarked, its remains removed, figures kept.

``python -I -m stager.epilog --config stage.toml JOB UID``, run by the plugin or by the site's
Epilog. It imports the standard library alone. What lies at paths that users named is looked at and
removed by `stager.tidy`, as the user; root itself works in its own folders, and by descriptors that
follow no link in those of users. What comes from there is taken as hostile: numbers, or nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import pwd
import select
import signal
import stat
import subprocess
import sys
import syslog
import time
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from stager.prepare import (
    FOLDERS_OF_ROOT,
    JOBS,
    RUN_FOLDER,
    Rules,
    opened,
    read_rules,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Seconds for all of it, and for one user's part: Slurm keeps the node waiting meanwhile.
_LIMIT, _USER_LIMIT = 50, 10
#: Most bytes that are read of a job's figures, and of what a user's part says.
_MOST_FIGURES, _MOST_SAID = 64 * 1024, 1 << 20
#: Most names in a user's folder that are looked at as those of one job.
_MOST_NAMES = 100_000
#: What a line of a job's figures counts, in the order of `store.note_figures`.
FIGURES = ("hits", "misses", "evictions", "failures", "seconds")
#: No node counts further; what says so is no figure.
_MOST, _MOST_OF_JOB = 1e15, 1e9
#: The group of nobody, in which a user may be who has left.
_NOGROUP = 65534
#: Seconds in which users' parts are asked what may go; what is not known then stays.
_ASKING = 25.0

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Clean up after the job; 1 where something could not be done, which syslog then explains."""
    parser = argparse.ArgumentParser(prog="stager.epilog", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("job", type=int)
    parser.add_argument("uid", type=int)
    options = parser.parse_args(arguments)
    syslog.openlog("slurm-stage", syslog.LOG_PID)
    signal.signal(signal.SIGALRM, _be_late)
    signal.alarm(_LIMIT)
    try:
        Epilog(options.config, options.job, options.uid).run()
    except (OSError, ValueError) as error:
        syslog.syslog(syslog.LOG_ERR, f"after job {options.job}: {error}")
        return 1
    finally:
        signal.alarm(0)
    return 0


def _be_late(*_: object) -> None:
    raise TimeoutError(f"not done after {_LIMIT} s")


class Epilog:
    """One job's end on this node. Raises OSError, or ValueError where stage.toml is wrong."""

    def __init__(self, config: str, job: int, uid: int) -> None:
        self._config = config
        self._job = job
        self._uid = uid

    def run(self) -> None:
        """First what nobody may prevent: the job holds nothing any longer."""
        with suppress(FileNotFoundError):
            os.unlink(f"{JOBS}/{self._job}.{self._uid}")
        rules = read_rules(self._config)
        gains = dict.fromkeys(FIGURES, 0.0)
        usage: dict[str, Any] = {}
        # A folder of the user's own, whatever he may have done to it.
        with suppress(OSError), self._words() as words:
            names = self._names_of_job(words)
            if f"{self._job}.uses" in names:
                usage = self._ask(self._uid, ["--job", str(self._job)], rules)
            if f"{self._job}.figures" in names:
                gains = read_figures(words, f"{self._job}.figures")
            for name in names:
                with suppress(OSError):  # a folder that the user made there is his own
                    os.unlink(name, dir_fd=words)
        if rules.textfile:
            keep_figures(rules, gains, self._uid, usage)
        gone = make_headroom(rules, self._ask)
        if rules.textfile and gone:
            evictions = {**dict.fromkeys(FIGURES, 0.0), "evictions": float(gone)}
            keep_figures(rules, evictions, self._uid, {})

    @contextmanager
    def _words(self) -> Iterator[int]:
        with opened(RUN_FOLDER, None) as run, opened(str(self._uid), run) as words:
            yield words

    def _names_of_job(self, words: int) -> list[str]:
        with os.scandir(words) as entries:
            names = (entry.name for entry in entries)
            mine = (name for name in names if name.partition(".")[0] == str(self._job))
            return list(islice(mine, _MOST_NAMES))

    def _ask(self, uid: int, options: Sequence[str], rules: Rules) -> dict[str, Any]:
        """What `stager.tidy` says, run as the user; nothing where it fails or is too slow."""
        command = [sys.executable, "-I", "-m", "stager.tidy", "--config", self._config, *options]
        if rules.textfile:
            command.append("--usage")
        try:
            said = json.loads(run_as(uid, *groups_of(uid), command))
        except TimeoutError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            syslog.syslog(syslog.LOG_WARNING, f"uid {uid}: {error}")
            return {}
        return said if isinstance(said, dict) else {}


def groups_of(uid: int) -> tuple[int, list[int]]:
    """The user's group, and all that he is in; nobody's for one who has left."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return _NOGROUP, []
    return user.pw_gid, os.getgrouplist(user.pw_name, user.pw_gid)


def run_as(uid: int, gid: int, groups: Sequence[int], command: Sequence[str]) -> bytes:
    """The output of ``command`` run as that user; what is late or too long is cut off.

    Raises OSError.
    """
    deadline = time.monotonic() + _USER_LIMIT
    said = b""
    with subprocess.Popen(
        command, user=uid, group=gid, extra_groups=groups, env=_ENVIRONMENT, cwd="/", umask=0o077,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            while len(said) < _MOST_SAID:
                left = deadline - time.monotonic()
                ready, _, _ = select.select([process.stdout], [], [], max(0.0, left))
                block = os.read(process.stdout.fileno(), 65536) if ready else b""
                if not block:
                    break
                said += block
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return said


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
            gains = dict(zip(FIGURES, map(_number, line.split()), strict=True))
            sums = {
                figure: min(sums[figure] + gain, _MOST_OF_JOB) for figure, gain in gains.items()
            }
    return sums


def _number(text: object) -> float:
    try:
        value = float(text) if isinstance(text, bytes | int | float) else math.nan
    except OverflowError:
        value = math.inf
    if not 0 <= value <= _MOST:
        raise ValueError("no figure")
    return value


def make_headroom(rules: Rules, ask: Callable[[int, Sequence[str], Rules], dict[str, Any]]) -> int:
    """Have the least recently used copies of any user removed until the site's headroom is free.

    Returns how many went. Users' parts tell of times and sizes only, and remove by their number.
    """
    if not rules.headroom:
        return 0
    gone = 0
    # One at a time: two that do not know of each other would remove twice as much.
    with _locked(f"{RUN_FOLDER}/headroom.lock"):
        for root in rules.roots:
            gone += _make_headroom(root, rules, ask)
    if gone:
        syslog.syslog(syslog.LOG_INFO, f"{gone} copies evicted to make headroom")
    return gone


def _make_headroom(
    root: str, rules: Rules, ask: Callable[[int, Sequence[str], Rules], dict[str, Any]]
) -> int:
    if (goal := shortfall(root, rules)) <= 0:
        return 0
    deadline = time.monotonic() + _ASKING
    may_go: dict[int, list[tuple[float, float]]] = {}
    for uid in users_of(root):
        if time.monotonic() < deadline:
            may_go[uid] = _pairs(ask(uid, ["--root", root], rules).get("may_go"))
    gone = 0
    for uid, count in shares(may_go, goal).items():
        said = ask(uid, ["--root", root, "--oldest", str(count)], rules)
        gone += int(_or_zero(said.get("evicted")))
    return gone


def shortfall(root: str, rules: Rules) -> int:
    """Bytes that lack beneath ``root`` of what is to be free there after a job."""
    try:
        room = os.statvfs(root)
    except FileNotFoundError:
        return 0  # this node lacks the disk
    share = int(room.f_blocks * room.f_frsize * rules.keep_free_percent / 100)
    return max(rules.keep_free, share) + rules.headroom - room.f_bavail * room.f_frsize


def users_of(root: str) -> list[int]:
    """The users that have a folder beneath ``root``."""
    try:
        return sorted(
            int(name) for name in os.listdir(f"{root}/{FOLDERS_OF_ROOT}") if name.isdecimal()
        )
    except OSError:
        return []


def shares(may_go: dict[int, list[tuple[float, float]]], goal: float) -> dict[int, int]:
    """How many of each user's copies are to go for ``goal`` bytes, the oldest of all first. Pure.

    ``may_go`` has each user's (time of use, bytes), in the order in which they would go.
    """
    counts: dict[int, int] = {}
    every = sorted((pair[0], uid, pair[1]) for uid, pairs in may_go.items() for pair in pairs)
    for _, uid, size in every:
        if goal <= 0:
            break
        counts[uid] = counts.get(uid, 0) + 1
        goal -= size
    return counts


def _pairs(said: object) -> list[tuple[float, float]]:
    pairs: list[tuple[float, float]] = []
    for one in said if isinstance(said, list) else ():
        with suppress(ValueError, TypeError):
            used_at, size = map(_number, one)
            pairs.append((used_at, size))
    return pairs


def _or_zero(said: object) -> float:
    try:
        return _number(said)
    except (ValueError, TypeError):
        return 0.0


# Figures for Prometheus


def keep_figures(rules: Rules, gains: dict[str, float], uid: int, said: dict[str, Any]) -> None:
    """Add to the node's figures, and write them for node_exporter in one step."""
    roots = [*rules.roots, *rules.shared_roots]
    with _locked(f"{RUN_FOLDER}/figures.lock"):
        path = f"{RUN_FOLDER}/figures.json"
        figures = _load(path)
        totals = {name: _or_zero(figures.get("totals", {}).get(name)) for name in FIGURES}
        totals = {name: min(totals[name] + gains[name], _MOST) for name in FIGURES}
        usage = dict(figures.get("usage", {}))
        if isinstance(said.get("usage"), dict):
            usage[str(uid)] = {
                root: [_or_zero(number) for number in pair][:2]
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
            value = sum(_or_zero(of.get(root, [0, 0])[number]) for of in usage.values())
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
def _locked(path: str) -> Iterator[None]:
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


if __name__ == "__main__":
    sys.exit(main())
