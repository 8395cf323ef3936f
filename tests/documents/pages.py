"""The pages for users and administrators, and what is in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
DOCS = "slurm-config/docs"
#: The most words of each page, as `wc -w` counts them, code included.
BUDGETS = {
    "README.md": 899,
    f"{DOCS}/README.md": 79,
    f"{DOCS}/start/first-job.md": 431,
    f"{DOCS}/start/tutorial.md": 1188,
    f"{DOCS}/start/admin-quick-start.md": 379,
    f"{DOCS}/guide/README.md": 200,
    f"{DOCS}/guide/archives.md": 268,
    f"{DOCS}/guide/dataset-parts.md": 204,
    f"{DOCS}/guide/failing-nodes.md": 206,
    f"{DOCS}/guide/folders.md": 293,
    f"{DOCS}/guide/images.md": 301,
    f"{DOCS}/guide/interactive.md": 224,
    f"{DOCS}/guide/larger-than-a-disk.md": 103,
    f"{DOCS}/guide/models-and-buckets.md": 317,
    f"{DOCS}/guide/paths-and-arrays.md": 413,
    f"{DOCS}/guide/python.md": 232,
    f"{DOCS}/guide/results.md": 175,
    f"{DOCS}/guide/space.md": 354,
    f"{DOCS}/guide/without-slurm.md": 221,
    f"{DOCS}/admin/README.md": 172,
    f"{DOCS}/admin/check.md": 230,
    f"{DOCS}/admin/containers.md": 614,
    f"{DOCS}/admin/disks.md": 560,
    f"{DOCS}/admin/install-packages.md": 174,
    f"{DOCS}/admin/install-prefix.md": 180,
    f"{DOCS}/admin/many-nodes.md": 255,
    f"{DOCS}/admin/network.md": 289,
    f"{DOCS}/admin/remove.md": 245,
    f"{DOCS}/admin/requirements.md": 335,
    f"{DOCS}/admin/security.md": 236,
    f"{DOCS}/admin/shared-files.md": 311,
    f"{DOCS}/admin/space.md": 360,
    f"{DOCS}/admin/speed.md": 344,
    f"{DOCS}/admin/upgrade.md": 171,
    f"{DOCS}/admin/urls.md": 205,
    f"{DOCS}/admin/watch.md": 380,
    f"{DOCS}/admin/without-plugin.md": 241,
    f"{DOCS}/admin/without-slurm.md": 460,
    f"{DOCS}/trouble/users.md": 382,
    f"{DOCS}/trouble/admins.md": 840,
    f"{DOCS}/explain/how-it-works.md": 371,
    f"{DOCS}/explain/copies.md": 551,
    f"{DOCS}/explain/permissions.md": 141,
    f"{DOCS}/explain/limits.md": 116,
}  # fmt: skip
#: The most words of these pages in all.
MOST = 14_650
#: The budgets of pages for others too, which do not count for `MOST`.
OTHERS = {"SECURITY.md": 1600, "CONTRIBUTING.md": 450, "CHANGELOG.md": 800}
#: Made from the code; the most words in all.
REFERENCE, MOST_IN_REFERENCE = f"{DOCS}/reference", 5500

#: Pages whose commands a test runs: in tests/documents, tests/cluster/test_pages.py, or
#: tests/packaging/sites.py.
RUN = {
    f"{DOCS}/start/tutorial.md", f"{DOCS}/start/first-job.md", f"{DOCS}/start/admin-quick-start.md",
    f"{DOCS}/guide/archives.md", f"{DOCS}/guide/dataset-parts.md", f"{DOCS}/guide/interactive.md",
    f"{DOCS}/guide/python.md", f"{DOCS}/guide/space.md", f"{DOCS}/admin/check.md",
    f"{DOCS}/admin/remove.md",
}  # fmt: skip
#: How commands begin that are as tests of their own give them, or need what no test has.
NOT_RUN = (
    "conda-pack ", "sbatch --stage=/shared/alice/env.tar.gz:", "skopeo login ", "sbatch -N64 ",
    "stagectl stage --hosts ", "stagectl stage --verbose ", "srun -N2 --container-image",
    "srun -N2 --stage=/shared/img.sqsh:/nvme/alice/ --container-image",
    "packaging/install ", "PYTHON=", "PREFIX/", "apt -o ", "useradd ", "install -d ", "sudo -u ",
    "stagectl status --user ", "stagectl evict --user ", "for uid in ",
)  # fmt: skip

_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"\]\(([^)\s]*)\)")


class Block(NamedTuple):
    """A block of code of a page: what is behind its opening line's backticks, and its lines."""

    info: str
    text: str


def pages() -> list[str]:
    """Return the paths of all pages in the repository."""
    made = [*(REPOSITORY / REFERENCE).glob("*.md")]
    return [*BUDGETS, *OTHERS, *sorted(str(one.relative_to(REPOSITORY)) for one in made)]


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text("utf-8")


def words(text: str) -> int:
    return len(text.split())


def prose(page: str) -> str:
    """Return a page without code and without what links lead to."""
    return _LINK.sub("]", _CODE.sub("CODE", _FENCED.sub("", text_of(page))))


def links(page: str) -> Iterator[str]:
    yield from _LINK.findall(_CODE.sub("", _FENCED.sub("", text_of(page))))


def headings(page: str) -> set[str]:
    """Return the anchors of a page, as GitHub makes them of its headings."""
    tokens = MarkdownIt("commonmark").parse(text_of(page))
    titles = [tokens[at + 1] for at, one in enumerate(tokens) if one.type == "heading_open"]
    named = re.findall(r'<a (?:id|name)="([^"]+)"', text_of(page))
    return {*map(_anchor, titles), *named}


def _anchor(title: Token) -> str:
    text = "".join(part.content for part in title.children or ())
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def blocks(page: str) -> list[Block]:
    tokens = MarkdownIt("commonmark").parse(text_of(page))
    return [Block(one.info.strip(), one.content) for one in tokens if one.type == "fence"]


class Said(NamedTuple):
    """A command of a page, and the output that the page says it has."""

    command: str
    output: str


def said(page: str, sign: str = "$") -> list[Said]:
    """Return a page's commands: those of blocks without a language that begin with the sign."""
    texts = (block.text for block in blocks(page) if not block.info)
    sessions = "".join(text for text in texts if text.startswith(f"{sign} "))
    parts = re.split(rf"^{re.escape(sign)} ", sessions, flags=re.MULTILINE)
    return [Said(*part.split("\n", 1)) for part in parts[1:]]


def codes(page: str) -> list[str]:
    """Return what stands in backticks within lines, in one line each."""
    found = _CODE.findall(_FENCED.sub("", text_of(page)))
    return [" ".join(one.strip("`").replace("\\|", "|").split()) for one in found]
