"""Say which pages there are, and which documents stand on each of them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from man import markdown
from man.roff import Page, bold, plain, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

_DOCS = Path(__file__).parents[2] / "slurm-config/docs"
_REFERENCE = _DOCS / "reference"


class Manual(NamedTuple):
    """What a page says first, and its further sections, each of which is a document."""

    purpose: str
    synopsis: tuple[str, ...]
    sections: Mapping[str, Path]


#: All pages, by their names with the number of their section.
PAGES: Mapping[str, Manual] = {
    "stagectl.1": Manual(
        "stage files to the nodes of a Slurm job, and manage the copies there",
        ("`stagectl` COMMAND [OPTIONS] [ARGUMENTS]",),
        {"Description": _REFERENCE / "stagectl.md", "Environment": _REFERENCE / "environment.md"},
    ),
    "stage.toml.5": Manual(
        "the site's configuration of slurm-stage",
        ("`/etc/slurm/stage.toml`",),
        {"Description": _REFERENCE / "stage.toml.md"},
    ),
    "slurm-stage.7": Manual(
        "files on the local disk of every node before a Slurm job starts",
        ("`#SBATCH --stage=`SRC:DST[,option...]", "`#STAGE` SRC:DST[,option...]"),
        {
            "Description": _REFERENCE / "directives.md",
            "Copies": _DOCS / "explain/copies.md",
            "Exit status": _REFERENCE / "exit-codes.md",
        },
    ),
    "spank_stage.8": Manual(
        "the plugin of Slurm that stages files for a job",
        ("`required` /PREFIX/lib/spank_stage.so [`python=`PATH] [`config=`PATH]",),
        {
            "Description": Path(__file__).with_name("spank_stage.md"),
            "Diagnostics": _DOCS / "trouble/admins.md",
        },
    ),
}
_MANUALS = {
    1: "User Commands", 5: "File Formats", 7: "Miscellaneous Information",
    8: "System Administration",
}  # fmt: skip


def make_page(name: str, date: str) -> str:
    """Return the manual page ``name``, which is one of `PAGES`, with the ``date`` in it."""
    title, _, number = name.rpartition(".")
    manual = PAGES[name]
    page = Page(title, int(number), date, version("slurm-stage"), _MANUALS[int(number)])
    page.section("Name")
    page.paragraph(f"{plain(title)} \\- {plain(manual.purpose)}")
    page.section("Synopsis")
    for line in manual.synopsis:
        page.paragraph(quoted(line))
    for section, document in manual.sections.items():
        page.section(section)
        markdown.add(page, markdown.read(document))
    page.section("See also")
    others = [other.rpartition(".") for other in PAGES if other != name]
    page.paragraph(", ".join(f"{bold(title)}({number})" for title, _, number in others))
    return str(page)
