"""Say which pages there are, and which text stands in which of their sections."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

import click

from man import markdown
from man.roff import Page, bold, plain, quoted
from stager.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Mapping

    from markdown_it.tree import SyntaxTreeNode

_REPOSITORY = Path(__file__).parents[2]
#: The documents, for users and for administrators.
README = _REPOSITORY / "README.md"
ADMIN = _REPOSITORY / "slurm-config" / "README.md"
_EXAMPLE = _REPOSITORY / "slurm-config" / "stage.toml"

#: The sections of each page: the title, the document, and the heading there, which is empty for
#: what precedes all headings.
SECTIONS: Mapping[str, tuple[tuple[str, Path, str], ...]] = {
    "stagectl.1": (
        ("Overview", README, "stagectl"),
        ("Without Slurm", README, "Without Slurm"),
    ),
    "stage.toml.5": (
        ("Description", ADMIN, "stage.toml"),
        ("Space and eviction", ADMIN, "Space and eviction"),
        ("Files for all users", ADMIN, "Files for all users"),
        ("Connections between ranks", ADMIN, "Connections between ranks"),
        ("Metrics", ADMIN, "Metrics"),
        ("Tuning", ADMIN, "Tuning"),
    ),
    "slurm-stage.7": (
        ("Description", README, ""),
        ("What it does to your files", README, "What it does to your files"),
        ("How to ask for files", README, "How to ask for files"),
        ("What you should know", README, "What you should know"),
        ("Troubleshooting", README, "Troubleshooting"),
        ("Exit status", README, "When it fails"),
        ("Examples", README, "Six examples"),
    ),
    "spank_stage.8": (
        ("Description", ADMIN, ""),
        ("Requirements", ADMIN, "What you need"),
        ("Install on Debian", ADMIN, "Install on Debian"),
        ("Install by RPM", ADMIN, "Install by RPM"),
        ("Install beneath a prefix", ADMIN, "Install beneath a prefix"),
        ("What a node gets", ADMIN, "What a node gets"),
        ("Check the installation", ADMIN, "Check the installation"),
        ("Update", ADMIN, "Update"),
        ("Remove", ADMIN, "Remove"),
        ("Without the plugin", ADMIN, "Without the plugin"),
        ("Without Slurm", ADMIN, "Without Slurm"),
        ("Jobs that tolerate failing nodes", ADMIN, "Jobs that tolerate failing nodes"),
        ("Credentials for URLs", ADMIN, "Credentials for URLs"),
        ("Images from registries", ADMIN, "Images from registries"),
        ("pyxis and enroot", ADMIN, "pyxis and enroot"),
        ("An importer for pyxis", ADMIN, "An importer for pyxis"),
        ("What is told outside of a job", ADMIN, "What is told outside of a job"),
        ("Diagnostics", ADMIN, "When something fails"),
    ),
}
#: What precedes a paragraph of a command's help whose lines stay as they are.
_AS_IT_IS = "\b\n"
_PURPOSES = {
    "stagectl.1": "stage files to the nodes of a Slurm job, and manage the copies there",
    "stage.toml.5": "the site's configuration of slurm-stage",
    "slurm-stage.7": "files on the local disk of every node before a Slurm job starts",
    "spank_stage.8": "the plugin of Slurm that stages files for a job",
}
_MANUALS = {
    1: "User Commands", 5: "File Formats", 7: "Miscellaneous Information",
    8: "System Administration",
}  # fmt: skip


def make_page(name: str, date: str) -> str:
    """Return the manual page ``name``, which is one of `SECTIONS`, with the ``date`` in it.

    Raise ValueError if a document has no such section any more.
    """
    title, _, number = name.rpartition(".")
    page = Page(title, int(number), date, version("slurm-stage"), _MANUALS[int(number)])
    page.section("Name")
    page.paragraph(f"{plain(title)} \\- {plain(_PURPOSES[name])}")
    if name == "stagectl.1":
        _add_synopsis(page)
    for section, document, heading in SECTIONS[name]:
        page.section(section)
        if heading not in _sections(document):
            raise ValueError(f"{document} has no section '{heading}', which is to be in {name}")
        markdown.add(page, _sections(document)[heading])
    if name == "stagectl.1":
        _add_commands(page)
    if name == "stage.toml.5":
        page.section("Examples")
        page.verbatim(_EXAMPLE.read_text("utf-8"))
    page.section("See also")
    others = [other.rpartition(".") for other in SECTIONS if other != name]
    page.paragraph(", ".join(f"{bold(title)}({number})" for title, _, number in others))
    return str(page)


@cache
def _sections(document: Path) -> dict[str, list[SyntaxTreeNode]]:
    return markdown.read_sections(document)


def _context() -> click.Context:
    return click.Context(cli, info_name="stagectl", **cli.context_settings)


def _add_synopsis(page: Page) -> None:
    """Add what ``stagectl --help`` says."""
    page.section("Synopsis")
    page.paragraph(_usage(cli, _context()))
    page.section("Description")
    _add_help(page, cli, _context())


def _add_commands(page: Page) -> None:
    """Add what the help of each command says that users call."""
    page.section("Commands")
    for name in cli.list_commands(_context()):
        command = cli.get_command(_context(), name)
        assert command
        if not command.hidden:
            page.subsection(f"stagectl {name}")
            within = click.Context(command, info_name=name, parent=_context())
            page.paragraph(_usage(command, within))
            _add_help(page, command, within)


def _usage(command: click.Command, context: click.Context) -> str:
    arguments = " ".join(command.collect_usage_pieces(context))
    return f"{bold(context.command_path)} {plain(arguments)}"


def _add_help(page: Page, command: click.Command, context: click.Context) -> None:
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        page.paragraph(quoted(paragraph))
    for option in command.get_params(context):
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record:
            page.tagged(bold(record[0]), quoted(record[1]))
    for paragraph in filter(None, (command.epilog or "").split("\n\n")):
        if paragraph.startswith(_AS_IT_IS):
            page.verbatim(paragraph.removeprefix(_AS_IT_IS))
        else:
            page.paragraph(quoted(paragraph))
