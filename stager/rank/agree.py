"""Steps that all ranks take together or not at all: what one cannot do, none of them does."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from stager.base.errors import BusyError, Failure, StageError
from stager.base.text import seconds_text
from stager.disk.files import as_stage_error
from stager.disk.locks import Locks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from stager.disk.cache import Cache

T = TypeVar("T")

#: Seconds between two tries for a lock: the first pause, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
#: Seconds of sleep while other ranks are at work: the first, and the longest.
_FIRST_NAP, _LONGEST_NAP = 50e-6, 2e-3


class RefusedError(Exception):
    """What some rank cannot do, known to all of them."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(failures)
        self.failures = failures


@dataclass(frozen=True, slots=True)
class Here:
    """This rank's node: its name, the folder that stands for its whole disk, the user."""

    name: str
    disk: str
    uid: int

    def path(self, path: str) -> str:
        """Where the node's ``path`` is found from this process."""
        return self.disk + path


def together(
    comm: MPI.Intracomm, here: Here, step: Callable[[], T], *, patient: bool = False
) -> list[T]:
    """Run ``step`` on each rank; return all results in rank order. Collective.

    Where it failed on any rank, the same RefusedError is raised on every rank. ``patient`` is for a
    step that takes some ranks longer than others: who is done sleeps instead of spinning.
    """
    result: T | None = None
    failure: Failure | None = None
    try:
        result = step()
    except StageError as error:
        failure = Failure.of(error, here.name)
    except OSError as error:
        failure = Failure.of(as_stage_error(error), here.name)
    if patient:
        _sleep_until_all_are_here(comm)
    answers: list[tuple[T, Failure | None]] = comm.allgather((result, failure))
    failures = [failure for _, failure in answers if failure]
    if failures:
        raise RefusedError(failures)
    return [answer for answer, _ in answers]


def _sleep_until_all_are_here(comm: MPI.Intracomm) -> None:
    barrier = comm.Ibarrier()
    pause = _FIRST_NAP
    while not barrier.Test():
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_NAP)


class Busy(NamedTuple):
    """A destination that another process has locked on a node; ``holder`` is in words."""

    node: str
    destination: str
    holder: str


@dataclass(frozen=True, slots=True)
class Held:
    """The locks of this node's caches, and whether another job had to be waited for."""

    locks: dict[Cache, Locks]
    waited: bool


@contextmanager
def locked(
    comm: MPI.Intracomm,
    here: Here,
    wanted: Sequence[tuple[Cache, str]],
    timeout: float,
    waiting: Callable[[Busy, float], None],
) -> Iterator[Held]:
    """Hold the locks of the ``wanted`` destinations on all nodes: all, or none while waiting.

    Jobs that want the same destinations on overlapping nodes can so never wait in a circle.
    ``waiting`` is told where whom is waited for, and for how many seconds already. Raises
    RefusedError after ``timeout`` seconds. Collective.
    """
    with ExitStack() as stack:
        locks: dict[Cache, Locks] = {}
        together(comm, here, lambda: _open_locks(wanted, locks, stack))
        begun = time.monotonic()
        pause = _FIRST_PAUSE
        while True:
            answers = together(comm, here, lambda: _try_locks(here, wanted, locks))
            busy = next((answer for answer in answers if answer), None)
            if busy is None:
                break
            _release(wanted, locks)
            # Rank 0's clock and dice decide for all.
            waited, dice = comm.bcast((time.monotonic() - begun, random.uniform(0.5, 1)))  # noqa: S311
            if waited > timeout:
                held = f"{busy.destination} is held by {busy.holder} and has not let go"
                text = f"{held} for {seconds_text(waited)}; submit again"
                raise RefusedError([Failure(BusyError.code, text, busy.node)])
            waiting(busy, waited)
            time.sleep(pause * dice)
            pause = min(2 * pause, _LONGEST_PAUSE)
        yield Held(locks, pause != _FIRST_PAUSE)


def _open_locks(
    wanted: Sequence[tuple[Cache, str]],
    locks: dict[Cache, Locks],
    stack: ExitStack,
) -> None:
    for cache, _ in wanted:
        if cache not in locks:
            locks[cache] = Locks(cache)
            stack.callback(locks[cache].close)


def _try_locks(
    here: Here, wanted: Sequence[tuple[Cache, str]], locks: dict[Cache, Locks]
) -> Busy | None:
    """Take this node's locks, or say where and who has the first that is not to be had."""
    for cache, destination in wanted:
        if not locks[cache].take(destination):
            return Busy(here.name, destination, locks[cache].holder(destination))
    return None


def _release(wanted: Sequence[tuple[Cache, str]], locks: dict[Cache, Locks]) -> None:
    for cache, destination in wanted:
        locks[cache].release(destination)
