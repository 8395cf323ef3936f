"""After a job, the entries of all users take no more than the size of the store."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stager.base.rules import read_rules
from stager.node import tidy
from stager.node.folders import make_folder
from stager.node.headroom import make_headroom
from stager.node.runtime import begin_job
from stager.store.record import TreeFacts
from tests.support.copies import MIB, Node
from tests.support.disks import tmpfs
from tests.support.users import OWNER, USER, as_user, on_tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = pytest.mark.root


class Store:
    """A store with the entries of two users, on a node that knows its jobs."""

    def __init__(self, disk: Path, size: str, keys: str = "") -> None:
        self.disk = disk
        self.config = disk.parent / "stage.toml"
        self.config.write_text(
            f'roots = ["/jobs/%j"]\n[cache]\nstore = "{disk}"\nsize = {size}\n{keys}\n'
        )
        for uid in (USER, OWNER):
            make_folder(str(disk), ".slurm-stage", uid, uid)
        begin_job(17, USER, USER)  # so that jobs are known

    def put(self, uid: int, number: int, used_at: int, *, pinned: bool = False) -> None:
        """Put an entry of one MiB there."""
        as_user(uid, lambda: self._node().put_entry(number, MIB, used_at, pinned=pinned) and None)

    def _node(self) -> Node:
        return Node(self.disk)

    def ask(self, uid: int, options: Sequence[str], *_: object) -> dict[str, Any]:
        """Ask a user as root does, in a process of theirs."""

        def tell() -> dict[str, Any]:
            with redirect_stdout(StringIO()) as output:
                tidy.main(["--config", str(self.config), *options])
            answer: dict[str, Any] = json.loads(output.getvalue())
            return answer

        return as_user(uid, tell)

    def left(self) -> list[int]:
        """Do what root does after a job. Return the numbers of the entries that are left."""
        make_headroom(read_rules(str(self.config)), self.ask)
        return sorted(
            int(path.parent.name, 16) for path in self.disk.glob(".slurm-stage/*/store/*/data")
        )


@pytest.fixture
def run() -> Iterator[Callable[..., list[int]]]:
    """Runs a function with a store of its own."""
    with tmpfs() as disk:
        disk.parent.chmod(0o755)

        def act(use: Callable[[Store], list[int]], size: str, keys: str = "") -> list[int]:
            return on_tmpfs(Path("/run"), "mode=755", lambda: use(Store(disk, size, keys)))

        yield act


def fill(store: Store) -> list[int]:
    for number, uid in enumerate((USER, OWNER, USER, OWNER)):
        store.put(uid, number, used_at=10 + number)
    return store.left()


@pytest.mark.parametrize(
    ("size", "left"),
    [(0, [0, 1, 2, 3]), (4 * MIB, [0, 1, 2, 3]), (3 * MIB, [1, 2, 3]), (MIB, [3]), (1, [])],
)
def test_the_least_recently_used_entries_of_all_users_go(
    run: Callable[..., list[int]], size: int, left: list[int]
) -> None:
    assert run(fill, str(size)) == left


def test_the_store_has_its_own_figures(run: Callable[..., object]) -> None:
    def act(store: Store) -> object:
        for number in range(3):
            store.put(USER, number, used_at=number)
        return store.ask(USER, ["--usage"])["usage"] == {str(store.disk): [3 * MIB, 3]}

    assert run(act, "0") is True


def test_the_size_may_be_a_share_of_the_disk(run: Callable[..., list[int]]) -> None:
    assert run(fill, '"6.25%"') == [2, 3]  # of 32 MiB


def test_the_size_holds_where_there_is_headroom_too(run: Callable[..., list[int]]) -> None:
    assert run(fill, str(3 * MIB), "headroom = 1") == [1, 2, 3]


def test_who_pins_or_lies_takes_no_more_from_others_than_the_size(
    run: Callable[..., list[int]],
) -> None:
    def act(store: Store, *, grow: bool) -> list[int]:
        store.put(USER, 0, used_at=10, pinned=True)
        store.put(OWNER, 1, used_at=11)
        store.put(OWNER, 2, used_at=12)
        if grow:
            as_user(USER, partial(_forge, store.disk))
        return store.left()

    assert run(partial(act, grow=False), str(2 * MIB)) == [0, 2]
    assert run(partial(act, grow=True), str(2 * MIB)) == [0]


def _forge(disk: Path) -> None:
    """Have a record say that a folder takes far more than there is."""
    node = Node(disk)
    path = Path(node.entry(7)).parent / "forged"
    path.mkdir(parents=True)
    there = path.stat()
    record = node.put_entry(0, MIB, 10, pinned=True)
    facts = replace(record.copy_facts, inode=there.st_ino, owner=there.st_uid)
    tree = TreeFacts(1, 1 << 40, "0" * 32, "0" * 32)
    node.cache.save(replace(record, destination=str(path), copy_facts=facts, tree=tree))
