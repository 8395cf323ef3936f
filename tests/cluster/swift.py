"""A real server of S3 on the login machine of the test cluster: OpenStack Swift with its s3api."""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from tests.cluster.servers import HOST, running
from tests.cluster.site import PYTHON, REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.cluster.site import Site

ENDPOINT_PORT = 8080
#: Those of the servers behind the proxy, on this machine alone.
_PORTS = {"account": 6202, "container": 6201, "object": 6200}
#: Keys in a page of a listing: by default 1000.
PAGE = 20
#: The secret key of the only user.
SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"
_FOLDER = "/shared/swift"
_PROGRAM = REPOSITORY / "tests/support/swift_servers.py"
_COMMON = f"""
[DEFAULT]
workers = 0
user = root
log_level = WARNING
swift_dir = {_FOLDER}
"""
#: With chunks of 64 KiB, as they are by default, it is half as fast.
_SERVER = """
bind_ip = 127.0.0.1
bind_port = {port}
devices = {folder}
mount_check = false
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
network_chunk_size = 1048576
disk_chunk_size = 1048576
"""
#: Signed requests need no cache, but tempauth demands that one is named. None listens there; the
#: log would have several lines about that for each request.
_PROXY = f"""
bind_ip = 0.0.0.0
bind_port = {ENDPOINT_PORT}
[pipeline:main]
pipeline = catch_errors proxy-logging cache s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
object_chunk_size = 1048576
client_chunk_size = 1048576
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:proxy-logging]
use = egg:swift#proxy_logging
access_log_level = INFO
access_log_headers = true
access_log_headers_only = Range
log_msg_template = {{method}} {{path}} {{status_int}} {{bytes_sent}} {{headers}}
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:11211
set log_level = CRITICAL
[filter:s3api]
use = egg:swift#s3api
max_bucket_listing = {PAGE}
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {SECRET} .admin
[filter:slo]
use = egg:swift#slo
"""
#: Swift demands a word that goes into the names of its files.
_HASH = "[swift-hash]\nswift_hash_path_suffix = any\n"
#: Makes the bucket.
_MAKE_BUCKET = """
import datetime, obstore, urllib.request
store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
url = obstore.sign(store, "PUT", "", datetime.timedelta(minutes=1))
urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=30)
"""
#: Writes all files of a folder as objects, those of more than 5 MiB in several parts.
_FILL = """
import obstore
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
store = obstore.store.S3Store("bucket", client_options={"allow_http": True})
folder = Path("/shared/objects")
paths = [path for path in folder.rglob("*") if path.is_file()]
def put(path):
    with path.open("rb") as file:
        obstore.put(store, str(path.relative_to(folder)), file)
with ThreadPoolExecutor(4) as pool:
    list(pool.map(put, paths))
"""


class Read(NamedTuple):
    """What was sent of an object by one request."""

    path: str
    #: The offset of the first byte, and how many were sent.
    start: int
    size: int


class Swift:
    """A bucket on the server."""

    endpoint = f"http://{HOST}:{ENDPOINT_PORT}"
    #: What a user's environment holds.
    environment: Mapping[str, str] = {
        "AWS_ACCESS_KEY_ID": "test:tester", "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1",
    }  # fmt: skip

    def __init__(self, site: Site) -> None:
        self._site = site
        self.folder = site.shared("swift")

    def configure(self) -> None:
        """Write the configuration, which others than root may not read."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        (self.folder / "disk").mkdir()
        (self.folder / "swift.conf").write_text(_HASH)
        (self.folder / "proxy.conf").write_text(_COMMON + _PROXY)
        for name, port in _PORTS.items():
            text = _COMMON + _SERVER.format(name=name, port=port, folder=_FOLDER)
            (self.folder / f"{name}.conf").write_text(text)

    def make_bucket(self) -> None:
        """Make the bucket."""
        self._site.run([PYTHON, "-c", _MAKE_BUCKET], env=self.environment)

    def fill(self, objects: Mapping[str, bytes]) -> None:
        """Write objects."""
        folder = self._site.shared("objects")
        for name, data in objects.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._site.run([PYTHON, "-c", _FILL], env=self.environment, timeout=600)
        shutil.rmtree(folder)

    def reads(self) -> list[Read]:
        """Return what was sent of all objects that are not empty, as the server's own log has it.

        Those whose client went away before the end are among them (499).
        """
        reads = []
        for path, query, status, sent, asked in self._gets():
            if path.startswith("/bucket/") and not query and re.fullmatch("2..|499", status):
                if sent == "-":
                    continue
                first = re.match(r"Range: bytes=(\d+)", asked)
                start = int(first[1]) if first else 0
                reads.append(Read(path.removeprefix("/bucket/"), start, int(sent)))
        return reads

    def listed(self) -> int:
        """Return how many pages of listings were asked for."""
        return sum("list-type" in query for _, query, *_ in self._gets())

    def _gets(self) -> Iterator[tuple[str, ...]]:
        """Yield the path, query, status, bytes and Range header of each GET in the server's log."""
        log = (self.folder / "log").read_text()
        for url, *others in re.findall(r"proxy-server: GET (\S+) (\S+) (\S+) (\S+)", log):
            path, _, query = unquote(url).partition("?")  # the log quotes what is quoted already
            yield unquote(path), query, *map(unquote, others)


@contextmanager
def swift(site: Site) -> Iterator[Swift]:
    """Start Swift on the login machine, with an empty bucket, and end it after the block."""
    server = Swift(site)
    server.configure()
    ports = " ".join(f"{name}={port}" for name, port in _PORTS.items())
    line = f"exec /usr/bin/python3 -I {_PROGRAM} {_FOLDER} {ports} >{_FOLDER}/log 2>&1"
    try:
        with running(site, ["sh", "-c", line], ENDPOINT_PORT, *_PORTS.values()):
            server.make_bucket()
            yield server
    finally:
        shutil.rmtree(server.folder)
