"""Paths as users give them; `test_main` has the commands in a deleted folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stager.cli.arguments import absolute

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("path", "expected"), [("a", "/a"), ("./a/../b//", "/b"), ("/x/./y/", None), ("", "")]
)
def test_a_path_is_made_absolute_and_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute(path) == ("/x/y" if expected is None else f"{tmp_path}{expected}")
