"""Sphinx's settings for `make docs`: a site of the repository's Markdown, as it is on GitHub.

The source folder is the repository itself, so that a link between pages is the same in both.
"""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from os.path import basename, dirname, normpath
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
DOCS = "slurm-config/docs"
#: The pages outside of `DOCS`. The first leads the menu; what the front page does not link ends it.
#: The search finds the first two alone, as the others are for the project's engineers.
OTHERS = (
    "README", "SECURITY", "CONTRIBUTING", "CHANGELOG", "stager/README", "stager/DECISIONS",
    "tests/README", "tests/bench/README",
)  # fmt: skip

project = "slurm-stage"
author = "the slurm-stage authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
root_doc = f"{DOCS}/README"
include_patterns = [f"{DOCS}/**.md", *(f"{page}.md" for page in OTHERS)]
exclude_patterns = [".*", "build", "*.egg-info"]
myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False  # an option begins with two hyphens

html_theme = "furo"
html_title = f"slurm-stage {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_extra_path = ["index.html"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False


def setup(app: Sphinx) -> None:
    """Have the menu put together while the pages are read."""
    app.connect("source-read", add_menu)


def add_menu(_: Sphinx, page: str, source: list[str]) -> None:
    """Append to the README of a folder of pages what is beneath it in the menu.

    The front page has parts, each with a line in bold before it.
    """
    if page == root_doc:
        _, *parts = re.split(r"^\*\*(.+)\*\*$", source[0], flags=re.MULTILINE)
        listed = [linked(page, text) for text in parts[1::2]]
        rest = [one for one in OTHERS[1:] if one not in chain.from_iterable(listed)]
        source[0] += menu("", [OTHERS[0]])
        source[0] += "".join(map(menu, [*parts[::2], "The project"], [*listed, rest]))
    elif page.startswith(DOCS) and basename(page) == "README":
        own = [one for one in linked(page, source[0]) if dirname(one) == dirname(page)]
        source[0] += menu("", own)
    elif page in OTHERS[2:]:
        source[0] = f"---\nnosearch: true\n---\n{source[0]}"


def linked(page: str, text: str) -> list[str]:
    """Return the pages that ``text`` links, but those of a folder whose README it links too."""
    links = re.findall(r"\]\(([^):#]+)\.md[)#]", text)
    found = dict.fromkeys(normpath(f"{dirname(page)}/{link}") for link in links)
    folders = {dirname(one) for one in found if basename(one) == "README"}
    return [one for one in found if basename(one) == "README" or dirname(one) not in folders]


def menu(caption: str, pages: list[str]) -> str:
    """Return a part of the menu, which the page itself does not show."""
    title = f":caption: {caption}\n" if caption else ""
    entries = "".join(f"/{page}\n" for page in pages)
    return f"\n\n```{{toctree}}\n:hidden:\n{title}\n{entries}```\n"
