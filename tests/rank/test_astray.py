"""MPI over TCP is kept from interfaces that lead nowhere, and a site's own choice is kept."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stager.base import interfaces as found
from stager.base.interfaces import Interface, Kind
from stager.rank import network

if TYPE_CHECKING:
    from pathlib import Path

ETH0 = Interface("eth0", Kind.ETHERNET, 10_000, ("10.0.0.1/24",))
IB0 = Interface("ib0", Kind.INFINIBAND, 0, ("10.4.0.1/24",))
BRIDGE = Interface("docker0", Kind.VIRTUAL, 0, ("172.17.0.1/16",))
INCLUDE, EXCLUDE = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
BOTH = {INCLUDE: "eth0,ib0", "FI_TCP_IFACE": "ib0", "FI_SOCKETS_IFACE": "ib0"}
NAMES = (INCLUDE, EXCLUDE, "FI_TCP_IFACE", "FI_SOCKETS_IFACE")
#: The node's interfaces; the settings of Open MPI; variables before and after.
CASES: dict[str, tuple[list[Interface], str, dict[str, str], dict[str, str]]] = {
    "one interface": ([ETH0], "", {}, {}),
    "only those that lead to others": ([ETH0, IB0], "", {}, {}),
    "a bridge": ([ETH0, IB0, BRIDGE], "btl_tcp_links = 2\n# btl_tcp_if_include = eth0\n", {}, BOTH),
    "by the variable": ([ETH0, BRIDGE], "", {INCLUDE: "docker0"}, {INCLUDE: "docker0"}),
    "excluded": ([ETH0, BRIDGE], "", {EXCLUDE: "lo"}, {EXCLUDE: "lo"}),
    "by the settings": ([ETH0, BRIDGE], " btl_tcp_if_exclude = lo,docker0\n", {}, {}),
    "of libfabric": (
        [ETH0, BRIDGE],
        "",
        {"FI_TCP_IFACE": "x"},
        {INCLUDE: "eth0", "FI_TCP_IFACE": "x", "FI_SOCKETS_IFACE": "eth0"},
    ),
}


@pytest.mark.parametrize(("links", "settings", "before", "after"), CASES.values(), ids=CASES)
def test_the_interfaces_of_mpi(
    links: list[Interface], settings: str, before: dict[str, str], after: dict[str, str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/openmpi-mca-params.conf").write_text(settings)
    monkeypatch.setattr(network, "_SETTINGS", network._SETTINGS[1:])
    monkeypatch.setattr(network, "_prefix", lambda: tmp_path)
    every = enumerate(["lo", *(one.name for one in links)], 1)
    monkeypatch.setattr(network, "if_nameindex", lambda: [*every])
    monkeypatch.setattr(found, "interfaces", lambda: links)
    monkeypatch.setattr(found, "known_addresses", lambda: ["10.0.0.1"])
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    network.keep_from_going_astray()
    seen = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    assert seen == after
