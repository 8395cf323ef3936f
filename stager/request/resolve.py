"""Which items, and which request, do directives mean by the site's policy? Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from stager.base.errors import PolicyRefusal, UsageError
from stager.base.options import FolderLayout, Share, Via
from stager.base.paths import RECORDS_FOLDER
from stager.request.grammar import SHARED
from stager.request.items import Space, StageItem, StageRequest, Waiting, Work, copy_name
from stager.source.schemes import Scheme, without_revision
from stager.wire.layout import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stager.request.grammar import Directive
    from stager.request.policy import Policy, Transfer

_IMAGES = "images"


def build_request(
    items: tuple[StageItem, ...],
    policy: Policy,
    work: Work = Work.STAGE,
    *,
    bench: int = 0,
    waiting: Waiting | None = None,
) -> StageRequest:
    """Return the request to stage ``items`` by the site's policy, for one node as yet."""
    limits = policy.cache
    mount = policy.shared_mount
    # A trial of the nodes without a source makes its bytes itself.
    staged = items if bench else tuple(item for item in items if item.source)
    shared = (mount,) if mount and any(item.root == mount for item in items) else ()
    space = Space(
        keep_free=limits.keep_free, user_limit=limits.user_limit,
        roots=(*policy.roots, *shared), private=(*policy.private_roots, *shared),
        of_job=policy.job_roots,
        hints=policy.hints | dict.fromkeys(shared, "--nodes"),
        store=policy.store, store_size=limits.size,
        unpacked_size=limits.unpacked_size, unpacked_members=limits.unpacked_members,
    )  # fmt: skip
    return StageRequest(
        items=staged, nodes=1,
        shared_mount="".join(shared),
        scratch=tuple(item.destination for item in items if item not in staged),
        work=work, bench=bench, waiting=waiting,
        lock_timeout=policy.lock_timeout, stall_timeout=policy.transfer.stall_timeout,
        shared_owner=policy.shared_owner, transfer=_settings(policy.transfer), space=space,
        remote=policy.source.settings, interface=policy.launch.named_interface,
    )  # fmt: skip


def _settings(transfer: Transfer) -> Settings:
    return Settings(
        chunk=transfer.chunk, depth=transfer.depth,
        readers=(transfer.readers,) if transfer.readers else (), writers=transfer.writers,
        algorithm=transfer.algorithm, direct=transfer.direct,
    )  # fmt: skip


def resolve(directives: Iterable[Directive], policy: Policy) -> tuple[StageItem, ...]:
    """Return the items that ``directives`` ask for, in their order and each once.

    One without a source is an empty folder in the job's own filesystem.
    Raise PolicyRefusal for a destination outside of the site's folders; raise UsageError for a
    destination without a name, or with one that a relocated environment cannot have, for source and
    destination that contain each other, and for two directives with one destination, or with one
    destination in the other.
    """
    items = tuple(dict.fromkeys(_item(directive, policy) for directive in directives))
    for _, problem in conflicts(items):
        raise UsageError(problem)
    return items


def _item(directive: Directive, policy: Policy) -> StageItem:
    if directive.destination.startswith(SHARED):
        return _shared_item(directive, policy)
    destination = place_of(directive)
    source, plain = _source_of(directive, policy), _plain(directive.source)
    if destination in (*policy.roots, *policy.shared_roots, *policy.allowed):
        raise UsageError(
            f"{destination} is a folder of the site's; write {destination}/ to stage into it"
        )
    root = _folder_above(destination, (*policy.roots, *policy.shared_roots))
    shared = root in policy.shared_roots
    is_image = root is not None and _is_image(source, destination.removeprefix(root))
    if root is not None:
        _check_paths(plain, destination, is_image=is_image)
    if root is None or not (
        shared or is_image or _folder_above(destination, policy.allowed) is not None
    ):
        raise PolicyRefusal(
            f"{destination} is not beneath a folder that this site stages to; "
            f"choose a destination beneath {' or '.join(_where(policy))}"
        )
    _check_share(destination, directive.options.share, policy)
    _check_layout(destination, directive)
    _check_via(destination, root, directive.options.via, policy)
    return StageItem(source, destination, root, directive.options, shared)


