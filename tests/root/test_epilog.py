"""Root's part at a job's end: what it believes of what users left, and whose copies go first."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base.errors import PolicyRefusal
from stager.disk.jobs import note_figures
from stager.request.policy import load
from stager.root.epilog import main, run_as
from stager.root.headroom import make_headroom, shares
from stager.root.metrics import FIGURES, read_figures, textfile
from stager.root.rules import Rules, read_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NONE = dict.fromkeys(FIGURES, 0.0)


# Figures


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_a_jobs_figures_are_summed(
    folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    (tmp_path / "5001").mkdir()
    note_figures(5001, 17, (1, 2, 0, 0, 1.5))
    note_figures(5001, 17, (0, 0, 3, 1, 0.25))
    sums = dict(zip(FIGURES, (1, 2, 3, 1, 1.75), strict=True))
    assert read_figures(folder, "5001/17.figures") == sums


HOSTILE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "no figures": lambda path: path.write_bytes(b"all of them\n"),
    "too few": lambda path: path.write_bytes(b"1 2 3 4\n"),
    "too many": lambda path: path.write_bytes(b"1 2 3 4 5 6\n"),
    "negative": lambda path: path.write_bytes(b"-1 0 0 0 0\n"),
    "not a number": lambda path: path.write_bytes(b"nan 0 0 0 0\n"),
    "endless": lambda path: path.write_bytes(b"inf 0 0 0 0\n"),
    "huge": lambda path: path.write_bytes(b"1e300 0 0 0 0\n"),
    "of too many digits": lambda path: path.write_bytes(b"1" * 5000 + b" 0 0 0 0\n"),
    "bytes": lambda path: path.write_bytes(b"\xff\0\x80" * 1000),
    "a symlink": lambda path: path.symlink_to("/etc/passwd"),
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_figure_counts_for_nothing(
    folder: int, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "17.figures")
    assert read_figures(folder, "17.figures") == NONE


def test_figures_are_written_as_prometheus_reads_them() -> None:
    totals = dict(zip(FIGURES, (1, 2, 3, 4, 5.5), strict=True))
    usage = {"5001": {"/nvme": [10, 1]}, "5002": {"/nvme": [1 << 40, 2], "/gone": [5, 5]}}
    assert (
        textfile(["/nvme", '/a"b'], totals, usage)
        == """\
