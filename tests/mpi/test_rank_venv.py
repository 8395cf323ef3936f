"""Whole stages of Python environments, which are relocated."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base.options import Relocate, Validate, Verify
from stager.base.outcome import Counts, Note, NoteKind
from tests.support.tree_world import TreeWorld, archive_of

if TYPE_CHECKING:
    from pathlib import Path

    from mpi4py import MPI


@pytest.fixture
def world(comm: MPI.Intracomm, folder: Path) -> TreeWorld:
    return TreeWorld(comm, folder)


SCRIPT = "#!{}/bin/python\nprint('hello')\n"


def make_environment(world: TreeWorld) -> None:
    """Replace the source by a virtual environment."""

    def make() -> None:
        shutil.rmtree(world.source)
        (world.source / "bin").mkdir(parents=True)
        (world.source / "lib/python3.11/site-packages").mkdir(parents=True)
        (world.source / "pyvenv.cfg").write_text(
            f"home = /usr/bin\ncommand = venv {world.source}\n"
        )
        (world.source / "bin/activate").write_text('VIRTUAL_ENV="/made/here"\n')
        (world.source / "bin/hello").write_text(SCRIPT.format(world.source))
        (world.source / "bin/made").write_text(SCRIPT.format("/made/here"))
        (world.source / "bin/python").symlink_to("/usr/bin/python3")
        (world.source / "lib/python3.11/site-packages/module.py").write_text(str(world.source))
        for path in (world.source / "bin").iterdir():
            if not path.is_symlink():
                path.chmod(0o555)

    world.on_first(make)


def check_environment(world: TreeWorld) -> None:
    """Check that the files of the copy name its own path."""
    assert (world.copy / "bin/hello").read_text() == SCRIPT.format("/nvme/tree")
    assert (world.copy / "bin/made").read_text() == SCRIPT.format("/nvme/tree")
    assert (world.copy / "bin/activate").read_text() == 'VIRTUAL_ENV="/nvme/tree"\n'
    assert (world.copy / "pyvenv.cfg").read_text() == "home = /usr/bin\ncommand = venv /nvme/tree\n"
    module = world.copy / "lib/python3.11/site-packages/module.py"
    assert module.read_text() == str(world.source)
    assert (world.copy / "bin/hello").stat().st_mode & 0o777 == 0o500
    world.comm.Barrier()


@pytest.mark.parametrize("verify", Verify)
def test_an_environment_names_its_destination(world: TreeWorld, verify: Verify) -> None:
    make_environment(world)
    (item,) = world.run(items=world.items(verify=verify)).items
    assert item.notes == []  # its link to the interpreter leads out of it as it must
    check_environment(world)
    assert item.received == world.nodes
    for validate in (Validate.STAT, Validate.CHECKSUM):
        (item,) = world.run(items=world.items(validate=validate)).items
        assert (item.received, item.reasons) == ([], [])


def test_only_changes_of_an_environment_move_and_are_relocated(world: TreeWorld) -> None:
    make_environment(world)
    world.run(items=world.items())
    world.on_first((world.source / "bin/hello").unlink)
    text = SCRIPT.format(world.source)
    world.on_first(lambda: (world.source / "bin/hello").write_text(text))
    world.on_first(lambda: (world.source / "bin/hello").chmod(0o555))
    (item,) = world.run(items=world.items()).items
    assert item.tree == Counts(5, 1, len(text))
    check_environment(world)


def test_a_node_without_the_environment_gets_it_from_a_node_that_has_it(world: TreeWorld) -> None:
    if world.comm.size == 1:
        return
    make_environment(world)
    world.run(items=world.items())
    world.on_last(lambda: shutil.rmtree(world.copy))
    (item,) = world.run(items=world.items()).items
    assert (item.received, item.senders) == ([world.nodes[-1]], ["node0"])
    check_environment(world)
    world.on_last((world.copy / "bin/hello").unlink)
    (item,) = world.run(items=world.items()).items
    assert (item.received, item.senders) == ([world.nodes[-1]], ["node0"])
    assert item.tree is not None
    assert item.tree.moved == 1
    check_environment(world)


def test_an_environment_stays_as_it_is_without_relocation(world: TreeWorld) -> None:
    make_environment(world)
    world.run(items=world.items())
    (item,) = world.run(items=world.items(relocate=Relocate.NO)).items
    assert (item.received, item.reasons) == (world.nodes, ["relocated differently"])
    assert (world.copy / "bin/made").read_text() == SCRIPT.format("/made/here")
    (item,) = world.run(items=world.items()).items
    assert (item.received, item.reasons) == (world.nodes, ["relocated differently"])
    check_environment(world)


def test_an_archived_environment_is_relocated_when_it_is_unpacked(world: TreeWorld) -> None:
    make_environment(world)
    world.on_first((world.source / "bin/python").unlink)
    world.on_first(lambda: (world.source / "bin/python").symlink_to("/nowhere/python3"))
    items = world.items(source=archive_of(world, ".tar.gz"), extract=True)
    (item,) = world.run(items=items).items
    note = (
        f"note: the interpreter of {items[0].source}, /nowhere/python3, is not on the nodes; make "
        "it with a Python that they have, or with one on shared storage"
    )
    assert item.notes == [Note(NoteKind.REMARK, note)]
    assert (world.copy / "bin/made").read_text() == SCRIPT.format("/nvme/tree")
    assert (world.copy / "bin/activate").read_text() == 'VIRTUAL_ENV="/nvme/tree"\n'
    for validate in (Validate.STAT, Validate.CHECKSUM):
        (item,) = world.run(
            items=(replace(items[0], options=replace(items[0].options, validate=validate)),)
        ).items
        assert (item.received, item.reasons, item.notes) == ([], [], [Note(NoteKind.REMARK, note)])


def test_the_option_is_nothing_for_other_folders(world: TreeWorld) -> None:
    assert world.stage().received == world.nodes
    (item,) = world.run(items=world.items(relocate=Relocate.NO)).items
    assert item.received == []
