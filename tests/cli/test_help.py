"""The whole text of ``stagectl --help`` and of the help of each command.

The texts are in the folder ``help``, written once and changed by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from stager.cli.command import short_help
from stager.cli.main import COMMANDS, cli
from stager.cli.topics import TOPICS
from tests.support.stagectl import STAGECTL, Ran, run

FOLDER = Path(__file__).with_name("help")
TEXTS = {path.stem: path.read_text() for path in FOLDER.glob("*.txt")}
OPTION = re.compile(r"^  (-\S+)", re.MULTILINE)
SHORT = {path.stem: path.read_text() for path in (FOLDER / "short").iterdir()}


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


@pytest.mark.parametrize(("name", "text"), SHORT.items(), ids=SHORT)
def test_the_short_help_is_the_recorded_text(name: str, text: str) -> None:
    command = [] if name == "stagectl" else [name]
    assert run([*STAGECTL, *command, "-h"]) == Ran(0, text, "")


@pytest.mark.parametrize("name", [name for name, (_, line) in COMMANDS.items() if line])
def test_the_short_help_names_each_option_in_one_sentence(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command
    context = click.Context(command, info_name=name, help_option_names=["--help"])
    texts = short_help(context), command.get_help(context)
    short, full = (text.partition("\nOptions:\n")[2] for text in texts)
    assert OPTION.findall(short) == OPTION.findall(full)
    assert len(texts[0]) < len(texts[1])


@pytest.mark.parametrize("name", [name for name, (_, line) in COMMANDS.items() if line])
def test_help_of_a_command_is_its_full_help(name: str) -> None:
    assert run([*STAGECTL, "help", name]) == Ran(0, TEXTS[name], "")


def test_help_without_a_topic_is_that_of_stagectl() -> None:
    assert run([*STAGECTL, "help"]) == Ran(0, TEXTS["stagectl"], "")


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_is_explained_in_80_columns_with_all_that_it_has(name: str) -> None:
    ran = run([*STAGECTL, "help", name])
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    for section in TOPICS[name][1]():
        assert section.title in ran.out
        assert all(f"  {term}" in ran.out for term, _ in section.rows)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("validate", "Options\n  validate=stat      a copy is current"),
        ("decompress", "Options\n  decompress          decompress a file: "),
        ("143", "Code 128+N\n  Staging was cancelled, or killed by signal N."),
        ("4", "Code 4\n  The source cannot be read.\n\n  Check the path"),
        ("128+N", "Code 128+N\n  Staging was cancelled"),
        ("cache.headroom", "[cache]\n  cache.headroom = 0  After a job, "),
        ("headroom", "[cache]\n  cache.headroom = 0  After a job, "),
        ("$SLURM_JOB_ID", "Names\n  %j, $SLURM_JOB_ID  the job's number"),
        ("SALLOC_STAGE", "What you may set\n  SBATCH_STAGE, SALLOC_STAGE  one more "),
    ],
)
def test_one_name_is_explained(name: str, first: str) -> None:
    ran = run([*STAGECTL, "help", name])
    assert (ran.code, ran.err, ran.out[: len(first)]) == (0, "", first)


def test_what_is_no_topic_is_refused_with_those_that_are() -> None:
    assert run([*STAGECTL, "help", "gpu"]) == Ran(
        2, "",
        "stage: there is no topic gpu; topics are directives, codes, nodes, environment, "
        "stage.toml, the commands, and the names of options, codes and keys of stage.toml\n",
    )  # fmt: skip


def test_the_help_of_stagectl_names_all_topics() -> None:
    (line,) = re.findall(r"explains (.*?), and each command", " ".join(TEXTS["stagectl"].split()))
    assert re.split(", | and ", line) == [*TOPICS]
