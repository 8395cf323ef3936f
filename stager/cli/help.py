"""``stagectl help``: explain a command, a topic, or one option, code or key by its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from stager.base.errors import UsageError
from stager.base.text import printable
from stager.cli.command import Command
from stager.cli.topics import TOPICS, Section

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: What follows a name in a term: `validate=stat`, `cache.store = ""`, `%j, $SLURM_JOB_ID`.
_NAME_END = re.compile(r"[=, ]")


def _complete(_: click.Context, __: click.Parameter, start: str) -> list[str]:
    from stager.cli.main import COMMANDS  # which imports this module

    known = [*TOPICS, *(name for name, (_, line) in COMMANDS.items() if line)]
    return [name for name in known if name.startswith(start)]


@click.command(cls=Command)
@click.argument("topic", required=False, shell_complete=_complete)
@click.pass_context
def help(context: click.Context, topic: str | None) -> None:  # noqa: A001
    """Explain a command, or a topic.

    TOPIC is a command; directives, codes, nodes, environment or stage.toml; or the name of an
    option, of an exit code or of a key, such as validate, 4 or cache.headroom.
    """
    above = context.find_root()
    assert isinstance(above.command, click.Group)
    command = above.command.get_command(above, topic) if topic else above.command
    if command:
        within = click.Context(command, info_name=topic, parent=above) if topic else above
        click.echo(command.get_help(within))
        return
    assert topic
    found = [*TOPICS[topic][1]()] if topic in TOPICS else [*_named(topic)]
    if not found:
        raise UsageError(
            f"there is no topic {printable(topic)}; topics are {', '.join(TOPICS)}, the commands, "
            "and the names of options, codes and keys of stage.toml"
        )
    click.echo(_text(context, found))


#: What a shell adds to the number of the signal that ended a program.
_SIGNALS = 128


def _named(name: str) -> Iterator[Section]:
    """Yield the sections that have an option, a code or a key of this name, with its rows alone."""
    if name.isascii() and name.isdecimal() and _SIGNALS < int(name[:4]) < _SIGNALS + 65:
        name = f"{_SIGNALS}+N"
    for _, sections in TOPICS.values():
        for section in sections():
            rows = tuple(row for row in section.rows if name in _names(row[0]))
            if rows or section.title == f"Code {name}":
                yield section._replace(rows=rows, text=section.text if not rows else "")


def _names(term: str) -> list[str]:
    """Return the names in a term: ``%u, $USER`` has two, and so has ``cache.headroom = 0``."""
    found = [_NAME_END.split(part)[0] for part in term.split(", ")]
    return [*found, found[0].rpartition(".")[2]]


def _text(context: click.Context, sections: Iterable[Section]) -> str:
    formatter = context.make_formatter()
    for section in sections:
        if section.title:
            formatter.write_paragraph()
            formatter.write_text(section.title)
        with formatter.indentation():
            for number, paragraph in enumerate(section.paragraphs):
                if number:
                    formatter.write_paragraph()
                formatter.write_text(paragraph)
            if section.rows:
                if section.text:
                    formatter.write_paragraph()
                formatter.write_dl(list(section.rows))
    return formatter.getvalue().strip("\n")
