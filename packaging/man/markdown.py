"""Turn a Markdown document into parts of a manual page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markdown_it import MarkdownIt  # rich depends on it
from markdown_it.tree import SyntaxTreeNode

from man.roff import bold, italic, plain

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from man.roff import Page


def read(path: Path) -> list[SyntaxTreeNode]:
    """Return what a document has below its title."""
    tree = SyntaxTreeNode(MarkdownIt("commonmark").enable("table").parse(path.read_text("utf-8")))
    return [node for node in tree.children if node.tag != "h1"]


def add(page: Page, nodes: Iterable[SyntaxTreeNode]) -> None:
    """Add what ``nodes`` hold to ``page``. Raise ValueError for what no page can show."""
    for node in nodes:
        match node.type:
            case "paragraph":
                page.paragraph(_text(node.children[0]))
            case "heading":
                page.subsection(node.children[0].content)
            case "fence":
                page.verbatim(node.content)
            case "bullet_list" | "ordered_list":
                _add_list(page, node)
            case "table":
                _add_table(page, node)
            case _:
                raise ValueError(f"a manual page has nothing for the Markdown of a {node.type}")


def _add_list(page: Page, node: SyntaxTreeNode) -> None:
    for number, (first, *more) in enumerate((item.children for item in node.children), 1):
        page.item(plain("•") if node.type == "bullet_list" else f"{number}.")
        page.paragraph(_text(first.children[0]))
        if more:
            page.begin_block()
            add(page, more)
            page.end_block()


def _add_table(page: Page, node: SyntaxTreeNode) -> None:
    """Add each row as its first cell and, indented, the others: columns would be too narrow."""
    head, *bodies = node.children
    names = [_text(cell.children[0]) for cell in head.children[0].children]
    for row in (row for body in bodies for row in body.children):
        tag, *between, last = (_text(cell.children[0]) for cell in row.children)
        pairs = zip(names[1:-1], between, strict=True)
        named = (f"{name}: {text}" for name, text in pairs if text)
        page.tagged(tag, *named, last)


def _text(node: SyntaxTreeNode) -> str:
    """Return the text of an inline node. Raise ValueError for what no page can show."""
    match node.type:
        case "inline" | "link":  # a link's target is a file of the repository
            return "".join(map(_text, node.children))
        case "text":
            return plain(node.content)
        case "code_inline":
            return bold(node.content)
        case "strong":
            return bold(_joined(node))
        case "em":
            return italic(_joined(node))
        case "softbreak":
            return " "
    raise ValueError(f"a manual page has nothing for the Markdown of a {node.type}")


def _joined(node: SyntaxTreeNode) -> str:
    """Return what is emphasized, in one line."""
    return "".join(" " if child.type == "softbreak" else child.content for child in node.children)
