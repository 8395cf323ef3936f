"""``stagectl pin`` and ``unpin``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.stagectl import Ran

if TYPE_CHECKING:
    from tests.support.desk import Desk


def test_copies_are_pinned_and_unpinned_on_all_nodes(copies: Desk) -> None:
    path, where = "/nvme/img.sqsh", "on node[1-3] (3 nodes)"
    assert copies.simulated("pin", path) == Ran(0, f"stage: {path}: pinned {where}\n", "")
    assert " pinned " in copies.simulated("status").out
    message = f"stage: node[1-3]: {path} is pinned; unpin it first: stagectl unpin {path}\n"
    assert copies.simulated("evict", path) == Ran(3, "", message)
    assert copies.simulated("unpin", path) == Ran(0, f"stage: {path}: unpinned {where}\n", "")
    assert " pinned " not in copies.simulated("status").out


def test_a_copy_on_the_job_s_own_disks_is_named_as_it_was_staged(copies: Desk) -> None:
    message = (
        "stage: shared:/img.sqsh: this is not in the script of a job that has a filesystem of its "
        "disks; give the path, as stagectl status names it\n"
    )
    assert copies.simulated("pin", "shared:/img.sqsh") == Ran(2, "", message)
    ran = copies.stagectl(
        "pin", "--local-root", copies.nodes, "shared:/img.sqsh", STAGE_SHARED="/nvme"
    )
    assert ran == Ran(0, "stage: /nvme/img.sqsh: pinned on node[1-3] (3 nodes)\n", "")
