"""A record that the tests of many modules share."""

from __future__ import annotations

from stager.fs.files import CopyFacts
from stager.source.description import SourceFacts
from stager.store.record import VERSION, Record

RECORD = Record(
    version=VERSION,
    source="/shared/img.sqsh",
    destination="/nvme/img.sqsh",
    source_facts=SourceFacts(size=10, mtime_ns=20, ctime_ns=30, inode=40),
    copy_facts=CopyFacts(size=10, mtime_ns=20, inode=50, owner=60),
    digest="00112233445566778899aabbccddeeff",
    staged_at=70,
    used_at=80,
    used_by_job=90,
    lifetime="cache",
    pinned=False,
)
