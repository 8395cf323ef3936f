"""The manual pages: mandoc finds no fault, and nothing that a reader looks for is missing."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from pydantic import BaseModel

from man import markdown
from man.pages import PAGES
from man.roff import Page, plain
from stager.base.errors import exit_codes
from stager.base.options import WAYS
from stager.cli.main import COMMANDS, cli
from stager.request.policy import Place, Policy
from tests.support.stagectl import Ran, environment, run

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGING = Path(__file__).parents[2] / "packaging"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("man")
    line = [sys.executable, "-m", "man", str(made)]
    assert run(line, PACKAGING, environment(SOURCE_DATE_EPOCH="86400")) == Ran(0, "", "")
    return made


def path_of(folder: Path, name: str) -> Path:
    return folder / f"man{name[-1]}" / name


def shown(path: Path) -> str:
    """What a reader sees, in lines of 200 columns and without bold and underlined letters."""
    done = run(["mandoc", "-T", "utf8", "-O", "width=200", str(path)])
    assert (done.code, done.err) == (0, "")
    return re.sub(".\b", "", done.out)


def words(text: str) -> str:
    return " ".join(text.split())


def tags(path: Path) -> list[str]:
    """The tags of a page's lists, without their fonts and escapes."""
    found = re.findall(r"^\.TP 7\n(.*)", path.read_text(), re.MULTILINE)
    return [re.sub(r"\\f[BIR]|\\", "", tag.replace("\\(dq", '"')) for tag in found]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_fault(folder: Path, name: str) -> None:
    assert run(["mandoc", "-T", "lint", str(path_of(folder, name))]) == Ran(0, "", "")


def test_these_pages_are_made_and_no_others(folder: Path) -> None:
    made = [str(path.relative_to(folder)) for path in folder.rglob("*.?") if path.is_file()]
    assert sorted(made) == [
        "man1/stagectl.1", "man5/stage.toml.5", "man7/slurm-stage.7", "man8/spank_stage.8",
    ]  # fmt: skip


def test_a_page_has_the_date_that_was_asked_for(folder: Path) -> None:
    first, *_ = path_of(folder, "stagectl.1").read_text().splitlines()
    assert first == '.TH STAGECTL 1 1970-01-02 "slurm\\-stage 0.1.0" "User Commands"'


@pytest.mark.parametrize("name", [name for name, (_, line) in COMMANDS.items() if line])
def test_what_the_help_of_a_command_says_is_in_stagectl_1(folder: Path, name: str) -> None:
    text = shown(path_of(folder, "stagectl.1"))
    _, _, part = text.partition(f"\n   stagectl {name}\n")
    part, several = words(re.split("\n   stagectl |\n[A-Z]", part)[0]), words(text)
    command = cli.get_command(click.Context(cli), name)
    assert command
    assert words((command.help or "").replace("`", "")) in part
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            record = option.get_help_record(click.Context(command))
            assert record
            assert words(re.sub(r"`|\[\S*x[<>]=\d+\]", "", " ".join(record))) in several


def test_commands_that_only_slurm_calls_are_in_no_page(folder: Path) -> None:
    text = shown(path_of(folder, "stagectl.1"))
    hidden = [name for name, (_, line) in COMMANDS.items() if not line]
    assert [name for name in hidden if f"stagectl {name}\n" in text] == []


def keys(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (f"{name}.{key}" for key in keys(field.annotation))
        else:
            yield field.alias or name


def test_each_key_of_the_configuration_is_in_stage_toml_5(folder: Path) -> None:
    found = [tag.partition(" = ")[0] for tag in tags(path_of(folder, "stage.toml.5"))]
    assert sorted(found) == sorted([*keys(Policy), *keys(Place)])


def test_each_option_of_a_directive_is_in_slurm_stage_7(folder: Path) -> None:
    assert set(WAYS) <= set(tags(path_of(folder, "slurm-stage.7")))


def test_each_exit_code_is_in_slurm_stage_7(folder: Path) -> None:
    found = re.findall("^   Code (.*)$", shown(path_of(folder, "slurm-stage.7")), re.MULTILINE)
    assert found == [*exit_codes()]


@pytest.mark.parametrize(("name", "most"), [("slurm-stage.7", 2500), ("spank_stage.8", 1500)])
def test_a_page_is_short(folder: Path, name: str, most: int) -> None:
    assert len(shown(path_of(folder, name)).split()) <= most


NASTY = r""".TH "no macro" '.so /etc/passwd \fBnot bold\fR \n(.l -- `tick` ^ ~ ä … “q” "q" 'q' \\"""


def page(text: str, tmp_path: Path) -> Path:
    made = Page("x", 7, "1970-01-02", "1", "Manual")
    made.section("Name")
    made.paragraph("x \\- a page")
    made.section("Text")
    nodes = SyntaxTreeNode(MarkdownIt("commonmark").enable("table").parse(text)).children
    markdown.add(made, nodes)
    (tmp_path / "x.7").write_text(str(made))
    return tmp_path / "x.7"


def test_no_character_of_a_text_is_lost_or_a_command(tmp_path: Path) -> None:
    made = Page("x", 7, "1970-01-02", "1", "Manual")
    made.section("Text")
    made.paragraph(plain(NASTY))
    made.verbatim(f"{NASTY}\n'br\n\n.br")
    (tmp_path / "x.7").write_text(str(made))
    seen = shown(tmp_path / "x.7").splitlines()
    literal = NASTY.replace("…", "...")
    assert seen[2:-2] == [
        "TEXT", f"       {literal}", "", f"           {literal}", "           'br", "",
        "           .br",
    ]  # fmt: skip


LISTS = """\
1. One

   ```
   a  b
   ```

   and
   - *x
     x*
   - **y
     y**
2. Two

| k | t | m |
|---|---|---|
| `a` | n | [one](b.md) |
| `c` | | two |
"""
SHOWN = """\
       1.  One
               a  b

           and

           •   x x

           •   y y

       2.  Two

       a      t: n
              one

       c      two
"""


def test_lists_in_lists_code_and_tables_are_shown(tmp_path: Path) -> None:
    made = page(LISTS, tmp_path)
    assert run(["mandoc", "-T", "lint", "-W", "warning", str(made)]) == Ran(0, "", "")
    _, _, part = shown(made).partition("TEXT\n")
    assert part.rpartition("\n\n")[0] == SHOWN.rstrip("\n")


def test_what_no_page_can_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing for the Markdown of a blockquote"):
        page("> no", tmp_path)
    with pytest.raises(ValueError, match="nothing for the Markdown of a image"):
        page("![no](no.png)", tmp_path)


def test_a_folder_must_be_named() -> None:
    done = run([sys.executable, "-m", "man"], PACKAGING, dict(os.environ))
    assert done == Ran(1, "", "usage: python -m man FOLDER\n")