def _shared_item(directive: Directive, policy: Policy) -> StageItem:
    """Return the item whose destination is in the job's own filesystem. Raise StageError."""
    mount = policy.shared_mount
    if not policy.shared_fs.mount and not mount:
        raise UsageError(
            f"{directive.destination}: this site has no filesystem of a job's own disks; choose "
            "another destination, or ask the administrator ([shared_fs] of stage.toml)"
        )
    if not mount:
        raise UsageError(
            f"{directive.destination} is in the filesystem of a job's own disks; use it in a job"
        )
    inside = directive.destination.removeprefix(SHARED)
    whole = replace(directive, destination=f"{mount}{inside}")
    if not directive.source:
        destination = plain_path(whole.destination)
        _check_reserved(destination)
        return StageItem("", destination, mount)
    destination = place_of(whole)
    if destination == mount:
        raise UsageError(
            f"{SHARED}{inside} is the whole filesystem; write {SHARED}/ to stage into it"
        )
    source, options = _source_of(directive, policy), directive.options
    _check_paths(_plain(source), destination, is_image=False)
    _check_share(destination, options.share, policy)
    _check_layout(destination, whole)
    _check_via(destination, mount, options.via, policy)
    return StageItem(source, destination, mount, options)


def _source_of(directive: Directive, policy: Policy) -> str:
    """Return the plain source. Raise PolicyRefusal if the site does not allow it."""
    source = directive.source
    if Scheme.of(source).is_url:
        _check_url(source, policy)
        return source
    return _plain(source) or "/"


def _where(policy: Policy) -> tuple[str, ...]:
    return (*policy.allowed, *(f"{root} (in a job)" for root in policy.absent_roots))


def _check_url(url: str, policy: Policy) -> None:
    """Raise PolicyRefusal if the site does not allow that ``url`` is staged."""
    allowed = policy.source.allow
    name = f"{without_revision(url)}/"
    if any(name.startswith(one if one.endswith("/") else f"{one}/") for one in allowed):
        return
    where = f"only from {' or '.join(allowed)}" if allowed else "from no URL"
    raise PolicyRefusal(
        f"{url}: this site stages {where}; copy it to the shared storage first, or ask the "
        "administrator (allow in [source] of stage.toml)"
    )


def _check_share(destination: str, share: Share, policy: Policy) -> None:
    """Raise PolicyRefusal if the site does not allow that a copy is opened so far."""
    allowed = {"none": (), "group": (Share.GROUP,), "all": (Share.GROUP, Share.ALL)}
    if share not in (Share.NONE, *allowed[policy.allow_share]):
        remedy = "use share=group or remove it" if policy.allow_share == "group" else "remove it"
        raise PolicyRefusal(f"{destination}: this site does not allow share={share}; {remedy}")


def _check_via(destination: str, root: str, via: Via, policy: Policy) -> None:
    """Raise PolicyRefusal unless the destination gets its copy from the node's store."""
    has_store = policy.store and root in policy.job_roots
    if via is not Via.AUTO and not has_store and root:  # without stage.toml, no root is known
        raise PolicyRefusal(
            f"{destination}: via={via} is for the folder of a job, at a site with a store; "
            "remove it"
        )


def _check_layout(destination: str, directive: Directive) -> None:
    """Raise UsageError if the hub's programs would not find the folder of their cache."""
    if directive.options.layout is not FolderLayout.HUB:
        return
    above, _, name = destination.rpartition("/")
    expected = copy_name(directive.source, directive.options)
    if name != expected:
        raise UsageError(
            f"{destination}: with layout=hub the last part of the destination must be {expected}, "
            f"for which programs look in HF_HUB_CACHE; write {above}/ with a '/' at its end"
        )


