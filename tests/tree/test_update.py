"""Folders that are changed in place: whatever was there, and wherever the change was cut off."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.base.digest import DIGEST_SIZE
from stager.base.errors import DestinationError
from stager.fs.files import OPEN_FOLDER
from stager.store.cache import Cache, open_cache
from stager.tree.listing import Kind, Listing, Row
from stager.tree.partial_tree import PartialTree
from stager.tree.table import Table
from stager.tree.update import Do, State, Step, Update, look, steps

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What may be at a path: the bytes of a file, a folder, or where a link leads. A hard link leads to
#: the first file with its bytes.
FOLDER, LINKS, TWIN = "folder", ("to-a", "to-b"), "twin"
WHEN = 1_700_000_000_000_000_000
PATHS = [
    *"abc",
    *(f"{above}/{name}" for above in "abc" for name in "xyz"),
    *(f"{above}/x/{name}" for above in "ab" for name in "uv"),
]


def as_tree(found: dict[str, str]) -> dict[str, str]:
    """Make folders of all that something lies in, and of a hard link without a file a file."""
    tree = dict(found)
    for path in found:
        for above in Path(path).parents:
            tree[str(above)] = FOLDER
    tree.pop(".", None)
    first = min((path for path, what in tree.items() if what in "12"), default="")
    return {
        path: ("1" if not first or path < first else f"{TWIN} {first}") if what == TWIN else what
        for path, what in tree.items()
    }


KINDS = st.sampled_from(["1", "2", FOLDER, *LINKS, TWIN])
TREES = st.dictionaries(st.sampled_from(PATHS), KINDS, max_size=9).map(as_tree)


def listing_of(tree: dict[str, str]) -> Listing:
    rows = [Row(b"", Kind.FOLDER, 0o755, mtime_ns=WHEN)]
    for path, what in tree.items():
        name = path.encode()
        if what == FOLDER:
            mode = 0o755 if len(tree) % 2 else 0o555
            rows.append(Row(name, Kind.FOLDER, mode, mtime_ns=WHEN))
        elif what in LINKS:
            rows.append(Row(name, Kind.LINK, mtime_ns=WHEN, target=what.encode()))
        elif what.startswith(TWIN):
            rows.append(Row(name, Kind.HARD_LINK, target=what.split()[1].encode()))
        else:
            rows.append(Row(name, Kind.FILE, 0o644, 1, WHEN, inode=ord(what)))
    return Listing.of(rows)


class Copy:
    """The copy of a folder, without MPI."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "copy"
        self.cache: Cache = open_cache(str(folder), os.getuid())
        self.table = Table.empty()

    def build(self, tree: dict[str, str], *, keeps: bool = False) -> tuple[PartialTree, Table]:
        """Return the partial tree, in which files of the copy are kept, and its table."""
        listing = listing_of(tree)
        partial = PartialTree(self.cache, listing)
        partial.lay_out()
        states = look(str(self.path), self.table) if keeps else b""
        kept = dict(self.table.kept(listing, states)) if keeps else {}
        for row in listing.rows(Kind.FILE):
            name = os.fsdecode(listing.paths[row])
            if row in kept:
                partial.keep(row, os.fsencode(self.path / name), self.table, kept[row])
            else:
                partial.create(row, tree[name].encode())
        partial.seal()
        return partial, Table.of(listing, partial.copy, bytes(DIGEST_SIZE * len(listing)), {})

    def stage(self, tree: dict[str, str]) -> None:
        partial, self.table = self.build(tree)
        partial.publish(str(self.path))
        partial.close()

    @contextmanager
    def updating(self, tree: dict[str, str], *, force: bool = False) -> Iterator[Renewal]:
        """Have all that is new in a hidden folder, which is removed at the end."""
        partial, new = self.build(tree, keeps=True)
        hidden = self.cache.update_path("/copy")
        os.makedirs(os.path.dirname(hidden), exist_ok=True)
        partial.hand_over(hidden)
        partial.close()
        yield Renewal(self, new, hidden, force=force)
        self.table = new
        self.cache.drop_update("/copy")

    def seen(self) -> dict[str, str]:
        """Return what is there; a hard link by the first path of its file."""
        found: dict[str, str] = {}
        inodes: dict[int, str] = {}
        for path in sorted(self.path.rglob("*")):
            name = str(path.relative_to(self.path))
            if path.is_symlink():
                found[name] = os.readlink(path)
            elif path.is_dir():
                found[name] = FOLDER
            else:
                first = inodes.setdefault(path.stat().st_ino, name)
                found[name] = path.read_text() if first == name else f"{TWIN} {first}"
        return found


