"""The pages stay short and plain, their links lead somewhere, and what they stage is taken."""

from __future__ import annotations

import os.path
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.request import policy
from stager.request.grammar import parse_line, parse_value
from stager.request.resolve import resolve
from stager.request.script import sbatch_values
from tests.documents.pages import (
    BUDGETS,
    DOCS,
    MOST,
    MOST_IN_REFERENCE,
    NOT_RUN,
    OTHERS,
    REFERENCE,
    REPOSITORY,
    RUN,
    blocks,
    codes,
    headings,
    links,
    pages,
    prose,
    said,
    text_of,
    words,
)
from tests.support.directives import NAMES

if TYPE_CHECKING:
    from pathlib import Path

#: Parentheses in 1,000 words, and words in one of them.
PARENTHESES, WITHIN = 8, 8
#: A site that has the folders and the stores of the pages.
SITE = """\
roots = [{ path = "/nvme" }, { path = "/localscratch/%u.%j.%r" }]
[variables]
SLURM_TMPDIR = "/localscratch/%u.%j.%r"
[cache]
store = "/localscratch"
[source]
allow = ["s3://", "hf://", "az://ouraccount/", "docker://registry.site.org/"]
[shared_fs]
driver = "/usr/libexec/moosefs"
folder = "/nvme"
mount = "/mnt/stage"
"""
#: What stands for a value.
PLACEHOLDER = re.compile(r"SRC|DST|VALUE|…|\Z")
QUOTED_FILE = "@/"
#: Messages of Slurm and of a shell.
OF_SLURM = {
    "batch job complete failure", "Epilog error", "Prolog error", "Kill task failed",
    "Failed to initialize plugin stack", "Plug-in initialization failed",
    "unrecognized option '--stage=…'", "stagectl: command not found",
}  # fmt: skip


def test_each_page_has_a_budget() -> None:
    there = {str(one.relative_to(REPOSITORY)) for one in (REPOSITORY / DOCS).rglob("*.md")}
    assert {one for one in there if not one.startswith(REFERENCE)} == {*BUDGETS} - {"README.md"}


@pytest.mark.parametrize("page", [*BUDGETS, *OTHERS])
def test_a_page_keeps_its_budget(page: str) -> None:
    assert words(text_of(page)) <= {**BUDGETS, **OTHERS}[page]


def test_all_pages_keep_theirs() -> None:
    assert sum(BUDGETS.values()) <= MOST
    made = [page for page in pages() if page.startswith(REFERENCE)]
    assert sum(words(text_of(page)) for page in made) <= MOST_IN_REFERENCE


@pytest.mark.parametrize("page", pages())
def test_parentheses_are_few_and_short(page: str) -> None:
    found = re.findall(r"\(([^()]*)\)", prose(page))
    assert [one for one in found if words(one) > WITHIN] == []
    assert len(found) * 1000 <= PARENTHESES * words(text_of(page)), found


@pytest.mark.parametrize("page", pages())
def test_links_lead_to_what_is_there(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if ":" in path:
            assert path.startswith("https://"), link
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        assert (REPOSITORY / target).exists(), link
        assert not anchor or anchor in headings(target), link


def values(page: str) -> list[str]:
    """Return what a page gives to ``--stage``, as the plugin gets it."""
    found: list[str] = []
    for code in codes(page):
        if match := re.search(r"^(.* )?--stage=", code):
            found += [code[match.end() :].split()[0] if match[1] else code[match.end() :]]
    for block in blocks(page):
        found += sbatch_values(["#!/bin/bash", *block.text.splitlines()])
        for line in block.text.replace("\\\n", "").splitlines():
            if re.match(r"\$ |srun |sbatch |salloc ", line) and "--stage=" in line:
                typed = shlex.split(line.replace("$USER", "alice").removeprefix("$ "))
                found += [one.removeprefix("--stage=") for one in typed if one[:8] == "--stage="]
    return [one for one in found if not PLACEHOLDER.match(one)]


@pytest.mark.parametrize("page", pages())
def test_what_a_page_gives_to_stage_is_taken(page: str, tmp_path: Path) -> None:
    path = tmp_path / "stage.toml"
    path.write_text(SITE)
    rules = policy.load(path)
    names = replace(NAMES, variables=rules.variables)
    for value in values(page):
        if not value.startswith(QUOTED_FILE):
            assert resolve(parse_value(value, names), rules.at(dict(NAMES.letters))), value
    for block in blocks(page):
        for line in block.text.splitlines():
            if line.startswith("#STAGE "):
                assert resolve(parse_line(line, names), rules.at(dict(NAMES.letters))), line


@pytest.mark.parametrize("page", sorted(BUDGETS))
def test_what_a_page_writes_to_stage_toml_is_taken(page: str, tmp_path: Path) -> None:
    path = tmp_path / "stage.toml"
    for block in blocks(page):
        if block.info == "toml":
            before = "" if block.text.startswith("roots") else 'roots = ["/nvme"]\n'
            path.write_text(before + block.text.replace('owner = "stage"', 'owner = "nobody"'))
            policy.load(path)


def test_the_messages_that_administrators_look_up_are_printed() -> None:
    """Those of this project, in the first column of the tables by symptom."""
    files = [*(REPOSITORY / "stager").rglob("*.py"), *(REPOSITORY / "prolog").rglob("*.[ch]")]
    texts = "".join(one.read_text() for one in files)
    texts = re.sub(r'"\s*\\?\n\s*f?"', "", texts)
    rows = re.findall(r"^\| (`.*?) \|", text_of(f"{DOCS}/trouble/admins.md"), re.M)
    messages = {code for row in rows for code in re.findall("`([^`]*)`", row)} - OF_SLURM
    assert len(messages) > 10
    for message in messages:
        for piece in re.split(r"…|\b\d+ s\b|/UID\b", message):
            assert piece in texts, message


@pytest.mark.parametrize("page", sorted({*BUDGETS} - RUN))
def test_a_command_that_is_not_run_is_known(page: str) -> None:
    for sign in "$#":
        for command, _ in said(page, sign):
            assert command.startswith(NOT_RUN), command


def test_pages_have_what_is_tried() -> None:
    assert sum(len(values(page)) for page in pages()) > 30
