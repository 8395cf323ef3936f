"""Give each command a short help, ``-h``, beside the full one, ``--help``."""

from __future__ import annotations

import re
from typing import Any

import click

#: The end of a sentence of an option's help.
_END = re.compile(r"(?<=\.)\s")


def _show(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not context.resilient_parsing:
        click.echo(short_help(context))
        context.exit()


_SHORT = click.Option(
    ["-h"], is_flag=True, is_eager=True, expose_value=False, callback=_show,
    help="Show the short help and exit.",
)  # fmt: skip


def short_help(context: click.Context) -> str:
    """Return the usage, what the command does in one sentence, and the same of each option."""
    command, formatter = context.command, context.make_formatter()
    command.format_usage(context, formatter)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text((command.help or "").split("\n\n")[0])
    options = (one for one in command.get_params(context) if isinstance(one, click.Option))
    records = (option.get_help_record(context) for option in options)
    with formatter.section("Options"):
        formatter.write_dl([(names, _END.split(text)[0]) for names, text in filter(None, records)])
    if isinstance(command, click.Group):
        command.format_commands(context, formatter)
    return formatter.getvalue().rstrip("\n")


class Command(click.Command):
    """A command for users, whose full help names the ``topics`` of `cli.topics` that go with it."""

    def __init__(self, name: str | None, *, topics: tuple[str, ...] = (), **settings: Any) -> None:
        known = [f"`stagectl help {topic}`" for topic in (*topics, "codes")]
        super().__init__(name, epilog=f"See also {', '.join(known)}.", **settings)

    def get_params(self, context: click.Context) -> list[click.Parameter]:
        """Return the parameters, with that of the short help before that of the full one."""
        return with_short_help(super().get_params(context))


def with_short_help(parameters: list[click.Parameter]) -> list[click.Parameter]:
    """Return the parameters of a command, the last of which shows its help, with ``-h``."""
    *others, full = parameters
    assert isinstance(full, click.Option)
    full.help = "Show the full help and exit."
    return [*others, _SHORT, full]
