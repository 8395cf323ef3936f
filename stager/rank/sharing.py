"""Find the cache roots on one filesystem that all nodes see, where a copy is written once.

Each node tries to make the same file, of a name that nobody can guess: on a filesystem of its own
it can, on a shared one only the first can. The name of a filesystem's kind would tell less: a disk
of one node may be mounted on others.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

from stager.base.codec import TEXT, list_of, pair_of
from stager.base.errors import DestinationError, Failure, UsageError
from stager.base.options import Mode
from stager.fs.files import CREATE, OPEN_FOLDER, READ_FILE, opened, stage_errors
from stager.rank.agree import RefusedError, together
from stager.store.locks import Locks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stager.rank.agree import Context
    from stager.store.cache import Cache

#: The roots that have a cache, with its identity.
_IDENTITIES = list_of(pair_of(TEXT, TEXT))


def find_shared(context: Context, open_caches: Callable[[], Mapping[str, Cache]]) -> frozenset[str]:
    """Return the roots that all nodes share. Collective.

    ``open_caches`` opens this node's cache of each root. Raise RefusedError if that fails on any
    rank, if only some nodes share a root, if one is to have a part of a folder for each node, or if
    their locks there do not count on other nodes. A dry run makes nothing: it takes roots for
    shared that have the same cache on all nodes.
    """
    look = _by_identity if context.request.dry_run else _by_trial
    shared = look(context, open_caches)
    items = context.request.items
    parts = [one for one in items if one.options.mode is Mode.SHARD]
    first = context.channel.nodes[0]
    if failures := [_seen_by_all(one.destination, first) for one in parts if one.root in shared]:
        raise RefusedError(failures)
    mount = context.request.shared_mount
    is_looked_for = bool(mount) and context.comm.size > 1 and not context.request.dry_run
    if is_looked_for and mount not in shared and any(one.root == mount for one in items):
        raise RefusedError([_not_seen_by_all(mount, first)])
    return shared


def _by_identity(
    context: Context, open_caches: Callable[[], Mapping[str, Cache]]
) -> frozenset[str]:
    found = together(context, lambda: _identities(open_caches()), _IDENTITIES)
    return frozenset(root for root, _ in set.intersection(*map(set, found)) if len(found) > 1)


def _by_trial(context: Context, open_caches: Callable[[], Mapping[str, Cache]]) -> frozenset[str]:
    name = context.channel.fresh_key().hex()
    caches: dict[str, Cache] = {}
    # None is opened while another node's file has no lock yet: that would remove the file, as not
    # all filesystems have the locks of folders count on other nodes.
    together(context, lambda: caches.update(open_caches()))
    with ExitStack() as stack:

        def try_to_make() -> list[str]:
            if context.comm.size == 1:
                return []
            own = {root: one for root, one in caches.items() if one.uid == context.node.uid}
            return [root for root, one in own.items() if not _make(one, name, stack)]

        answers = together(context, try_to_make, list_of(TEXT))
        shared = frozenset(root for answer in answers for root in answer)
        for root in sorted(shared):
            makers = [rank for rank, answer in enumerate(answers) if root not in answer]
            if len(makers) > 1:
                raise RefusedError([_shared_by_some(root, context.channel.nodes[makers[1]])])
        if shared:
            rank = context.comm.rank
            made = [caches[root] for root in shared if root not in answers[rank]]
            together(context, lambda: _take_locks(made, name, stack))
            together(context, lambda: _check_locks([caches[one] for one in answers[rank]], name))
    return shared


def _shared_by_some(root: str, node: str) -> Failure:
    text = (
        f"{root} is one filesystem on some nodes of the job, and another one here; choose a "
        "destination that all nodes have on their own disks, or all share"
    )
    return Failure(DestinationError.code, text, node)


def _seen_by_all(destination: str, node: str) -> Failure:
    text = f"{destination}: all nodes see all files there, none has a part; leave out mode=shard"
    return Failure(UsageError.code, text, node)


def _not_seen_by_all(mount: str, node: str) -> Failure:
    text = (
        f"{mount}: the job's nodes do not see one filesystem there; tell the administrator to look "
        "at the driver of [shared_fs]"
    )
    return Failure(DestinationError.code, text, node)


def _make(cache: Cache, name: str, stack: ExitStack) -> bool:
    """Make and lock the file, until the ``stack`` ends. Return False if another node has made it.

    Raise SpaceError or DestinationError.
    """
    path = f"{cache.partial}/{name}"
    with stage_errors(path), opened(cache.partial, OPEN_FOLDER) as folder:
        fcntl.flock(folder, fcntl.LOCK_SH)  # so that nobody removes it before it is locked
        try:
            file = os.open(path, CREATE, 0o600)
        except FileExistsError:
            return False
        fcntl.flock(file, fcntl.LOCK_EX)
        if not os.fstat(file).st_nlink:  # another node's clean-up took it before it was locked
            os.close(file)
            return _make(cache, name, stack)
        stack.callback(_remove, path, file)
    return True


def _remove(path: str, file: int) -> None:
    with suppress(OSError):
        os.unlink(path)
    os.close(file)


def _identities(caches: Mapping[str, Cache]) -> list[tuple[str, str]]:
    """Return the identity of each root's cache, if that was ever used."""
    every = ((root, cache.identity()) for root, cache in caches.items())
    return [(root, identity) for root, identity in every if identity]


def _take_locks(caches: Sequence[Cache], name: str, stack: ExitStack) -> None:
    """Lock a destination of that ``name`` in caches, as stages do, until the ``stack`` ends."""
    for cache in caches:
        locks = stack.enter_context(closing(Locks(cache)))
        locks.take(f"{cache.root}/{name}")


def _check_locks(caches: Sequence[Cache], name: str) -> None:
    """Raise DestinationError if this node can lock what another node has locked.

    On some filesystems the locks of whole files count, but not those of parts, or neither.
    """
    for cache in caches:
        with closing(Locks(cache)) as locks:
            counts = locks.is_held(f"{cache.root}/{name}")
        path = f"{cache.partial}/{name}"
        # NFS locks only what is open for writing.
        with stage_errors(path), opened(path, READ_FILE | os.O_RDWR) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                counts = False
            except BlockingIOError:
                pass
        if not counts:
            raise DestinationError(
                f"{cache.root} is shared by all nodes, but their locks there do not count on other "
                "nodes; tell the administrator to mount it with locks (Lustre: flock)"
            )