# HELP slurm_stage_bytes Bytes of staged copies, as of each user's last job here.
# TYPE slurm_stage_bytes gauge
slurm_stage_bytes{root="/nvme"} 1099511627786
slurm_stage_bytes{root="/a\\"b"} 0
# HELP slurm_stage_entries Staged copies, as of each user's last job here.
# TYPE slurm_stage_entries gauge
slurm_stage_entries{root="/nvme"} 3
slurm_stage_entries{root="/a\\"b"} 0
# HELP slurm_stage_hits_total Files that a job wanted and that were current here.
# TYPE slurm_stage_hits_total counter
slurm_stage_hits_total 1
# HELP slurm_stage_misses_total Files that a job wanted and that were brought here.
# TYPE slurm_stage_misses_total counter
slurm_stage_misses_total 2
# HELP slurm_stage_evictions_total Copies that were removed to make room.
# TYPE slurm_stage_evictions_total counter
slurm_stage_evictions_total 3
# HELP slurm_stage_failures_total Stages that failed.
# TYPE slurm_stage_failures_total counter
slurm_stage_failures_total 4
# HELP slurm_stage_seconds_total Seconds that jobs waited for their stages.
# TYPE slurm_stage_seconds_total counter
slurm_stage_seconds_total 5.5
"""
    )


def test_a_job_cannot_spoil_the_figures_of_the_node(folder: int, tmp_path: Path) -> None:
    (tmp_path / "17.figures").write_bytes(b"1e14 0 0 0 0\n" * 100)
    assert read_figures(folder, "17.figures") == {**NONE, "hits": 1e9}


# Whose copies go


ENTRIES = st.lists(
    st.tuples(st.integers(0, 9).map(float), st.integers(1, 50).map(float)), max_size=6
)


@given(st.dictionaries(st.integers(5000, 5003), ENTRIES.map(sorted)), st.integers(-10, 300))
def test_the_oldest_of_all_go_and_no_more_than_it_takes(
    may_go: dict[int, list[tuple[float, float]]], goal: int
) -> None:
    counts = shares(may_go, goal)
    gone = [pair for uid, count in counts.items() for pair in may_go[uid][:count]]
    left = [pair for uid, pairs in may_go.items() for pair in pairs[counts.get(uid, 0) :]]
    freed = sum(size for _, size in gone)
    assert freed >= goal or not left
    assert not gone or max(gone)[0] <= min([*left, (9.0, 0.0)])[0]
    # Without the last of them it were too little.
    last = max((pair[0] for pair in gone), default=0.0)
    assert not gone or freed - max(size for at, size in gone if at == last) < goal


def test_users_parts_are_asked_only_where_headroom_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    asked: list[tuple[int, list[str]]] = []
    (tmp_path / ".slurm-stage/5001").mkdir(parents=True)
    (tmp_path / ".slurm-stage/notes").mkdir()

    def ask(uid: int, options: Any, rules: Rules) -> dict[str, Any]:
        asked.append((uid, list(options)))
        return {"may_go": [[1, 1 << 40], ["x"], [2, -1], [1, 10**400]], "evicted": 1}

    root = str(tmp_path)
    assert make_headroom(Rules([root], [], 0, 0, 1, ""), ask) == 0
    assert asked == []
    assert make_headroom(Rules([root, "/nowhere"], [], 0, 0, 1 << 59, ""), ask) == 1
    assert asked == [(5001, ["--root", root]), (5001, ["--root", root, "--oldest", "1"])]


# A user's part


def python(text: str) -> list[str]:
    # One that every user may run, wherever this one lies.
    return ["/usr/bin/python3", "-I", "-c", text]


@pytest.mark.root
def test_a_users_part_runs_as_the_user_with_nothing_of_roots() -> None:
    said = run_as(
        65534, 65534, [], python("import os; print(os.getresuid(), os.getresgid(), os.getgroups(), "
        "sorted(os.environ), os.getcwd(), sorted(map(int, os.listdir('/proc/self/fd')))[:3])"),
    )  # fmt: skip
    ids = "(65534, 65534, 65534)"
    assert said.decode() == f"{ids} {ids} [] ['LANG', 'PATH'] / [0, 1, 2]\n"


@pytest.mark.root
def test_a_users_part_that_hangs_or_floods_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stager.root.epilog._USER_LIMIT", 0.5)
    begun = time.monotonic()
    assert (
        run_as(65534, 65534, [], python("import time; print(1, flush=True); time.sleep(60)"))
        == b"1\n"
    )
    flood = python("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert len(run_as(65534, 65534, [], flood)) < (2 << 20)
    assert time.monotonic() - begun < 20


# stage.toml, as root reads it and as users do


@pytest.mark.parametrize("size", ["0", "5", '"5"', '"1.5GiB"', '"10 GB"', '"7k"', '"3mib"', '"2T"'])
def test_root_reads_sizes_as_users_do(tmp_path: Path, size: str) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(
        f'roots = ["/nvme"]\nshared_roots = ["/nvme/all"]\n[cache]\nkeep_free = {size}\n'
        f'headroom = {size}\nkeep_free_percent = 2.5\n[metrics]\ntextfile = "/run/x.prom"\n'
    )
    policy, rules = load(path), read_rules(str(path))
    assert rules == Rules(
        list(policy.roots), list(policy.shared_roots), policy.cache.keep_free,
        policy.cache.keep_free_percent, policy.cache.headroom, policy.metrics.textfile,
    )  # fmt: skip


@pytest.mark.parametrize("size", ["1e9", "true", '"10_000"', '"8Gbit"', '"1.5"', "-1", '""', "[]"])
@pytest.mark.parametrize("key", ["keep_free", "headroom", "keep_free_percent"])
def test_root_takes_what_users_take_and_nothing_else(tmp_path: Path, key: str, size: str) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(f'roots = ["/nvme"]\n[cache]\n{key} = {size}\n')
    answers = []
    for read in (lambda: load(path), lambda: read_rules(str(path))):
        try:
            answers.append(bool(read()))
        except (PolicyRefusal, ValueError):
            answers.append(False)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("cache = 1", "cache is not a table"),
        ("[cache]\nheadroom = -1", "cache.headroom must be a number of bytes, or a text such as"),
        (
            '[cache]\nheadroom = "much"',
            "cache.headroom must be a number of bytes, or a text such as",
        ),
        (
            "[cache]\nkeep_free_percent = 100",
            "cache.keep_free_percent must be a number from 0 to less than 100",
        ),
        ('[metrics]\ntextfile = "here"', "metrics.textfile is not an absolute path"),
        ("shared_roots = 1", "shared_roots is not a list of absolute paths"),
    ],
)
def test_a_wrong_rule_is_named_to_root(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(f'roots = ["/nvme"]\n{text}\n')
    with pytest.raises(ValueError, match=fault):
        read_rules(str(path))


def test_a_site_without_its_rules_is_told_by_syslog_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", f"{tmp_path}/none", "17", "5001"]) == 1
    assert capfd.readouterr() == ("", "")
