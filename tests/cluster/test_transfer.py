"""The transfer on real nodes: bytes on the network, reads of the source, use of the page cache."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from stager.wire.layout import Algorithm
from tests.cluster.site import POLICY, STAGECTL, Site, digest
from tests.cluster.watch import Watch
from tests.support.archives import zstd_compress
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.cluster, pytest.mark.root]

MIB = 1 << 20
CHUNK = 2 * MIB
SIZES = [0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1]
ALGORITHMS = [algorithm for algorithm in Algorithm if algorithm is not Algorithm.AUTO]
NOT_STARTED = "stage: the job's own program was not started (exit code {})\n"
#: Half of it can be compressed well.
DATA = random.Random(0).randbytes(10 * MIB) + b"some words\n" * MIB
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd_compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}


@pytest.fixture(scope="module")
def wide_site() -> Iterator[Site]:
    """A cluster of sixteen nodes."""
    with Site(16) as cluster:
        yield cluster


def stage(site: Site, wish: str, nodes: int = 4) -> dict[str, Any]:
    """Return the report of ``stagectl stage --json`` in a job."""
    job = site.sbatch(f"{STAGECTL} stage --json {wish}", f"-N{nodes}")
    assert job.wait().exit_code == "0:0", job.output()
    report = json.loads(job.output())
    assert isinstance(report, dict)
    return report


def transfer_policy(**keys: object) -> str:
    return POLICY + "[transfer]\n" + "".join(f"{key} = {json.dumps(keys[key])}\n" for key in keys)


def received_bytes(site: Site, nodes: list[str]) -> dict[str, int]:
    """Return how many bytes each node's network has received so far."""
    counts: dict[str, int] = {}
    for node in nodes:
        links = json.loads(site.run(["ip", "-json", "-s", "link"], user="root", on=node).stdout)
        counts[node] = sum(
            link["stats64"]["rx"]["bytes"] for link in links if link["ifname"] != "lo"
        )
    return counts


@contextmanager
def counted(site: Site, nodes: list[str]) -> Iterator[dict[str, int]]:
    """Count the bytes that each node receives in a with block."""
    counts = received_bytes(site, nodes)
    yield counts
    after = received_bytes(site, nodes)
    for node in nodes:
        counts[node] = after[node] - counts[node]


@pytest.mark.parametrize("algorithm", [ALGORITHMS[0], *map(repeated, ALGORITHMS[1:])])
def test_files_of_all_edge_sizes_arrive_with_each_algorithm(
    site: Site, algorithm: Algorithm
) -> None:
    for size in SIZES:
        site.run(f"head -c {size} /dev/urandom > /shared/data.{size}")
    wishes = " ".join(f"/shared/data.{size}:/nvme/" for size in SIZES)
    with site.policy(transfer_policy(algorithm=str(algorithm))):
        report = stage(site, wishes)
    assert [item["size"] for item in report["items"]] == SIZES
    for size in SIZES:
        source = digest(site.shared(f"data.{size}"))
        copies = [site.copy(node, f"/nvme/data.{size}") for node in site.nodes]
        assert {digest(copy) for copy in copies} == {source}
        site.shared(f"data.{size}").unlink()


@pytest.mark.parametrize("readers", [repeated(1), 4])
def test_readers_in_turns_read_each_byte_once(site: Site, readers: int) -> None:
    size = 40 * MIB + 12345
    site.run(f"head -c {size} /dev/urandom > /shared/data")
    with site.policy(transfer_policy(readers=readers)), Watch(site.shared("data")) as watch:
        (item,) = stage(site, "/shared/data:/nvme/")["items"]
    assert item["source_bytes_read"] == size
    assert 1 <= watch.opened <= readers  # inotify merges equal events in a row
    assert {digest(site.copy(node, "/nvme/data")) for node in site.nodes} == {
        digest(site.shared("data"))
    }


def test_one_holder_sends_and_the_source_is_not_read(site: Site) -> None:
    site.run(f"head -c {40 * MIB} /dev/urandom > /shared/data")
    stage(site, "/shared/data:/nvme/")
    site.copy("n2", "/nvme/data").unlink()
    with site.policy(transfer_policy(readers=4)), Watch(site.shared("data")) as watch:
        (item,) = stage(site, "/shared/data:/nvme/")["items"]
    assert (watch.opened, watch.read) == (0, 0)
    assert (item["senders"], item["received"]) == (["n1"], ["n2"])
    assert digest(site.copy("n2", "/nvme/data")) == digest(site.shared("data"))


