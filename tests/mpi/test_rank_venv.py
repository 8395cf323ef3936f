"""Whole stages of Python environments, which are relocated."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stager.base.options import Relocate, Validate, Verify
from stager.base.outcome import Counts
from tests.support.tree_world import TreeWorld, archive_of
from tests.support.world import messages

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


VENV = {"relocate": Relocate.VENV}


def test_an_environment_that_is_not_to_be_relocated_gets_a_note(world: TreeWorld) -> None:
    make_environment(world)
    (item,) = world.run(items=world.items()).items
    assert item.note == (
        f"note: {world.source} is a Python environment: without relocate=venv, the scripts of the "
        "copy may still use the environment there"
    )
    assert world.run(items=world.items()).items[0].note == ""  # it is current
    assert world.run(items=world.items(**VENV)).items[0].note == ""
    assert world.run(items=world.items(exclude=("/pyvenv.cfg",))).items[0].note == (
        f"note: 1 link in {world.source} leads out of it; what is there is not in the copy "
        "without links=follow"
    )


@pytest.mark.parametrize("verify", Verify)
def test_an_environment_names_its_destination(world: TreeWorld, verify: Verify) -> None:
    make_environment(world)
    (item,) = world.run(items=world.items(**VENV, verify=verify)).items
    check_environment(world)
    assert item.received == world.nodes
    for validate in (Validate.STAT, Validate.CHECKSUM):
        (item,) = world.run(items=world.items(**VENV, validate=validate)).items
        assert (item.received, item.reasons) == ([], [])


def test_only_changes_of_an_environment_move_and_are_relocated(world: TreeWorld) -> None:
    make_environment(world)
    world.run(items=world.items(**VENV))
    world.on_first((world.source / "bin/hello").unlink)
    text = SCRIPT.format(world.source)
    world.on_first(lambda: (world.source / "bin/hello").write_text(text))
    world.on_first(lambda: (world.source / "bin/hello").chmod(0o555))
    (item,) = world.run(items=world.items(**VENV)).items
    assert item.tree == Counts(5, 1, len(text))
    check_environment(world)


def test_a_node_without_the_environment_gets_it_from_a_node_that_has_it(world: TreeWorld) -> None:
    if world.comm.size == 1:
        return
    make_environment(world)
    world.run(items=world.items(**VENV))
    world.on_last(lambda: shutil.rmtree(world.copy))
    (item,) = world.run(items=world.items(**VENV)).items
    assert (item.received, item.senders) == ([world.nodes[-1]], ["node0"])
    check_environment(world)
    world.on_last((world.copy / "bin/hello").unlink)
    (item,) = world.run(items=world.items(**VENV)).items
    assert (item.received, item.senders) == ([world.nodes[-1]], ["node0"])
    assert item.tree is not None
    assert item.tree.moved == 1
    check_environment(world)


def test_a_copy_that_was_relocated_differently_is_not_current(world: TreeWorld) -> None:
    make_environment(world)
    assert world.stage().received == world.nodes
    (item,) = world.run(items=world.items(**VENV)).items
    assert (item.received, item.reasons) == (world.nodes, ["relocated differently"])
    check_environment(world)
    assert world.stage().reasons == ["relocated differently"]


def test_an_archived_environment_is_relocated_when_it_is_unpacked(world: TreeWorld) -> None:
    make_environment(world)
    items = world.items(source=archive_of(world, ".tar.gz"), extract=True, **VENV)
    world.run(items=items)
    assert (world.copy / "bin/made").read_text() == SCRIPT.format("/nvme/tree")
    assert (world.copy / "bin/activate").read_text() == 'VIRTUAL_ENV="/nvme/tree"\n'
    for validate in (Validate.STAT, Validate.CHECKSUM):
        (item,) = world.run(
            items=(replace(items[0], options=replace(items[0].options, validate=validate)),)
        ).items
        assert (item.received, item.reasons) == ([], [])


def test_only_environments_are_relocated(world: TreeWorld) -> None:
    why = (
        "has no pyvenv.cfg at its top, so it is not a virtual environment; stage it without "
        "relocate"
    )
    assert messages(world.run(items=world.items(**VENV))) == [
        f"2 {node}: {world.source} {why}" for node in world.nodes
    ]
    assert not world.copy.exists()
    file = world.items(source=f"{world.source}/large", **VENV)
    why = f"{world.source}/large is not a folder; relocate is for Python environments"
    assert messages(world.run(items=file)) == [f"2 node0: {why}"]
