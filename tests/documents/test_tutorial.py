"""The tutorial: what it says is printed is what is printed today."""

from __future__ import annotations

import re
from typing import NamedTuple

from markdown_it import MarkdownIt

from tests.support.session import REPOSITORY, new_home, run_session, without_figures

TUTORIAL = (REPOSITORY / "slurm-config/TUTORIAL.md").read_text()
BLOCKS = [each for each in MarkdownIt().parse(TUTORIAL) if each.type == "fence"]


class Said(NamedTuple):
    """A command of a document, and the output that the document says it has."""

    command: str
    output: str


def commands() -> list[Said]:
    """Return the tutorial's commands: the blocks without a language."""
    blocks = "".join(block.content for block in BLOCKS if not block.info)
    before, *each = re.split(r"^\$ ", blocks, flags=re.MULTILINE)
    assert not before
    return [Said(*part.split("\n", 1)) for part in each]


def text_of(session: list[Said]) -> str:
    """Return commands and their output as one text, of which pytest shows what differs."""
    return "".join(f"$ {each.command}\n{each.output}" for each in session)


def files() -> dict[str, str]:
    """Return the files that the reader writes: blocks with a language and a name."""
    return {block.info.split()[1]: block.content for block in BLOCKS if block.info}


def test_the_commands_print_what_the_tutorial_says() -> None:
    said = commands()
    with new_home() as home:
        for name, text in files().items():
            (home / name).write_text(text)
        steps = run_session([each.command for each in said], home)
    printed = [Said(step.command, step.text) for step in steps]
    assert without_figures(text_of(printed)) == without_figures(text_of(said))


def test_lines_with_other_words_are_not_alike() -> None:
    lines = [line for each in commands() for line in each.output.splitlines()]
    for line in lines:
        alike = without_figures(line)
        words = [word for word in re.findall("[A-Za-z]{4,}", alike) if word in line]
        assert words or line.strip() in ("^", "4")
        for word in words:
            assert without_figures(line.replace(word, f"{word}x")) != alike


def test_the_job_script_has_a_line_for_each_thing_that_was_staged() -> None:
    typed = "\n".join(each.command for each in commands()).partition("stagectl check")[0]
    staged = re.findall(r"^stagectl stage .* (\S+):/nvme/(\S+)$", typed, re.MULTILINE)
    script = files()["job.sh"]
    lines = re.findall(
        "^#SBATCH --stage=/shared/alice/(.*):/nvme/alice/(.*)$", script, re.MULTILINE
    )
    assert lines == [*dict.fromkeys(staged)]
