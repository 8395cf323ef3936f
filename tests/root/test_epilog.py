"""What a site sees of root's part at the end of a job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from stager.root.epilog import main
from tests.support.users import forked

if TYPE_CHECKING:
    from pathlib import Path


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
    assert main(["--config", str(config), "17", "5001"]) == 1
    assert logged == [f"cleaning up after job 17 failed: {config}: {why}"]
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
