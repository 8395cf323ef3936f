"""The whole text of ``stagectl --help`` and of the help of each command.

The texts are in the folder ``help``, written once and changed by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from stager.base.options import OPTION_TYPES
from stager.cli.main import COMMANDS, cli
from tests.support.stagectl import STAGECTL, Ran, run

TEXTS = {path.stem: path.read_text() for path in Path(__file__).with_name("help").iterdir()}


def test_each_command_has_a_recorded_text() -> None:
    assert sorted(TEXTS) == sorted([*COMMANDS, "stagectl"])


@pytest.mark.parametrize(("name", "text"), TEXTS.items(), ids=TEXTS)
def test_the_help_is_the_recorded_text(name: str, text: str) -> None:
    command = [] if name == "stagectl" else [name]
    assert run([*STAGECTL, *command, "--help"]) == Ran(0, text, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_command_is_the_first_of_its_help(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command
    assert command.help
    summary, hidden = COMMANDS[name][1], command.hidden
    assert (summary == "") == hidden
    assert hidden or command.help.split("\n\n")[0] == summary


def test_the_help_of_stage_explains_each_option_of_a_directive() -> None:
    table = TEXTS["stage"].partition("Options of SRC:DST")[2]
    explained = re.findall(r"^    ([a-z]+)[= ]", table, re.MULTILINE)
    assert sorted(set(explained)) == sorted(OPTION_TYPES)


def test_the_readme_names_the_commands_without_json() -> None:
    users = [name for name, (_, line) in COMMANDS.items() if line]
    without = [name for name in users if "  --json" not in TEXTS[name]]
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    readme = " ".join(readme.split())
    assert f"All but {' and '.join(f'`{name}`' for name in without)} have `--json`." in readme
