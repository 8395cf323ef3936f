"""What a site sees of root's part at the end of a job."""

from __future__ import annotations

import io
import syslog
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stager.base.paths import RECORDS_FOLDER
from stager.fs.files import CopyFacts
from stager.node import tidy
from stager.node.epilog import main
from stager.node.folders import make_folder
from stager.node.runtime import begin_job
from stager.store.cache import open_cache
from tests.support.records import RECORD
from tests.support.users import USER, as_user, forked, on_tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file or directory; restore it, or correct config= in plugstack.conf"),
        ("", "roots is missing; correct it"),
    ],
)
def test_a_stage_toml_that_is_missing_or_wrong_is_named_in_syslog_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    text: str | None,
    why: str,
) -> None:
    config = tmp_path / "stage.toml"
    if text is not None:
        config.write_text(text)
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", f"{tmp_path}/jobs")
    logged: list[str] = []
    monkeypatch.setattr("syslog.syslog", lambda _, text: logged.append(text))
    asked: list[list[str]] = []

    def run(_uid: int, _gid: int, _groups: list[int], command: list[str], *_: object) -> bytes:
        asked.append(command[3:])
        return b"{}"

    monkeypatch.setattr("stager.node.epilog.run_as", run)
    assert main(["--config", str(config), "17", "5001"]) == 1
    assert logged == [f"cleaning up after job 17 failed: {config}: {why}"]
    assert asked == [["stager.node.tidy", "--job", "17"]]  # it forgets what the job used
    assert capfd.readouterr() == ("", "")


def test_an_epilog_that_takes_too_long_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "stage.toml"
    config.write_text('roots = ["/nowhere"]\n[cache]\nheadroom = 1\n')
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", f"{tmp_path}/jobs")
    monkeypatch.setattr("stager.node.epilog._TIME_LIMIT", 1)
    monkeypatch.setattr("stager.node.epilog.run_as", lambda *_: time.sleep(20))
    later: list[object] = []
    monkeypatch.setattr("stager.node.epilog.make_headroom", lambda *_: later.append(_))
    logged: list[str] = []
    monkeypatch.setattr("syslog.syslog", lambda _, text: logged.append(text))
    ended = forked(lambda: (main(["--config", str(config), "17", "5001"]), later, logged))
    message = (
        "cleaning up after job 17 was stopped after 1 s; look for a disk or a user's filesystem "
        "that does not answer"
    )
    assert ended == (1, [], [message])


def test_a_time_limit_that_python_swallows_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late:
        def __del__(self) -> None:
            time.sleep(2)  # what is raised here is ignored

    def slow(*_: object) -> bytes:
        late = Late()
        del late
        time.sleep(20)
        return b"{}"

    config = tmp_path / "stage.toml"
    config.write_text("roots = []\n")
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", f"{tmp_path}/jobs")
    monkeypatch.setattr("stager.node.epilog._TIME_LIMIT", 1)
    monkeypatch.setattr("stager.node.epilog.run_as", slow)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    begun = time.monotonic()
    assert forked(lambda: main(["--config", str(config), "17", "5001"])) == 1
    assert time.monotonic() - begun < 15


def on_full_disk(monkeypatch: pytest.MonkeyPatch, disk: Path, act: Callable[[], None]) -> None:
    """Run ``act`` where three copies lie on a disk that has too little headroom for any of them."""

    def stage() -> None:
        cache = open_cache(str(disk), USER)
        for name in ("a", "b", "c"):
            path = disk / name
            path.write_bytes(b"x" * 5000)
            there = path.stat()
            copy = CopyFacts(there.st_size, there.st_mtime_ns, there.st_ino, there.st_uid)
            cache.save(replace(RECORD, destination=str(path), copy_facts=copy))

    def run(uid: int, _gid: int, _groups: list[int], command: list[str], *_: object) -> bytes:
        # Users may not be able to start the Python that root runs the tests with.
        def clean_up() -> str:
            with redirect_stdout(io.StringIO()) as answer:
                tidy.main(command[4:])
            return answer.getvalue()

        return as_user(uid, clean_up).encode()

    def fill() -> None:
        monkeypatch.setattr("stager.node.epilog.run_as", run)
        begin_job(17, USER, USER)
        make_folder(str(disk), RECORDS_FOLDER, USER, USER)
        as_user(USER, stage)
        act()

    disk.mkdir()
    on_tmpfs(Path("/run"), "mode=755", lambda: on_tmpfs(disk, "size=1m,mode=1777", fill))


def site_config(disk: Path, textfile: Path) -> str:
    """Write a stage.toml by which no copy may stay. Return its path."""
    config = disk.parent / "stage.toml"
    config.write_text(
        f'roots = ["{disk}"]\n[cache]\nheadroom = "1GB"\n[metrics]\ntextfile = "{textfile}"\n'
    )
    return str(config)


@pytest.mark.root
def test_the_gauges_are_of_what_headroom_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, textfile = root / "disk", root / "stage.prom"
    config = site_config(disk, textfile)

    def act() -> None:
        assert main(["--config", config, "17", str(USER)]) == 0
        assert not list(disk.glob("?"))

    on_full_disk(monkeypatch, disk, act)
    lines = textfile.read_text().splitlines()
    assert f'slurm_stage_bytes{{root="{disk}"}} 0' in lines
    assert f'slurm_stage_entries{{root="{disk}"}} 0' in lines
    assert "slurm_stage_evictions_total 3" in lines


@pytest.mark.root
def test_a_missing_folder_for_metrics_is_logged_and_stops_no_clean_up(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[int, str]] = []
    monkeypatch.setattr("syslog.syslog", lambda level, text: logged.append((level, text)))
    disk, folder = root / "disk", root / "textfiles"
    config = site_config(disk, folder / "stage.prom")

    def act() -> None:
        assert main(["--config", config, "17", str(USER)]) == 0
        assert not list(disk.glob("?"))
        assert logged == [
            (syslog.LOG_INFO, "3 copies evicted to make headroom"),
            (syslog.LOG_ERR, f"metrics.textfile: folder {folder} is missing: make it"),
        ]

    on_full_disk(monkeypatch, disk, act)
