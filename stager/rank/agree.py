"""Take steps on all ranks together: if one rank fails, all ranks stop with its failure."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from stager.base.codec import NOTHING, REAL, Codec, optional, pair_of, row_of
from stager.base.errors import BusyError, Failure, StageError
from stager.base.telemetry import Kind, count, doing
from stager.fs.files import as_stage_error
from stager.store.locks import Locks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mpi4py import MPI

    from stager.request.items import StageRequest
    from stager.store.cache import Cache
    from stager.wire.channel import Channel

T = TypeVar("T")

_FAILURE = row_of(Failure)
#: Seconds between two attempts to take the locks: the first pause, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class RefusedError(Exception):
    """A step failed on some ranks. All ranks raise this with the same failures."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(failures)
        self.failures = failures


class NoEntryError(Exception):
    """Some items cannot be kept in the nodes' stores: by destination, and ``why`` for the user."""

    def __init__(self, why: Mapping[str, str]) -> None:
        super().__init__(why)
        self.why = why


class StaleError(Exception):
    """The survey is out of date, so all ranks survey again. All ranks raise this.

    ``why`` is the failure to report if that does not help. ``damaged`` means that a copy was
    damaged and is now recorded as such; else the source changed.
    """

    def __init__(self, why: Failure, *, damaged: bool) -> None:
        super().__init__(why)
        self.why = why
        self.damaged = damaged


@dataclass(frozen=True, slots=True)
class Node:
    """The node of this rank: its name, the folder that stands for its file system, the user's uid.

    ``disk`` is empty on a real node; a simulated node has a folder.
    """

    name: str
    disk: str
    uid: int

    def path(self, path: str) -> str:
        """Return where this process finds the node's ``path``."""
        return self.disk + path


@dataclass(frozen=True, slots=True)
class Context:
    """What a rank needs in every collective step: the ranks, its own node and the request.

    Values go from rank to rank by ``channel`` alone; ``comm`` moves the bytes of files.
    """

    comm: MPI.Intracomm
    node: Node
    request: StageRequest
    channel: Channel


@overload
def together(context: Context, step: Callable[[], None]) -> list[None]: ...
@overload
def together(context: Context, step: Callable[[], T], answer: Codec[T]) -> list[T]: ...
def together(context: Context, step: Callable[[], Any], answer: Codec[Any] = NOTHING) -> list[Any]:
    """Run ``step`` on each rank and return the results of all ranks in rank order. Collective.

    ``answer`` is how a result travels. Raise RefusedError on every rank if the step raises
    StageError or OSError on any.
    """
    result: Any = None
    failure: Failure | None = None
    try:
        with doing(Kind.STEP):
            result = step()
    except StageError as error:
        failure = Failure.of(error, context.node.name)
    except OSError as error:
        failure = Failure.of(as_stage_error(error), context.node.name)
    both = pair_of(optional(answer), optional(_FAILURE))
    answers = context.channel.allgather((None if failure else result, failure), both)
    count()
    failures = [failure for _, failure in answers if failure]
    if failures:
        raise RefusedError(failures)
    return [answer for answer, _ in answers]


class Wanted(NamedTuple):
    """A lock that a rank wants: one that others may have, too, if it is ``shared``."""

    cache: Cache
    destination: str
    shared: bool = False


class Busy(NamedTuple):
    """A destination that another process has locked on a node. ``holder`` is as in ``job 17``."""

    node: str
    destination: str
    holder: str


_BUSY = row_of(Busy)
#: Seconds waited, and the share of the pause to wait now.
_WAIT = pair_of(REAL, REAL)


@dataclass(frozen=True, slots=True)
class Held:
    """The locks that this rank holds, and whether it had to wait for another job."""

    locks: dict[Cache, Locks]
    waited: bool


@contextmanager
def locked(
    context: Context,
    wanted: Sequence[Wanted],
    on_wait: Callable[[Busy, float], None],
    names: Mapping[str, str],
) -> Iterator[Held]:
    """Hold the locks of the ``wanted`` destinations on all nodes. Collective.

    A rank that waits holds no lock, so jobs that stage the same destinations on overlapping nodes
    cannot deadlock. ``on_wait`` is called before each pause with one locked destination, by what
    users call it if ``names`` has that, and the seconds waited so far. Raise RefusedError when they
    exceed the request's ``lock_timeout``.
    """
    with ExitStack() as stack:
        locks: dict[Cache, Locks] = {}
        together(context, lambda: _open_locks(wanted, locks, stack))
        begun = time.monotonic()
        pause = _FIRST_PAUSE
        while busy := _try_on_all_nodes(context, wanted, locks):
            _release(wanted, locks)
            busy = busy._replace(destination=names.get(busy.destination, busy.destination))
            # Rank 0 decides for all, so that all wait equally long and give up together. Random
            # pauses keep two jobs from trying again and again at the same moment.
            pause_share = 0.5 + os.urandom(1)[0] / 510
            waited, pause_share = context.channel.bcast(
                (time.monotonic() - begun, pause_share), _WAIT
            )
            if waited > context.request.lock_timeout:
                raise RefusedError([_timed_out(busy, waited)])
            on_wait(busy, waited)
            time.sleep(pause * pause_share)
            pause = min(2 * pause, _LONGEST_PAUSE)
        yield Held(locks, pause != _FIRST_PAUSE)


def _timed_out(busy: Busy, waited: float) -> Failure:
    from stager.base.text import seconds_text  # not needed where no job waits

    text = (
        f"{busy.destination} is being staged by {busy.holder}; gave up after waiting "
        f"{seconds_text(waited)}; submit again when that job has staged it"
    )
    return Failure(BusyError.code, text, busy.node)


def _open_locks(
    wanted: Sequence[Wanted],
    locks: dict[Cache, Locks],
    stack: ExitStack,
) -> None:
    for cache, _, _ in wanted:
        if cache not in locks:
            locks[cache] = Locks(cache)
            stack.callback(locks[cache].close)


def _try_on_all_nodes(
    context: Context, wanted: Sequence[Wanted], locks: dict[Cache, Locks]
) -> Busy | None:
    """Try to take all locks on all nodes. Return the first that another process has. Collective."""
    answers = together(context, lambda: _try_locks(context.node, wanted, locks), optional(_BUSY))
    return next((answer for answer in answers if answer), None)


def _try_locks(node: Node, wanted: Sequence[Wanted], locks: dict[Cache, Locks]) -> Busy | None:
    """Take this node's locks, up to the first that another process has; return that one."""
    for cache, destination, shared in wanted:
        if not locks[cache].take(destination, shared=shared):
            return Busy(node.name, destination, locks[cache].holder(destination))
    return None


def _release(wanted: Sequence[Wanted], locks: dict[Cache, Locks]) -> None:
    for cache, destination, _ in wanted:
        locks[cache].release(destination)
