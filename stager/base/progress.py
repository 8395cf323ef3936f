"""Count what this process gets done, and note what each of its threads is doing now.

A process that stands still is known by this: its count does not change. Whoever moves bytes or goes
through many entries calls `count`; whoever may wait for a disk, for storage or for other processes
does so within `doing`.
"""

from __future__ import annotations

from _thread import get_ident  # threading is slow to import
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a thread may wait for. What this process does itself comes before what others do."""

    READ = 0
    WRITE = 1
    #: Any other step on this node's own disk.
    STEP = 2
    RECEIVE = 3
    SEND = 4
    #: A step that other processes have not finished.
    WAIT = 5


class Activity(NamedTuple):
    """What a thread is doing; ``what`` is a path, or empty."""

    kind: Kind
    what: str = ""


_counted = 0
_subject = ""
_of_threads: dict[int, Activity] = {}


def count() -> None:
    """Note that something was done."""
    global _counted  # noqa: PLW0603 - one count for the whole process is what this module is for
    _counted += 1


def counted() -> int:
    """Return how often something was done. (Threads may lose a count, never the change.)"""
    return _counted


def about(path: str) -> None:
    """Note the path that is worked for from now on: that of activities that name none."""
    global _subject  # noqa: PLW0603
    _subject = path


def current() -> Activity:
    """Return the activity of the thread that all others in this process wait for."""
    kind, what = min(list(_of_threads.values()), default=Activity(Kind.WAIT))
    return Activity(kind, what or _subject)


class doing:  # noqa: N801 - used like a function
    """A context in which this thread does something; what it did before goes on afterwards."""

    __slots__ = ("_activity", "_before", "_thread")

    def __init__(self, kind: Kind, what: str = "") -> None:
        self._activity = Activity(kind, what)

    def __enter__(self) -> None:
        self._thread = get_ident()
        self._before = _of_threads.get(self._thread)
        _of_threads[self._thread] = self._activity

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            _of_threads.pop(self._thread, None)
        else:
            _of_threads[self._thread] = self._before


def wait_for(kind: Kind) -> None:
    """Note within `doing` that this thread waits for something else now."""
    _of_threads[get_ident()] = Activity(kind)
