"""Models of a hub are read once and broadcast, by ordinary users' jobs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.cluster.servers import hub as running_hub
from tests.cluster.site import POLICY, STAGECTL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.site import Site
    from tests.support.hub import Hub

URL, COPY = "hf://org/model", "/nvme/model"
#: What no record, log, list of processes or description of a job may have in it.
SECRET = "hf_kTQXbGVneverShown"
SIZES = {"weights.bin": 40_000_001, "tokenizer/vocab.json": 70_000, "config.json": 700, "empty": 0}


@pytest.fixture
def hub(site: Site) -> Iterator[Hub]:
    with running_hub(site) as server:
        server.set(token=SECRET)
        yield server


def policy(hub: Hub) -> str:
    return (
        f'{POLICY}[source]\nallow = ["hf://org/"]\nendpoints = ["{hub.endpoint}"]\n'
        'ca_file = "/shared/hub/ca.pem"\npatience = 2\n'
    )


def stage(site: Site, hub: Hub, command: str, exit_code: str = "0:0") -> str:
    """Run a job of four nodes whose environment has the token. Return its output."""
    job = site.sbatch(command, "-N4", env={"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": SECRET})
    assert job.wait().exit_code == exit_code, job.output()
    assert SECRET not in job.output()
    return job.output()


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_model_is_read_once_and_a_moved_branch_moves_what_changed(site: Site, hub: Hub) -> None:
    files = {path: os.urandom(size) for path, size in SIZES.items()}
    hub.commit("models/org/model", files)
    command = (
        f"{STAGECTL} stage --verbose {URL}:/nvme/ &\n"
        "sleep 0.5; ps -eo args; wait $! || exit; scontrol show job $SLURM_JOB_ID"
    )
    with site.policy(policy(hub)):
        stage(site, hub, command)
        assert [files_of(site.copy(node, COPY)) for node in site.nodes] == [files] * 4
        served = {path.rpartition("/")[2]: size for path, size in SIZES.items() if size}
        assert hub.served() == served
        assert len(hub.asked("hub", "weights.bin")) == 1
        assert {one["authorization"] for one in hub.asked("cdn")} == {None}
        text = stage(site, hub, f"{STAGECTL} stage {URL}:{COPY}")
        assert f"stage: {COPY}: current on n[1-4] (4 nodes), nothing moved" in text
        assert hub.served() == served
        files["config.json"] = b"{}"
        hub.commit("models/org/model", files)
        text = stage(site, hub, f"{STAGECTL} stage {URL}:{COPY}")
        assert f"stage: {COPY}: 1 file, 2 B (3 files kept) from {URL} to n[1-4] (4 nodes)" in text
        assert [files_of(site.copy(node, COPY)) for node in site.nodes] == [files] * 4
        assert hub.served() == {**served, "config.json": 702}
    records = [record.read_text() for node in site.nodes for record in site.records(node)]
    logs = [log.read_text(errors="replace") for log in (site.base / "log").iterdir()]
    assert not [text for text in records + logs if SECRET in text]


def test_a_part_of_a_model_is_on_each_node(site: Site, hub: Hub) -> None:
    files = {f"part-{number}.bin": os.urandom(20_000) for number in range(8)}
    hub.commit("datasets/org/set", {**files, "README.md": b"#"})
    url = "hf://datasets/org/set"
    directive = f"{url}:/nvme/set,mode=shard,include=*.bin"
    with site.policy(policy(hub).replace("hf://org/", "hf://datasets/")):
        stage(site, hub, f"{STAGECTL} stage {directive}")
        parts = [files_of(site.copy(node, "/nvme/set")) for node in site.nodes]
        assert [len([path for path in one if path in files]) for one in parts] == [2] * 4
        assert hub.served() == dict.fromkeys(files, 20_000)
        hub.set(token="another")
        text = stage(site, hub, f"{STAGECTL} stage {url}@main:/nvme/other", "4:0")
    assert text == (
        f"stage: n1: {url}@main: you may not read it (as the hub says); ask for access on its "
        "page, with the account that HF_TOKEN in the job's environment is of\n"
    )


def test_a_model_can_be_found_as_in_the_cache_of_the_hubs_own_programs(
    site: Site, hub: Hub
) -> None:
    files = {"weights.bin": os.urandom(30_000), "below/config.json": b"{}"}
    first = hub.commit("models/org/model", files)
    folder = "/nvme/hub/models--org--model"
    with site.policy(policy(hub)):
        stage(site, hub, f"{STAGECTL} stage {URL}:/nvme/hub/,layout=hub")
        files["below/config.json"] = b"[]"
        second = hub.commit("models/org/model", files)
        text = stage(site, hub, f"{STAGECTL} stage {URL}:/nvme/hub/,layout=hub")
    # The new contents of a file, and the name of the commit.
    assert f"stage: {folder}: 2 files, 42 B (1 file kept, 1 file deleted) from {URL}" in text
    assert first != second
    for node in site.nodes:
        copy = site.copy(node, folder)
        assert (copy / "refs/main").read_text() == second
        assert files_of(copy / "snapshots" / second) == files
        assert os.listdir(copy / "snapshots") == [second]
    assert hub.served() == {"weights.bin": 30_000, "config.json": 4}
