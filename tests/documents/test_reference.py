"""The reference and the template of stage.toml are what the code says, and nothing is left out."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING

from reference import pages
from reference.pages import FOLDER, PAGES, TEMPLATE, template
from stager.base.options import OPTION_TYPES, WAYS
from stager.request.policy import Policy, load
from tests.support.session import REPOSITORY
from tests.support.stagectl import Ran, run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def reference(*arguments: str) -> Ran:
    return run([sys.executable, "-m", "reference", *arguments], REPOSITORY / "packaging")


def test_all_files_are_what_the_code_says() -> None:
    assert reference("--check") == Ran(0, "", "")
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_other_arguments_are_refused() -> None:
    assert reference("pages") == Ran(1, "", "usage: python -m reference [--check]\n")


def test_a_page_that_differs_is_named_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, other = tmp_path / "README.md", tmp_path / "stage.toml"
    page.write_text("old")
    other.write_text(template())
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    monkeypatch.setattr(pages, "TEMPLATE", other)
    monkeypatch.setattr(pages, "PAGES", {"README.md": lambda: "new"})
    assert pages.write(check=True) == 1
    assert capsys.readouterr().err == f"{page} is not what the code says: run make reference\n"
    assert page.read_text() == "old"
    assert (pages.write(check=False), page.read_text()) == (0, "new")


def test_each_option_says_what_each_of_its_values_does() -> None:
    assert {way.partition("=")[0] for way in WAYS} == set(OPTION_TYPES)
    for name, kind in OPTION_TYPES.items():
        values = [way.partition("=")[2] for way in WAYS if way.partition("=")[0] == name]
        assert not issubclass(kind, StrEnum) or values == [*kind]


def test_the_template_has_each_key_with_its_default() -> None:
    assert load(TEMPLATE) == Policy(roots=("/nvme",))


def test_a_code_has_an_anchor() -> None:
    text = (FOLDER / "exit-codes.md").read_text()
    assert "\n## Code 4\n\n**The source cannot be read.**\n" in text


def test_a_column_of_a_table_keeps_what_separates_columns() -> None:
    text = (FOLDER / "stagectl.md").read_text()
    assert r"| `--stage-tolerate N\|N%` |" in text