class Renewal:
    """One update of a copy, which may be cut off and begun again."""

    def __init__(self, copy: Copy, new: Table, hidden: str, *, force: bool) -> None:
        self._copy, self.new, self._hidden, self._force = copy, new, hidden, force

    def take(self, most: int | None = None) -> None:
        """Take so many steps, or all, as a process does that ends then."""
        with self.opened() as update:
            for step in islice(update.steps(), most):
                update.take(step)

    def obstacles(self) -> list[str]:
        with self.opened() as update:
            return update.obstacles()

    @contextmanager
    def opened(self) -> Iterator[Update]:
        top = os.open(self._copy.path, OPEN_FOLDER)
        try:
            yield Update("/copy", top, self._copy.table, self.new, self._hidden, force=self._force)
        finally:
            os.close(top)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def check_attributes(copy: Copy) -> None:
    """Check that all is as the table says, and so are the folders' times."""
    assert not any(look(str(copy.path), copy.table))
    for row in copy.table.source.rows(Kind.FOLDER):
        path = copy.path / os.fsdecode(copy.table.source.paths[row])
        assert path.stat().st_mtime_ns == WHEN


@settings(max_examples=80)
@given(TREES, TREES, st.lists(st.integers(0, 40), max_size=3))
def test_any_tree_becomes_any_other_however_often_that_is_cut_off(
    old: dict[str, str], new: dict[str, str], cuts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        copy.stage(old)
        assert copy.seen() == old
        own = {path: f"{path}/mine" for path, what in old.items() if what == FOLDER}
        for name in own.values():
            add(copy.path / name, name)
        no_folders = {path for path, what in new.items() if what != FOLDER}
        blocked = [name for name in own.values() if no_folders & {*map(str, Path(name).parents)}]
        with copy.updating(new) as renewal:
            assert sorted(renewal.obstacles()) == sorted(blocked)
            for name in blocked:
                (copy.path / name).unlink()
            own = {path: name for path, name in own.items() if name not in blocked}
            before = {name: identity(copy.path / name) for name in own.values()}
            for cut in cuts:
                renewal.take(cut)
            renewal.take()
        with_folders = as_tree(dict.fromkeys(own.values(), "3"))
        found = copy.seen()
        assert {path for path in found if path not in new} == set(with_folders) - set(new)
        assert {path: what for path, what in found.items() if path in new} == new
        for name, facts in before.items():
            assert identity(copy.path / name) == facts
            assert (copy.path / name).read_text() == name
        check_attributes(copy)


def identity(path: Path) -> tuple[int, ...]:
    """Return what changes if anything is done to a file but to read it."""
    facts = os.lstat(path)
    return facts.st_ino, facts.st_mode, facts.st_ctime_ns


def add(path: Path, text: str) -> None:
    """Write a file into a folder whatever its mode."""
    mode = path.parent.stat().st_mode
    path.parent.chmod(0o755)
    path.write_text(text)
    path.parent.chmod(mode & 0o7777)


@settings(max_examples=40)
@given(TREES, TREES)
def test_what_a_copy_has_is_removed_but_nothing_that_was_added_or_changed(
    old: dict[str, str], own: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        copy.stage(old)
        mine = {f"{path}-mine" for path in own if path.rpartition("/")[0] in ("", *old)}
        mine = {name for name in mine if (copy.path / name).parent.is_dir()}
        mine = {name for name in mine if not (copy.path / name).parent.is_symlink()}
        for name in mine:
            add(copy.path / name, name)
        changed = next((path for path, what in old.items() if what == "1"), "")
        if changed and f"{TWIN} {changed}" not in old.values():
            (copy.path / changed).write_text("changed")
            mine.add(changed)
        top = os.open(copy.path, OPEN_FOLDER)
        update = Update("/copy", top, copy.table, Table.empty())
        update.remove_old()
        os.close(top)
        assert set(copy.seen()) == set(as_tree(dict.fromkeys(mine, "1")))


def test_the_steps_are_in_an_order_in_which_each_can_be_taken(copy: Copy) -> None:
    copy.stage({"a": FOLDER, "a/x": "1", "b": "1"})
    with copy.updating({"a": "2", "b": FOLDER, "b/x": "1"}) as renewal, renewal.opened() as update:
        old, new = copy.table.source.paths, renewal.new.source.paths
        named = [(step.do, (new, old)[step.do is Do.REMOVE][step.row]) for step in update.steps()]
        assert named == [
            (Do.REMOVE, b"b"), (Do.REMOVE, b"a/x"), (Do.REMOVE, b"a"), (Do.MAKE, b"b"),
            (Do.MOVE, b"a"), (Do.MOVE, b"b/x"), (Do.FINISH, b"b"), (Do.FINISH, b""),
        ]  # fmt: skip
        update.apply()
        assert {step.do for step in update.steps()} == {Do.REMOVE, Do.MAKE, Do.FINISH}
    unchanged = [*steps(copy.table, copy.table, ())]
    assert unchanged == [Step(Do.MAKE, 2), Step(Do.FINISH, 2), Step(Do.FINISH, 0)]


def test_what_comes_in_the_way_after_the_look_is_kept_and_named_until_it_is_moved(
    copy: Copy,
) -> None:
    copy.stage({"a": "1"})
    with copy.updating({"a": "2", "b": "2", "c": FOLDER}) as renewal:
        assert renewal.obstacles() == []
        (copy.path / "a").write_text("mine")
        for _ in range(2):
            with pytest.raises(DestinationError) as caught:
                renewal.take()
            assert str(caught.value) == (
                "/copy holds 1 file that was added or changed after staging: a; it is kept: move "
                "it elsewhere, choose another destination, or add the option replace"
            )
            assert (copy.path / "a").read_text() == "mine"
        (copy.path / "a").unlink()
        renewal.take()
    assert copy.seen() == {"a": "2", "b": "2", "c": FOLDER}


def test_what_is_changed_in_a_folder_that_becomes_a_file_is_kept_and_named(copy: Copy) -> None:
    copy.stage({"a": FOLDER, "a/x": "1", "a/y": FOLDER, "a/y/z": "1"})
    with copy.updating({"a": "2"}) as renewal:
        renewal.take(0)  # and the process ends
        (copy.path / "a/y/z").write_text("mine")
        for _ in range(2):
            with pytest.raises(DestinationError, match=r"holds 1 file .*: a/y/z; it is kept"):
                renewal.take()
        assert (copy.path / "a/y/z").read_text() == "mine"
        (copy.path / "a/y/z").unlink()
        renewal.take()
    assert copy.seen() == {"a": "2"}


def test_a_hard_link_to_a_file_that_is_gone_is_left_to_the_next_stage(copy: Copy) -> None:
    copy.stage({"a": "1"})
    with copy.updating({"a": "1", "b": f"{TWIN} a"}) as renewal:
        (copy.path / "a").unlink()
        renewal.take()
    assert [*look(str(copy.path), copy.table)] == [State.SAME, State.GONE, State.GONE]


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_link_in_the_place_of_a_folder_is_not_followed(copy: Copy, target: str) -> None:
    elsewhere = copy.path.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x").write_text("not staged")
    copy.stage({"a": FOLDER, "a/x": "1", "a/y": "1"})
    with copy.updating({"a": FOLDER, "a/x": "2"}) as renewal:
        shutil.rmtree(copy.path / "a")
        (copy.path / "a").symlink_to(copy.path.parent / target)
        assert renewal.obstacles() == ["a"]
        with pytest.raises(DestinationError):
            renewal.take()
        assert (elsewhere / "x").read_text() == "not staged"
        (copy.path / "a").unlink()
        renewal.take()
    assert os.listdir(elsewhere) == ["x"]
    assert copy.seen() == {"a": FOLDER, "a/x": "2"}


def test_with_force_what_is_new_takes_the_place_of_whatever_is_there(copy: Copy) -> None:
    copy.stage({"a": "1", "b": FOLDER, "b/x": "1", "gone": "1"})
    new = {"a": "2", "b": "2", "c": FOLDER, "c/x": "2", "d": "to-a"}
    with copy.updating(new, force=True) as renewal:
        (copy.path / "a").unlink()
        (copy.path / "a/mine").mkdir(parents=True)
        (copy.path / "b/mine").write_text("mine")
        (copy.path / "c").write_text("mine")
        (copy.path / "d").mkdir()
        (copy.path / "gone").write_text("mine")
        renewal.take()
    assert copy.seen() == new


def test_each_way_in_which_something_may_differ_is_seen(copy: Copy) -> None:
    tree = {"a": "1", "b": "1", "c": FOLDER, "d": "to-a", "e": "2", "f": FOLDER, "f/x": "1"}
    copy.stage(tree)
    (copy.path / "a").unlink()
    (copy.path / "b").chmod(0o600)
    (copy.path / "c").rmdir()
    (copy.path / "c").write_text("1")
    (copy.path / "d").unlink()
    (copy.path / "d").symlink_to("to-b")
    os.utime(copy.path / "e", ns=(5, 5))
    shutil.rmtree(copy.path / "f")
    names = [os.fsdecode(path) for path in copy.table.source.paths]
    states = dict(zip(names, look(str(copy.path), copy.table), strict=True))
    assert states == {
        "": State.SAME, "a": State.GONE, "b": State.MODE, "c": State.CHANGED, "d": State.CHANGED,
        "e": State.CHANGED, "f": State.GONE, "f/x": State.GONE,
    }  # fmt: skip
