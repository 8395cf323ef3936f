"""Build the request to stage items by the site's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.request.items import Space, StageItem, StageRequest
from stager.wire.layout import Settings

if TYPE_CHECKING:
    from stager.request.policy import Policy, Transfer


def build_request(items: tuple[StageItem, ...], rules: Policy) -> StageRequest:
    """Return the request to stage ``items`` by the site's rules, for one node as yet."""
    return StageRequest(
        items=items, nodes=1, lock_timeout=rules.lock_timeout,
        stall_timeout=rules.transfer.stall_timeout, shared_owner=rules.shared_owner,
        transfer=_settings(rules.transfer), space=space_limits(rules), remote=rules.source.settings,
        interface=rules.launch.named_interface,
    )  # fmt: skip


def space_limits(rules: Policy) -> Space:
    """Return the site's limits on what staged files may take of a disk."""
    limits = rules.cache
    return Space(
        keep_free=limits.keep_free,
        user_limit=limits.user_limit,
        roots=rules.roots,
        private=rules.private_roots,
        of_job=rules.job_roots,
        hints=rules.hints,
        unpacked_size=limits.unpacked_size,
        unpacked_members=limits.unpacked_members,
    )


def _settings(transfer: Transfer) -> Settings:
    return Settings(
        chunk=transfer.chunk,
        depth=transfer.depth,
        readers=(transfer.readers,) if transfer.readers else (),
        writers=transfer.writers,
        algorithm=transfer.algorithm,
        direct=transfer.direct,
    )
