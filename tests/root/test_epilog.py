"""What a site sees of root's part at the end of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.root.epilog import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_site_without_its_rules_is_told_by_syslog_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", f"{tmp_path}/none", "17", "5001"]) == 1
    assert capfd.readouterr() == ("", "")
