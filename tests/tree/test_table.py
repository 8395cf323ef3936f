"""Tables of trees: a file is kept if neither the source nor the copy of it changed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.base.digest import DIGEST_SIZE
from stager.tree.table import Table
from stager.tree.update import look
from stager.tree.walk import walk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAMES = ("a", "b", "sub/c", "sub/d")


class Mirror:
    """A source with a copy of it, and their table."""

    def __init__(self, folder: Path) -> None:
        self.source, self.copy = folder / "source", folder / "copy"
        for side in (self.source, self.copy):
            (side / "sub").mkdir(parents=True)
            for number, name in enumerate(NAMES):
                (side / name).write_bytes(b"x" * number)
                os.utime(side / name, ns=(number, number))
        source = walk(str(self.source))
        digests = bytes(range(len(source))) * DIGEST_SIZE
        self.table = Table.of(source, walk(str(self.copy)), digests, {2: b"was", 4: b""})

    def kept(self) -> list[str]:
        """Return the names of the files that need not be sent again now."""
        now = walk(str(self.source))
        pairs = list(self.table.kept(now, look(str(self.copy), self.table)))
        for row, before in pairs:
            assert now.paths[row] == self.table.source.paths[before]
        return [now.paths[row].decode() for row, _ in pairs]


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path)


def test_a_table_is_read_as_it_was_written(mirror: Mirror) -> None:
    assert Table.from_bytes(mirror.table.to_bytes()) == mirror.table


def test_a_table_that_is_cut_is_refused(mirror: Mirror) -> None:
    text = mirror.table.to_bytes()
    for length in range(len(text)):
        with pytest.raises(ValueError, match=r"."):
            Table.from_bytes(text[:length])


def test_files_that_did_not_change_are_kept(mirror: Mirror) -> None:
    assert mirror.kept() == list(NAMES)
    assert mirror.table.gone(walk(str(mirror.source))) == 0


def _replace(path: Path) -> None:
    facts = path.stat()
    path.with_name("new").write_bytes(path.read_bytes())
    os.utime(path.with_name("new"), ns=(facts.st_atime_ns, facts.st_mtime_ns))
    path.with_name("new").replace(path)


def _make_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("a")


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda path: path.write_bytes(b"changed"),
    "touched": lambda path: os.utime(path, ns=(99, 99)),
    "removed": lambda path: path.unlink(),
    "replaced": _replace,
    "a link now": _make_link,
    "a folder now": _make_folder,
    "of another mode": lambda path: path.chmod(0o600),
}


@pytest.mark.parametrize("side", ["source", "copy"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_changed_on_either_side_is_not_kept(
    mirror: Mirror, change: Callable[[Path], object], side: str
) -> None:
    change(getattr(mirror, side) / "b")
    assert mirror.kept() == ["a", "sub/c", "sub/d"]


def test_a_new_file_is_not_kept_and_a_removed_one_is_counted(mirror: Mirror) -> None:
    (mirror.source / "sub/new").touch()
    (mirror.source / "a").unlink()
    assert mirror.kept() == ["b", "sub/c", "sub/d"]
    assert mirror.table.gone(walk(str(mirror.source))) == 1
