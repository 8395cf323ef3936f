"""An entry of a node's status, for tests of statuses and of their tables."""

from __future__ import annotations

from stager.store.states import Entry

ENTRY = Entry(
    destination="/nvme/img.sqsh",
    source="/shared/img.sqsh",
    size=3 << 20,
    digest="00112233445566778899aabbccddeeff",
    staged_at=1_000_000,
    used_at=1_000_100,
    used_by_job=17,
    lifetime="cache",
    pinned=False,
    jobs=[],
    state="ready",
    user=1000,
    shared=False,
)