def test_a_sparse_file_of_six_gib_takes_little_disk_and_memory(site: Site) -> None:
    size, data = 6 << 30, 64 * MIB
    site.run(f"truncate -s {size} /shared/sparse && head -c {data} /dev/urandom | "
             f"dd of=/shared/sparse bs=1M seek=3000 conv=notrunc status=none")  # fmt: skip
    (item,) = stage(site, "/shared/sparse:/nvme/", nodes=2)["items"]
    ring = 32 * MIB
    assert 0 < item["peak_memory"] < 128 * MIB + ring
    assert item["source_bytes_read"] == data
    for node in ("n1", "n2"):
        facts = site.copy(node, "/nvme/sparse").stat()
        assert facts.st_size == size
        assert facts.st_blocks * 512 <= data + MIB
    # The rest is holes, or the copy would take more.
    same = f"cmp --ignore-initial={3000 * MIB} --bytes={data} /shared/sparse /nvme/sparse"
    site.run(same, on="n2")
    site.shared("sparse").unlink()


@pytest.mark.parametrize("direct", [True, repeated(False)])
def test_copies_are_written_past_the_page_cache_if_the_site_wants(site: Site, direct: bool) -> None:
    site.run(f"head -c {20 * MIB + 100} /dev/urandom > /shared/data")
    with site.policy(transfer_policy(direct=direct)):
        stage(site, "/shared/data:/nvme/")
    line = ["fincore", "--bytes", "--noheadings", "--output", "RES", "/nvme/data"]
    cached = int(site.run(line, on="n3").stdout)
    assert cached <= MIB if direct else cached > 20 * MIB
    assert digest(site.copy("n3", "/nvme/data")) == digest(site.shared("data"))


def test_readback_reads_the_written_copy(site: Site) -> None:
    site.run(f"head -c {20 * MIB + 100} /dev/urandom > /shared/data")
    report = stage(site, "/shared/data:/nvme/,verify=readback")
    assert report["phases"]["verify"] > 0
    assert digest(site.copy("n4", "/nvme/data")) == digest(site.shared("data"))


def test_verbose_shows_the_time_of_each_phase(site: Site) -> None:
    site.run("head -c 5000000 /dev/urandom > /shared/data")
    job = site.sbatch(f"{STAGECTL} stage --verbose /shared/data:/nvme/", "-N4")
    assert job.wait().exit_code == "0:0"
    launch, network, _, line = job.output().splitlines()
    assert launch == "stage: srun --mpi=pmix starts the ranks"
    watch = "stage: the ranks watch each other over the network 10.0.0.0/24, on n1 by eth0 ("
    assert network.startswith(watch)
    names = ["launch", "MPI init", "survey", "wait", "open", "read", "write", "broadcast", "fsync",
             "publish", "end"]  # fmt: skip
    phases = ", ".join(rf"{name} (\d+\.\d\d)" for name in names)
    match = re.fullmatch(rf"stage: (\d+\.\d\d) s: {phases}; longest: (.*)", line)
    assert match, line
    total, *parts = (float(number) for number in match.groups()[:-1])
    assert sum(parts) == pytest.approx(total, abs=0.01 * len(parts))
    assert match.groups()[-1] in names


def test_bench_measures_and_leaves_nothing(site: Site) -> None:
    site.run(f"head -c {20 * MIB} /dev/urandom > /shared/data")
    job = site.sbatch(f"{STAGECTL} bench --size 8 --source /shared/data", "-N4")
    assert job.wait().exit_code == "0:0"
    speed = r" +\d+\.\d\d GB/s"
    sizes = ["64.0 KiB", "256.0 KiB", "1.0 MiB", "4.0 MiB", "8.0 MiB"]
    expected = [
        r" *message +best time +bcast +ibcast +chain +tree",
        *(rf" *{re.escape(size)} +\d+ us({speed}){{4}}" for size in sizes),
        rf"disk, written and synced, slowest on n\d:{speed}",
        rf"disk, read without the page cache, slowest on n\d:{speed}",
        rf"source, one stream, read on n1:{speed}",
        rf"the slowest part is the (network|disk|source):{speed} a node",
        r"NODE +WRITE +READ +NETWORK +SLOW",
        *[r"n\d( +[\d.]+ [MG]B/s){3}( +(write|read|network)(, \w+)*)?"] * 4,
    ]
    lines = job.output().splitlines()
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
    assert [os.listdir(site.path(node, "/nvme")) for node in site.nodes] == [[".slurm-stage"]] * 4
    assert all(site.records(node) == [] for node in site.nodes)


