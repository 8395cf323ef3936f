"""Describe a source as it was when rank 0 looked at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from stager.base.codec import Count, Short, Time  # noqa: TC001 - the codec reads the types
from stager.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stager.tree.environments import Environment
    from stager.tree.listing import Listing
    from stager.tree.patterns import Patterns


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """The source's stat when it was read: bytes, nanoseconds since 1970, inode.

    An object has no ctime and no inode, but a ``revision``: its ETag.
    """

    size: Count
    mtime_ns: Time
    ctime_ns: Time
    inode: Count
    revision: Short = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder to be staged, wherever it is.

    ``facts`` identify this version of it; in a folder's, the size is that of all files together.
    """

    facts: SourceFacts
    #: The permission bits and the gid: of the source, and for a stage, of its copy.
    mode: int
    group: int
    #: Bytes that it takes on the disk it is read from, without holes.
    allocated: int
    #: The number of files in a folder, and the digest of its listing, which identifies this version
    #: of all that is in it. A file has none.
    files: int = 0
    listing: str = ""
    #: The virtual environments in a folder that are relocated, a digest of how, and a note on one
    #: that cannot work in the copy. Of an archive, the digest is its option ``relocate``.
    environments: tuple[Environment, ...] = ()
    relocation: str = ""
    environment_note: str = ""
    #: The options of the item with a pattern that matches nothing in the folder.
    unmatched: tuple[str, ...] = ()
    #: The number of symbolic links in a folder that lead out of it.
    leaving: int = 0

    @property
    def is_tree(self) -> bool:
        """Whether the source is a folder."""
        return bool(self.listing)


class Selection(NamedTuple):
    """What is staged of a folder: patterns of what is included and excluded, and of the files that
    are decompressed; see `tree.patterns` and `tree.compressed`.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    decompress: tuple[str, ...] = ()
    #: Whether the files of a model are laid out as in the hub's own cache.
    as_cache: bool = False
    #: Whether links in a folder are followed.
    follow: bool = False
    #: Whether interpreters of virtual environments come along.
    relocate: bool = False


#: All of a folder, as it is.
EVERYTHING = Selection()
#: The remedy for patterns because of which nothing is staged.
_CORRECT = "correct the pattern (as in a .gitignore), or stage the whole folder without it"


class Listings:
    """The listings of source folders, by path and patterns. Each folder is listed once.

    They stay apart from Source because a listing is large: it is sent only if some node needs it.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, Selection], tuple[Listing, tuple[str, ...]]] = {}
        #: The environments in a folder, and the note on them; see `tree.environments`.
        self.environments: dict[tuple[str, Selection], tuple[tuple[Environment, ...], str]] = {}

    def get(self, path: str, selection: Selection = EVERYTHING) -> Listing | None:
        """Return the listing of the folder, or None if there is none yet."""
        found = self._found.get((path, selection))
        return found[0] if found else None

    def unmatched(self, path: str, selection: Selection) -> tuple[str, ...]:
        """Return the options with a pattern that matches nothing in the folder, once listed."""
        found = self._found.get((path, selection))
        return found[1] if found else ()

    def list_once(
        self, path: str, selection: Selection, look: Callable[[Patterns | None], Listing]
    ) -> Listing:
        """Return the listing of the folder; call ``look`` for it if there is none yet.

        It is given the patterns of what is staged, if there are any. Raise what it raises, and
        UsageError if two files would have one path when they are decompressed, or if nothing in the
        folder is included, or all of it excluded.
        """
        key = path, selection
        if key not in self._found:
            self._found[key] = _list(path, selection, look)
        return self._found[key][0]

    def clear(self) -> None:
        """Forget all listings: the folders may have changed."""
        self._found.clear()
        self.environments.clear()


def _list(
    path: str, selection: Selection, look: Callable[[Patterns | None], Listing]
) -> tuple[Listing, tuple[str, ...]]:
    """Return the listing, and the options with a pattern that matches nothing in the folder."""
    if not any(selection):
        return look(None), ()
    from stager.tree.patterns import Patterns  # slow to import

    patterns = Patterns(selection.include, selection.exclude)
    listing = look(patterns if selection.include or selection.exclude else None)
    unmatched = tuple(f"include={text}" for text in patterns.unmatched)
    if unmatched and patterns.unmatched == selection.include:
        raise UsageError(_nothing_included(path, unmatched, is_excluded=bool(selection.exclude)))
    if patterns.excludes_all:
        raise UsageError(_all_excluded(path, selection.exclude))
    if not selection.decompress:
        return listing, unmatched
    from stager.tree.compressed import decompressed_listing, patterns_without_effect

    listing = decompressed_listing(listing, selection.decompress, path)
    idle = patterns_without_effect(listing, selection.decompress)
    return listing, unmatched + tuple(f"decompress={text}" for text in idle)


def _nothing_included(path: str, options: Sequence[str], *, is_excluded: bool) -> str:
    """Return the message for a folder of which nothing is staged. Pure."""
    what = "matches nothing" if len(options) == 1 else "match nothing"
    left = " that exclude= leaves" if is_excluded else ""
    return f"{path}: {', '.join(options)} {what} in it{left}; {_CORRECT}"


def _all_excluded(path: str, patterns: Sequence[str]) -> str:
    """Return the message for a folder of which ``exclude`` leaves nothing. Pure."""
    options = ", ".join(f"exclude={text}" for text in patterns)
    what = "leaves nothing" if len(patterns) == 1 else "leave nothing"
    return f"{path}: {options} {what} of it; {_CORRECT}"
