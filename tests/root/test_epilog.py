"""What a site sees of root's part at the end of a job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stager.root.epilog import main
from tests.support.users import forked

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_missing_stage_toml_is_reported_to_syslog_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", f"{tmp_path}/none", "17", "5001"]) == 1
    assert capfd.readouterr() == ("", "")


def test_an_epilog_that_takes_too_long_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "stage.toml"
    config.write_text('roots = ["/nowhere"]\n[cache]\nheadroom = 1\n')
    monkeypatch.setattr("stager.base.paths.RUN_FOLDER", str(tmp_path))
    monkeypatch.setattr("stager.base.paths.JOBS_FOLDER", f"{tmp_path}/jobs")
    monkeypatch.setattr("stager.root.epilog._TIME_LIMIT", 1)
    monkeypatch.setattr("stager.root.epilog.run_as", lambda *_: time.sleep(20))
    later: list[object] = []
    monkeypatch.setattr("stager.root.epilog.make_headroom", lambda *_: later.append(_))
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
    monkeypatch.setattr("stager.root.epilog._TIME_LIMIT", 1)
    monkeypatch.setattr("stager.root.epilog.run_as", slow)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    begun = time.monotonic()
    assert forked(lambda: main(["--config", str(config), "17", "5001"])) == 1
    assert time.monotonic() - begun < 15
