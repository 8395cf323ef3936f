"""What lies beneath a folder of a store is read once and broadcast, or spread, by users' jobs."""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.cluster.servers import s3
from tests.cluster.site import POLICY, PYTHON

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

SMALL = {f"part-{number:02}.bin": os.urandom(5000 + number) for number in range(40)}
SET = SMALL | {"deep/er/large.bin": os.urandom(20_000_000), "notes.log": b"no data", "empty": b""}
#: What is asked for to read all but the log: the large one by three requests.
REQUESTS = Counter([*(f"set/{name}" for name in SMALL), *["set/deep/er/large.bin"] * 3])
#: Writes all files of a folder as objects.
_FILL = """
import os, sys, urllib.request, obstore
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
bucket = os.environ["AWS_ENDPOINT_URL"] + "/bucket"
urllib.request.urlopen(urllib.request.Request(bucket, method="PUT"), timeout=30)
store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
folder = Path("/shared/objects")
paths = [path for path in folder.rglob("*") if path.is_file()]
def put(path):
    obstore.put(store, str(path.relative_to(folder)), path.read_bytes())
with ThreadPoolExecutor(4) as pool:
    list(pool.map(put, paths))
"""


class Bucket:
    """A bucket on a server of S3 on the login machine."""

    def __init__(self, site: Site, endpoint: str) -> None:
        self._site = site
        self.endpoint = endpoint
        self.environment = {
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1",
        }  # fmt: skip

    def fill(self, objects: Mapping[str, bytes]) -> None:
        """Write objects."""
        folder = self._site.shared("objects")
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in objects.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._site.run([PYTHON, "-c", _FILL], env=self.environment)

    def asked(self) -> list[str]:
        """Return the objects whose data was asked for, once for each request."""
        log = self._site.shared("s3.log").read_text()
        return re.findall(r"GET /bucket/(\S+) HTTP", log)

    def listed(self) -> int:
        """Return how often objects were listed."""
        return self._site.shared("s3.log").read_text().count("GET /bucket?")


def source_policy(endpoint: str, readers: int) -> str:
    source = f'[source]\nallow = ["s3://bucket/"]\nendpoints = ["{endpoint}"]\n'
    return f"{POLICY}{source}[transfer]\nreaders = {readers}\n"


@contextmanager
def bucket(site: Site, readers: int) -> Iterator[Bucket]:
    with s3(site) as endpoint, site.policy(source_policy(endpoint, readers)):
        yield Bucket(site, endpoint)


def staged(site: Site, store: Bucket, *directives: str, script: str = "true") -> Job:
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
        assert Counter(store.asked()) == REQUESTS
        again = staged(site, store, directive)
        assert "stage: /nvme/set: current on n[1-4] (4 nodes), nothing moved" in again.output()
        assert (Counter(store.asked()), store.listed()) == (REQUESTS, 2)
        store.fill({"set/part-07.bin": b"another version"})
        last = staged(site, store, directive)
        assert "stage: /nvme/set: 1 file, 15 B, 41 files kept from" in last.output()
        assert Counter(store.asked()) - REQUESTS == Counter(["set/part-07.bin"])
        before = Counter(store.asked())
        site.empty_disks()
        with site.policy(source_policy(store.endpoint, readers=4)):
            staged(site, store, directive)
        wanted["part-07.bin"] = b"another version"
        assert [files(site.copy(node, "/nvme/set")) for node in site.nodes] == [wanted] * 4
        # Several readers ask for less at once.
        more = Counter(["set/deep/er/large.bin"] * 2)
        assert Counter(store.asked()) - before == REQUESTS + more


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
        assert Counter(store.asked()) == requests
        listed = [line.split("\t") for line in first.output().splitlines() if "\t" in line]
        assert sorted(name for _, name in listed) == sorted(SMALL)
        for node, name in listed:
            assert site.copy(node, f"/nvme/shards/{name}").read_bytes() == SMALL[name]
        again = staged(site, store, *directives)
        assert again.output().count(": current on n[1-4] (4 nodes), nothing moved") == 2
        assert Counter(store.asked()) == requests
