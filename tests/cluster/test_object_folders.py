"""What lies beneath a folder of a store is read once and broadcast, or spread, by users' jobs."""

from __future__ import annotations

import io
import os
import tarfile
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.cluster.site import POLICY
from tests.cluster.swift import PAGE, Swift, swift

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

SMALL = {f"part-{number:02}.bin": os.urandom(5000 + number) for number in range(40)}
ODD = "an odd + name, %20 é & 'so' on?#.bin"
LARGE = "deep/er/large.bin"
SET = SMALL | {
    LARGE: os.urandom(20_000_000), ODD: b"data", "notes.log": b"no data", "empty": b"",
}  # fmt: skip
#: What is asked for to read all but the log: the large one by three requests.
REQUESTS = Counter(f"set/{name}" for name in [*SMALL, ODD, *[LARGE] * 3])


def source_policy(readers: int) -> str:
    source = f'[source]\nallow = ["s3://bucket/"]\nendpoints = ["{Swift.endpoint}"]\n'
    return f"{POLICY}{source}[transfer]\nreaders = {readers}\n"


@contextmanager
def bucket(site: Site, readers: int) -> Iterator[Swift]:
    with swift(site) as store, site.policy(source_policy(readers)):
        yield store


def asked(store: Swift) -> Counter[str]:
    """Return how often data of each object was asked for."""
    return Counter(read.path for read in store.reads())


def staged(site: Site, store: Swift, *directives: str, script: str = "true") -> Job:
    options = [f"--stage={directive}" for directive in directives]
    job = site.sbatch(script, "-N4", *options, env=store.environment)
    assert job.wait().exit_code == "0:0", job.output()
    return job


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_each_object_beneath_a_folder_is_read_once(site: Site) -> None:
    wanted = {name: data for name, data in SET.items() if name != "notes.log"}
    directive = "s3://bucket/set/:/nvme/set,exclude=*.log"
    with bucket(site, readers=1) as store:
        store.fill({f"set/{name}": data for name, data in SET.items()})
        staged(site, store, directive)
        assert [files(site.copy(node, "/nvme/set")) for node in site.nodes] == [wanted] * 4
        assert asked(store) == REQUESTS
        again = staged(site, store, directive)
        assert "stage: /nvme/set: current on n[1-4] (4 nodes), nothing moved" in again.output()
        # Each time, its folder is listed once more, to know what the empty object is.
        assert (asked(store), store.listed()) == (REQUESTS, 2 * 2 * -(-len(SET) // PAGE))
        store.fill({"set/part-07.bin": b"another version"})
        last = staged(site, store, directive)
        assert "stage: /nvme/set: 1 file, 15 B (42 files kept) from" in last.output()
        assert asked(store) - REQUESTS == Counter(["set/part-07.bin"])
        before = asked(store)
        site.empty_disks()
        with site.policy(source_policy(readers=4)):
            staged(site, store, directive)
        wanted["part-07.bin"] = b"another version"
        assert [files(site.copy(node, "/nvme/set")) for node in site.nodes] == [wanted] * 4
        # Several readers ask for less at once.
        more = Counter([f"set/{LARGE}"] * 2)
        assert asked(store) - before == REQUESTS + more


def test_objects_are_spread_and_an_archive_is_unpacked(site: Site) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, data in SMALL.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    directives = (
        "s3://bucket/set/:/nvme/shards,mode=shard,include=part-*",
        "s3://bucket/set.tar.gz:/nvme/unpacked,extract",
    )
    requests = Counter([*(f"set/{name}" for name in SMALL), "set.tar.gz"])
    with bucket(site, readers=4) as store:
        small = {f"set/{name}": data for name, data in SMALL.items()}
        store.fill(small | {"set.tar.gz": archive.getvalue()})
        first = staged(site, store, *directives, script="cut -f1,3 $STAGE_SHARDS")
        for node in site.nodes:
            assert files(site.copy(node, "/nvme/unpacked")) == SMALL
        assert asked(store) == requests
        listed = [line.split("\t") for line in first.output().splitlines() if "\t" in line]
        assert sorted(name for _, name in listed) == sorted(SMALL)
        for node, name in listed:
            assert site.copy(node, f"/nvme/shards/{name}").read_bytes() == SMALL[name]
        again = staged(site, store, *directives)
        assert again.output().count(": current on n[1-4] (4 nodes), nothing moved") == 2
        assert asked(store) == requests
