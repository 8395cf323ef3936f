"""Find the symbolic links of an archive that lead out of it. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: The one link that may lead out: from ``bin/python3`` of an environment to its interpreter.
_INTERPRETER_LINK = re.compile(rb"(^|/)bin/(python|pypy)[0-9.]*[a-z]?\Z")
_INTERPRETER = re.compile(rb"(.*/)?(python|pypy)[0-9.]*[a-z]?")
#: Links that the kernel follows in one path (path_resolution(7)).
_MOST_LINKS = 40


def bad_links(links: Mapping[bytes, bytes]) -> Iterator[tuple[bytes, str]]:
    """Yield the path of each link that no archive may have, and why; ``links`` maps to targets."""
    resolver = _Resolver(links)
    for path, target in links.items():
        if _INTERPRETER_LINK.search(path) and _INTERPRETER.fullmatch(target):
            continue
        end, count = resolver.follow(path)
        if count > _MOST_LINKS:
            yield path, f"is a link that passes through more than {_MOST_LINKS} links"
        elif end is None:
            yield path, "is a link that leads out of the archive"


class _Resolver:
    """Follows the ``links`` of an archive, each of them once."""

    def __init__(self, links: Mapping[bytes, bytes]) -> None:
        self._links = links
        self._known: dict[bytes, tuple[bytes | None, int]] = {}

    def follow(self, link: bytes, depth: int = 1) -> tuple[bytes | None, int]:
        """Return where ``link`` leads, None for outside, and how many links that takes.

        Stop where they are more than `_MOST_LINKS`; the path is of no use then.
        """
        if link in self._known:
            return self._known[link]
        if depth > _MOST_LINKS:
            return b"", depth
        target, count = self._links[link], 1
        at: bytes | None = None if target.startswith(b"/") else link.rpartition(b"/")[0]
        for part in target.split(b"/"):
            if at is None or count > _MOST_LINKS:
                break
            at = _step(at, part)
            if at is not None and at in self._links:
                at, further = self.follow(at, depth + 1)
                count += further
        self._known[link] = at, count
        return at, count


def _step(at: bytes, part: bytes) -> bytes | None:
    """Return the path of ``part`` in the folder ``at``, or None for outside."""
    if part in (b"", b"."):
        return at
    if part == b"..":
        return at.rpartition(b"/")[0] if at else None
    return at + b"/" + part if at else part