def put(site: Site, name: str, text: bytes) -> None:
    """Write a file of alice's to the shared folder."""
    site.shared(name).write_bytes(text)
    site.run(["chown", "alice:", f"/shared/{name}"], user="root")


def test_a_compressed_file_travels_as_it_is_and_arrives_decompressed(site: Site) -> None:
    text = COMPRESS["zst"](DATA[:MIB]) + COMPRESS["zst"](DATA[MIB:])
    put(site, "set.zst", text)
    with Watch(site.shared("set.zst")) as watch, counted(site, site.nodes) as received:
        (item,) = stage(site, "/shared/set.zst:/nvme/,decompress")["items"]
    assert item["source_bytes_read"] == item["size"] == len(text)
    assert watch.opened == 1
    assert max(received.values()) < len(text) + MIB
    for node in site.nodes:
        assert site.copy(node, "/nvme/set").read_bytes() == DATA
        assert (
            site.copy(node, "/nvme/set").stat().st_mtime == site.shared("set.zst").stat().st_mtime
        )
    with Watch(site.shared("set.zst")) as watch:
        job = site.sbatch("true", "-N4", "--stage=/shared/set.zst:/nvme/,decompress")
        assert job.wait().exit_code == "0:0", job.output()
    assert (watch.opened, watch.read) == (0, 0)
    # A copy has other bytes than are sent: the node without one gets them from the source.
    site.copy("n2", "/nvme/set").unlink()
    (item,) = stage(site, "/shared/set.zst:/nvme/,decompress")["items"]
    assert (item["received"], item["senders"]) == (["n2"], [])
    assert site.copy("n2", "/nvme/set").read_bytes() == DATA


def test_a_decompressed_file_is_listed_verified_planned_and_evicted(site: Site) -> None:
    put(site, "set.gz", gzip.compress(DATA))
    stage(site, "/shared/set.gz:/nvme/,decompress,verify=readback")
    script = f"""
    cmp <(zcat /shared/set.gz) /nvme/set && echo same
    {STAGECTL} status
    {STAGECTL} verify
    {STAGECTL} plan /shared/set.gz:/nvme/set,decompress,validate=checksum
    {STAGECTL} plan /shared/set.gz:/nvme/set
    {STAGECTL} evict /nvme/set
    """
    job = site.sbatch(script, "-N4")
    assert job.wait().exit_code == "0:0", job.output()
    same, _, row, *told = job.output().splitlines()
    assert same == "same"
    assert re.fullmatch(r"n\[1-4\] +/nvme/set +21.0 MiB +\d+ s ago +ready .*", row)
    assert [line for line in told if line.startswith("stage:")] == [
        "stage: /nvme/set: verified on n[1-4] (4 nodes)",
        "stage: /nvme/set: current on n[1-4] (4 nodes), nothing would move",
        (
            "stage: /nvme/set: 10.0 MiB would move from /shared/set.gz to n[1-4] (4 nodes) "
            "(made differently)"
        ),
        "stage: /nvme/set: evicted on n[1-4] (4 nodes)",
    ]
    assert not site.copy("n1", "/nvme/set").exists()