def place_of(directive: Directive) -> str:
    """Return the plain path of the copy: the destination, or in it if a ``/`` ends it.

    Raise UsageError if the source has no name.
    """
    destination = plain_path(directive.destination)
    if not directive.destination.endswith("/"):
        return destination
    name = copy_name(directive.source, directive.options)
    if name in ("", ".", ".."):
        raise UsageError(
            f"no file name can be taken from the source {directive.source}; write the destination "
            f"with a file name, such as {destination.rstrip('/')}/NAME"
        )
    return f"{destination.rstrip('/')}/{name}"


def plain_path(path: str) -> str:
    """Return a path without what does not change where it leads.

    >>> plain_path("/nvme//set/./a/")
    '/nvme/set/a'
    """
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def _plain(source: str) -> str:
    """Return a path without what does not change where it leads, the root as an empty text; a URL
    without a '/' at its end.
    """
    if Scheme.of(source).is_url:
        return source.rstrip("/")
    return plain_path(source).rstrip("/")


def images_folder(uid: int, policy: Policy) -> str:
    """Return the folder for the images that the user names by no destination.

    It is among the user's records, as anybody could take a name where users may write.
    """
    root = _folder_above(f"{policy.allowed[0]}/", policy.roots) or ""
    return f"{root}/{RECORDS_FOLDER}/{uid}/{_IMAGES}"


def _is_image(source: str, path: str) -> bool:
    """Return whether a path beneath a root is that of a registry's image in `images_folder`."""
    name = rf"/{re.escape(RECORDS_FOLDER)}/[0-9]+/{_IMAGES}/[^/]+"
    return Scheme.of(source) is Scheme.DOCKER and re.fullmatch(name, path) is not None


def _check_paths(source: str, destination: str, *, is_image: bool) -> None:
    if destination == source:
        raise UsageError(
            f"source and destination are both {destination}; choose another destination"
        )
    for inner, outer in ((destination, source), (source, destination)):
        if inner.startswith(f"{outer}/"):
            raise UsageError(
                f"{inner} is in {outer or '/'}: source and destination must not contain each "
                "other; choose another destination"
            )
    if not is_image:
        _check_reserved(destination)


def _check_reserved(destination: str) -> None:
    if RECORDS_FOLDER in destination.split("/"):
        raise UsageError(
            f"{destination}: the name {RECORDS_FOLDER} is reserved for slurm-stage's own records; "
            "choose another destination"
        )


def _folder_above(path: str, folders: Iterable[str]) -> str | None:
    """Return the nearest of the ``folders`` that contain ``path``, None if none does."""
    above = [folder for folder in folders if path.startswith(f"{folder}/")]
    return max(above, key=len, default=None)


def conflicts(items: Sequence[StageItem]) -> Iterator[tuple[StageItem, str]]:
    """Yield each item with the destination or the name of an earlier one, or with a destination in
    that of another one, and why that is refused.
    """
    by_destination: dict[str, StageItem] = {}
    by_name: dict[str, StageItem] = {}
    for item in items:
        name = item.options.name
        other = by_name.setdefault(name, item) if name else item
        if other.destination != item.destination:
            both = f"{other.destination} and {item.destination}"
            yield item, f"as={name} is given to both {both}; choose two names"
    for item in items:
        other = by_destination.setdefault(item.destination, item)
        if other is not item:
            both = f"from {other.source} ({other.options}) and from {item.source} ({item.options})"
            why = f"{item.destination} is the destination of two directives: {both}"
            yield item, f"{why}; remove one of them, or change its destination"
    for item in items:
        for above in _parents(item.destination):
            if above in by_destination:
                yield (
                    item,
                    (
                        f"{item.destination} is in {above}, which another directive stages as a "
                        "whole; choose a destination outside of it"
                    ),
                )


def _parents(path: str) -> Iterator[str]:
    """Yield the folders above an absolute path, the nearest first, without ``/``."""
    while path := path.rpartition("/")[0]:
        yield path
