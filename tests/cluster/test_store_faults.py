"""Stores that fail: jobs end with a clear message, or without an effect, and leave nothing."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cluster.faulty import SIZE
from tests.cluster.servers import HOST, running
from tests.cluster.site import POLICY, REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

PORT = 8081
SERVER = f"http://{HOST}:{PORT}"
SOURCE = f"""
{POLICY}[source]
allow = ["{SERVER}/", "s3://", "az://"]
endpoints = ["{SERVER}", "{SERVER}/account"]
patience = 2
"""
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_ENDPOINT_URL": SERVER, "AWS_REGION": "us-east-1",
    "AZURE_STORAGE_ENDPOINT": f"{SERVER}/account", "AZURE_STORAGE_KEY": "c2VjcmV0",
}  # fmt: skip
#: Sources, and what is said of each.
FAULTS = {
    f"{SERVER}/hang": (
        r"the server did not answer, (once|\d times) in \d+ s; submit again later, or tell those "
        "who run the store"
    ),
    f"{SERVER}/reset": (
        r"the connection failed, \d+ times in \d+ s; submit again later, or tell those who run "
        "the store"
    ),
    f"{SERVER}/larger": "it sends more bytes than it was asked for; tell those who run the store",
    "s3://bucket/expired": (
        r"your credentials have expired \(ExpiredToken: The provided token has expired.\); renew "
        "them and submit again"
    ),
    "az://account/container/expired": (
        r"your credentials have expired \(AuthenticationFailed: Server failed to authenticate the "
        r"request.: Signature not valid in the specified time frame: Expiry \[Sat, 21 Nov 2026\]\);"
        " renew them and submit again"
    ),
}  # fmt: skip
CHANGED = "changed while it was read; submit again when nobody replaces it"


@pytest.fixture
def faulty(site: Site) -> Iterator[Site]:
    line = f"cd {REPOSITORY} && exec {sys.executable} -m tests.cluster.faulty {PORT} 2>&1"
    with running(site, ["sh", "-c", line], PORT), site.policy(SOURCE):
        yield site


def test_stores_that_fail_end_jobs_with_code_4(faulty: Site) -> None:
    jobs = [
        faulty.sbatch("true", "-N1", f"--stage={url}:/nvme/{number}", env=CREDENTIALS)
        for number, url in enumerate(FAULTS)
    ]
    for job, (url, message) in zip(jobs, FAULTS.items(), strict=True):
        assert job.wait().exit_code == "4:0", job.output()
        assert re.match(rf"stage: n\d: {url}: {message}\n", job.output()), job.output()
        assert "the token" not in job.output()
    assert not [path for node in faulty.nodes for path in faulty.copy(node, "/nvme").glob("[0-9]")]
    good = faulty.sbatch("true", "-N4", f"--stage={SERVER}/good:/nvme/good")
    assert good.wait().exit_code == "0:0", good.output()


def test_an_object_that_is_replaced_in_mid_read_is_never_mixed(faulty: Site) -> None:
    with faulty.policy(f"{SOURCE}[transfer]\nreaders = 4\n"):
        once = faulty.sbatch("true", "-N4", f"--stage={SERVER}/swap-1:/nvme/once")
        assert once.wait().exit_code == "0:0", once.output()
        for node in faulty.nodes:
            assert faulty.copy(node, "/nvme/once").read_bytes() == b"\2" * SIZE
        always = faulty.sbatch("true", "-N4", f"--stage={SERVER}/swap-99:/nvme/always")
        assert always.wait().exit_code == "7:0", always.output()
        assert re.match(rf"stage: n\d: {SERVER}/swap-99 {CHANGED}\n", always.output())
        assert not any(faulty.copy(node, "/nvme/always").exists() for node in faulty.nodes)
