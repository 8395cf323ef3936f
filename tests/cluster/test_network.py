"""A second, faster kind of network: the ranks find it, and MPI uses it where the site names it."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.cluster.site import MPICH, POLICY, STAGECTL, digest
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root]

NODES = ("n1", "n2")
SIZE = 64 << 20
#: Plug a second cable, named as those of Slingshot are, into each node; that of a machine's first
#: network carries 400 Mbit/s (about 50 MB/s) only.
PLUG_IN = """\
set -e
ip link add br1 type bridge
ip link set br1 up
for number in 1 2; do
    pid=$(pgrep -o -f "namespaces.sh node n$number ")
    ip link add second$number master br1 type veth peer name hsn0 netns $pid
    ip link set second$number up
done
"""
SET_UP = """\
set -e
ip address add 10.1.0.{number}/24 dev hsn0
ip link set hsn0 up
tc qdisc add dev eth0 root tbf rate 400mbit burst 256k latency 200ms
"""
WATCH = "stage: the ranks watch each other over the network 10.1.0.0/24, on n1 by hsn0 (Slingshot, "
USE = "stage: the ranks use the network 10.1.0.0/24, on n1 by hsn0 (Slingshot, "


@pytest.fixture
def fast_site(site: Site) -> Iterator[Site]:
    """The first two nodes have a second network."""
    site.run(f"head -c {SIZE} /dev/urandom > /shared/data")
    with ExitStack() as stack:
        stack.callback(site.run, "ip link delete br1", user="root", check=False)
        site.run(PLUG_IN, user="root")
        for number, node in enumerate(NODES, 1):
            undo = "ip link delete hsn0; tc qdisc delete dev eth0 root"
            stack.callback(site.run, undo, user="root", on=node, check=False)
            site.run(SET_UP.format(number=number), user="root", on=node)
        yield site


def stage(site: Site, name: str, launch: str = "", code: int = 0) -> str:
    """Return the output of ``stagectl stage --verbose`` on both nodes."""
    with site.policy(f"{POLICY}[launch]\n{launch}\n"):
        line = f"{STAGECTL} stage --verbose /shared/data:/nvme/{name}"
        job = site.sbatch(line, "-N2", f"-w{','.join(NODES)}")
        assert job.wait().exit_code == f"{code}:0", job.output()
    return job.output()


def received(site: Site, node: str) -> dict[str, int]:
    """Return the bytes that each interface of the node has received."""
    links = json.loads(site.run(["ip", "-json", "-s", "link"], user="root", on=node).stdout)
    return {link["ifname"]: link["stats64"]["rx"]["bytes"] for link in links}


def test_the_ranks_find_the_fast_network_and_mpi_uses_the_one_that_the_site_names(
    fast_site: Site,
) -> None:
    site = fast_site
    assert WATCH in stage(site, "auto")
    for name, named in {"name": 'interface = "hsn0"', "net": 'interface = "10.1.0.0/24"'}.items():
        before = received(site, "n2")
        output = stage(site, name, named)
        after = received(site, "n2")
        assert USE in output
        assert output.count(", as stage.toml says\n") == 1
        assert after["hsn0"] - before["hsn0"] > SIZE
        assert after["eth0"] - before["eth0"] < SIZE // 8
        assert digest(site.copy("n2", f"/nvme/{name}")) == digest(site.shared("data"))
    # MPI connects by eth0 all the same, but n2 has lost the interface that the site names.
    site.run("ip link set hsn0 down", user="root", on="n2")
    both = 'interface = "hsn0"\nenvironment = { OMPI_MCA_btl_tcp_if_include = "eth0" }'
    assert (
        "stage: staging ended early: n2: this node has no interface hsn0 with an address by which "
        "other nodes can reach it; tell the administrator (interface in [launch] of stage.toml); "
        "submit again"
    ) in stage(site, "lost", both, code=8).splitlines()
    assert (
        "stage: MPI did not start: n2 has no interface that is up and leads to other nodes of "
        "those that interface in [launch] of stage.toml names (hsn0); tell the administrator"
    ) in stage(site, "none", 'interface = "hsn0"', code=8).splitlines()
    # Without it, the network that both nodes share is taken.
    told = stage(site, "again")
    assert re.search(r"over the network 10\.0\.0\.0/24, on n1 by eth0 \(.*\)\n", told)
    assert not site.copy("n2", "/nvme/lost").exists()


#: A network that leads nowhere: its cable ends on the node itself. The first has the address of
#: Docker's, the same on each node.
ASTRAY = """\
ip link add {name} type veth peer name end-{name}
ip link set end-{name} up
ip address add {address} dev {name}
ip link set {name} up
"""


@pytest.fixture
def astray(site: Site) -> Iterator[Site]:
    """Each node has the network of containers, and one more that leads nowhere."""
    site.run(f"head -c {SIZE} /dev/urandom > /shared/data")
    with ExitStack() as stack:
        for number, node in enumerate(site.nodes, 1):
            for name, address in (("docker0", "172.17.0.1/16"), ("lost0", f"10.9.0.{number}/24")):
                undo = f"ip link delete {name}"
                stack.callback(site.run, undo, user="root", on=node, check=False)
                site.run(ASTRAY.format(name=name, address=address), user="root", on=node)
        yield site


MPICH_LAUNCH = f"""\
[launch]
mpi = "pmi2"
[launch.environment]
MPI4PY_MPIABI = "mpich"
LD_LIBRARY_PATH = "{MPICH}/lib"
MPIR_CVAR_CH4_NETMOD = """


#: What starts MPI, and so many jobs.
LAUNCHES = [
    ("", 1), repeated(("", 20)), repeated((MPICH_LAUNCH + '"ofi"', 20)),
    repeated((MPICH_LAUNCH + '"ucx"', 20)),
]  # fmt: skip


@pytest.mark.parametrize("launched", LAUNCHES, ids=["one", "open-mpi", "libfabric", "ucx"])
def test_mpi_uses_no_network_that_leads_nowhere(astray: Site, launched: tuple[str, int]) -> None:
    launch, jobs = launched
    if launch:
        astray.install_mpich()
    expected = digest(astray.shared("data"))
    with astray.policy(POLICY + launch):
        for _ in range(jobs):
            job = astray.sbatch("true", "-N4", "--stage=/shared/data:/nvme/,validate=always")
            assert job.wait().exit_code == "0:0", job.output()
            assert " to n[1-4] (4 nodes) in " in job.output()
    assert all(digest(astray.copy(node, "/nvme/data")) == expected for node in astray.nodes)