@pytest.mark.parametrize(
    "suffix", ["gz", *(repeated(suffix) for suffix in COMPRESS if suffix != "gz")]
)
def test_a_damaged_file_is_refused_and_the_old_copy_stays(site: Site, suffix: str) -> None:
    wish = f"--stage=/shared/set.{suffix}:/nvme/,decompress"
    text = COMPRESS[suffix](DATA)
    put(site, f"set.{suffix}", text)
    assert site.sbatch("true", "-wn1,n2", wish).wait().exit_code == "0:0"
    inodes = [site.copy(node, "/nvme/set").stat().st_ino for node in ("n1", "n2")]
    ends = r"it ends early"
    damages = [
        (text[:-1], ends),
        (text[: len(text) // 2] + b"?" + text[len(text) // 2 + 1 :], ".*"),
        (text[: len(text) // 2], ends),
        (text + b"garbage", ".*"),
        (b"", ends),
    ]
    # Unit tests do each to all formats.
    for damaged, problem in damages if suffix == "gz" else damages[:2]:
        put(site, f"set.{suffix}", damaged)
        job = site.sbatch("echo ran", "-wn1,n2", wish)
        assert job.wait().exit_code == "4:0"
        why = rf"/shared/set.{suffix} cannot be decompressed: the file is damaged \({problem}\); "
        remedy = "get an undamaged copy of it, or create it again\n"
        assert re.fullmatch(
            rf"stage: n\[1-2\]: {why}{remedy}" + re.escape(NOT_STARTED.format(4)), job.output()
        )
        assert [site.copy(node, "/nvme/set").stat().st_ino for node in ("n1", "n2")] == inodes
        assert site.leftovers() == []
    put(site, f"set.{suffix}", text)
    assert site.sbatch("true", "-wn1,n2", wish).wait().exit_code == "0:0"
    assert site.copy("n2", "/nvme/set").read_bytes() == DATA


def test_a_file_that_unpacks_to_more_than_the_site_allows_is_refused(site: Site) -> None:
    put(site, "zeros.gz", gzip.compress(bytes(64 * MIB)))
    with site.policy(POLICY + "[cache]\nunpacked_size = '50MiB'\n"):
        job = site.sbatch("true", "-N4", "--stage=/shared/zeros.gz:/nvme/,decompress")
        assert job.wait().exit_code == "2:0"
    assert job.output() == (
        "stage: n[1-4]: /shared/zeros.gz: it has more than the 50.0 MiB that the site allows "
        "(unpacked_size): nothing was unpacked; ask the administrator to allow more\n"
        + NOT_STARTED.format(2)
    )
    assert not site.copy("n1", "/nvme/zeros").exists()


def test_only_nodes_that_need_the_file_take_part(wide_site: Site) -> None:
    """3 of 8 nodes lack the file: each receives it once, and the others almost nothing."""
    size = 40 * MIB
    wide_site.run(f"head -c {size} /dev/urandom > /shared/data")
    stage(wide_site, "/shared/data:/nvme/", nodes=8)
    nodes = [f"n{number}" for number in range(1, 9)]
    lacking = ["n4", "n5", "n7"]
    for node in lacking:
        wide_site.copy(node, "/nvme/data").unlink()
    with counted(wide_site, nodes) as received:
        (item,) = stage(wide_site, "/shared/data:/nvme/", nodes=8)["items"]
    assert item["received"] == lacking
    for node in lacking:
        assert size < received[node] < 1.1 * size
    # Acknowledgements, and messages of Slurm and MPI.
    assert all(received[node] < 0.05 * size for node in nodes if node not in lacking)


@pytest.mark.parametrize("algorithm", [*map(repeated, ALGORITHMS[:-1]), ALGORITHMS[-1]])
def test_sixteen_nodes(wide_site: Site, algorithm: Algorithm) -> None:
    wide_site.empty_disks()
    wide_site.run(f"head -c {20 * MIB + 1} /dev/urandom > /shared/data")
    with wide_site.policy(transfer_policy(algorithm=str(algorithm), readers=3)):
        (item,) = stage(wide_site, "/shared/data:/nvme/", nodes=16)["items"]
    assert len(item["received"]) == 16
    assert item["peak_memory"] < (128 + 32) * MIB
    assert {digest(wide_site.copy(node, "/nvme/data")) for node in wide_site.nodes} == {
        digest(wide_site.shared("data"))
    }
    wide_site.assert_healthy()
    assert wide_site.leftovers() == []


def test_an_interface_that_the_site_names_for_mpi_and_no_node_has_is_told(site: Site) -> None:
    site.run("echo a > /shared/a")
    interfaces = 'environment = { OMPI_MCA_btl_tcp_if_include = "ib7,ib8" }'
    with site.policy(f"{POLICY}[launch]\n{interfaces}\n"):
        job = site.sbatch("true", "-N2", "-wn[1-2]", "--stage=/shared/a:/nvme/a")
        assert job.wait().exit_code == "8:0"
    assert job.output() == (
        "stage: MPI did not start: n[1-2] has no interface that is up and leads to other nodes of "
        "those that OMPI_MCA_btl_tcp_if_include in [launch] environment of stage.toml names "
        "(ib7,ib8); tell the administrator\n" + NOT_STARTED.format(8)
    )
