"""Make the folders of records that root's part makes, as an ordinary user, where that is possible.

`stagectl prepare` calls this on each node, where neither the plugin nor a prolog of the site runs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from stager.base.errors import DestinationError, StageError
from stager.base.paths import RECORDS_FOLDER
from stager.fs.files import as_stage_error
from stager.store.cache import look_for_cache, open_cache
from stager.store.leases import jobs_are_known

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROOTS_PART = "stager.node.prolog"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What became of one root: ``made`` lists new folders; ``problem`` and its ``code`` if it is
    not ready. If it is ``taken``, no other user can stage beneath the root from now on.
    """

    root: str
    made: tuple[str, ...] = ()
    taken: bool = False
    problem: str = ""
    code: Annotated[int, range(10).__contains__] = 0


@dataclass(frozen=True, slots=True)
class NodePrepared:
    """What became of all roots of a node, and whether root's part ``marks`` its jobs."""

    roots: tuple[Prepared, ...]
    marks: bool


def prepare_node(roots: Iterable[str], config: str) -> NodePrepared:
    """Make what is missing beneath ``roots`` for this user. ``config`` is the path of stage.toml.

    Nothing is raised.
    """
    return NodePrepared(tuple(_prepare(root, config) for root in roots), jobs_are_known())


def _prepare(root: str, config: str) -> Prepared:
    made: list[str] = []
    try:
        taken = _make(root, config, made)
        open_cache(root, os.getuid())
    except StageError as error:
        return Prepared(root, tuple(made), problem=error.message, code=error.code)
    except OSError as error:
        failure = as_stage_error(error)
        return Prepared(root, tuple(made), problem=failure.message, code=failure.code)
    return Prepared(root, tuple(made), taken)


def _make(root: str, config: str, made: list[str]) -> bool:
    """Make what is missing, and note it in ``made``. Return whether others are kept out by it.

    Raise StageError or OSError if it cannot be made.
    """
    uid = os.getuid()
    parent, folder = f"{root}/{RECORDS_FOLDER}", f"{root}/{RECORDS_FOLDER}/{uid}"
    if not os.path.lexists(root):
        os.mkdir(root, 0o755)
        made.append(root)
    if os.stat(root).st_uid == uid:
        return root in made  # a stage makes the others, and so does `open_cache`
    if not os.path.lexists(parent):
        if jobs_are_known():
            raise DestinationError(
                f"{parent} is missing: root's part, which runs on this node, makes it at the start "
                "of a job"
            )
        os.mkdir(parent, 0o755)
        made.append(parent)
    facts = os.lstat(parent)
    if facts.st_uid == 0 and not os.path.lexists(folder):
        raise DestinationError(
            f"{folder} is missing, and only root can make it: {sys.executable} -I -m {_ROOTS_PART} "
            f"--config {config} {uid}"
        )
    if facts.st_uid == uid and not os.path.lexists(folder):
        os.mkdir(folder, 0o700)
        made.append(folder)
    look_for_cache(root, uid)
    return facts.st_uid == uid
