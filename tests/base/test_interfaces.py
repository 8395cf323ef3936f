"""The interfaces of this machine are what its own tools tell, and kinds are read from /sys."""

from __future__ import annotations

import json
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from stager.base import interfaces as module
from stager.base.interfaces import (
    Interface,
    Kind,
    interfaces,
    is_in,
    known_addresses,
    leading,
    network_of,
)

if TYPE_CHECKING:
    from pathlib import Path

#: What the kernel shows of each interface: files with their text, folders, links with their target.
SHOWN = {
    "hsn0": {"type": "1", "speed": "200000"},
    "ens3": {"type": "1", "speed": "200000", "device/driver@": "/sys/bus/pci/drivers/cxi_eth"},
    "ib0": {"type": "32", "speed": "100000"},
    "eth0": {"type": "1", "speed": "-1", "device/driver@": "/sys/bus/pci/drivers/mlx5_core"},
    "bond0": {"type": "1", "speed": "50000"},
    "docker0": {"type": "1", "speed": "-1", "bridge/": ""},
    "tun0": {"type": "65534", "speed": "10"},
    "eth1": {"type": "1"},
    "eth2": {"type": "1"},
    "lo": {"type": "772"},
}
#: Up and running, but for the one that is down and the one without a cable; a loopback one.
FLAGS = dict.fromkeys(SHOWN, 0x1043) | {"eth1": 0x1002, "eth2": 0x1003, "lo": 0x49}
IF_INET6 = """\
fe800000000000000000000000000001 02 40 20 80     hsn0
20010db8000000000000000000000007 02 40 00 80     hsn0
20010db8000000000000000000000008 02 40 00 20     hsn0
00000000000000000000000000000001 01 80 10 80       lo
"""


def test_kinds_speeds_and_addresses_are_read_where_the_kernel_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, files in SHOWN.items():
        for file, text in files.items():
            path = tmp_path / name / file.rstrip("@/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.endswith("@"):
                path.symlink_to(text)
            elif file.endswith("/"):
                path.mkdir()
            else:
                path.write_text(f"{text}\n")
    (tmp_path / "if_inet6").write_text(IF_INET6)
    monkeypatch.setattr(module, "_INTERFACES", str(tmp_path))
    monkeypatch.setattr(module, "_IPV6", str(tmp_path / "if_inet6"))
    monkeypatch.setattr(module, "_flags", FLAGS.__getitem__)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(SHOWN, 1)])
    found = interfaces()
    assert [(one.name, one.kind, one.speed) for one in found] == [
        ("hsn0", Kind.SLINGSHOT, 200_000),
        ("ens3", Kind.SLINGSHOT, 200_000),
        ("ib0", Kind.INFINIBAND, 100_000),
        ("eth0", Kind.ETHERNET, 0),
        ("bond0", Kind.ETHERNET, 50_000),
        ("docker0", Kind.VIRTUAL, 0),
        ("tun0", Kind.VIRTUAL, 10),
    ]
    assert found[0].addresses[-1:] == ("2001:db8::7/64",)
    assert [one.text for one in found[2:4]] == [
        "ib0 (InfiniBand, 100 Gbit/s)", "eth0 (speed not known)",
    ]  # fmt: skip


def test_interfaces_and_their_addresses_are_those_of_ip() -> None:
    told = json.loads(subprocess.check_output(["ip", "-json", "address"], text=True))
    first = {
        one["ifname"]: next(
            (f"{at['local']}/{at['prefixlen']}" for at in one["addr_info"] if "." in at["local"]),
            None,
        )
        for one in told
        if {"UP", "LOOPBACK", "NO-CARRIER"} & set(one["flags"]) == {"UP"}
    }
    found = interfaces()
    assert {one.name for one in found} == set(first)
    for one in found:
        assert first[one.name] in (None, *one.addresses[:1])


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.168.17.5/24", "192.168.17.0/24"),
        ("10.255.1.2/9", "10.128.0.0/9"),
        ("10.1.2.3/32", "10.1.2.3/32"),
        ("2001:db8:0:5::1/48", "2001:db8::/48"),
    ],
)
def test_the_network_of_an_address(address: str, network: str) -> None:
    assert network_of(address) == network
    assert is_in(address, network)


def test_an_address_of_another_family_or_network_is_not_in_a_network() -> None:
    assert not is_in("::a01:203/96", "10.1.0.0/16")
    assert not is_in("10.2.0.1/8", "10.1.0.0/16")
    with pytest.raises(OSError, match="illegal IP address"):
        is_in("10.2.0.1/8", "ten/8")


def test_an_interface_without_speed_or_addresses_is_one_too() -> None:
    assert Interface("eth0", Kind.ETHERNET, 0) == Interface("eth0", Kind.ETHERNET, 0, ())


LINKS = {
    "eth0": Interface("eth0", Kind.ETHERNET, 10_000, ("10.0.0.1/24", "fd00::1/64")),
    "ens1": Interface("ens1", Kind.ETHERNET, 10_000, ("10.1.0.1/24",)),
    "ens2": Interface("ens2", Kind.ETHERNET, 100_000, ("10.2.0.1/24",)),
    "ens3": Interface("ens3", Kind.ETHERNET, 0, ("10.3.0.1/24",)),
    "usb0": Interface("usb0", Kind.ETHERNET, 100_000, ("169.254.3.1/16",)),
    "ens9": Interface("ens9", Kind.ETHERNET, 100_000),
    "ib0": Interface("ib0", Kind.INFINIBAND, 0, ("10.4.0.1/24",)),
    "docker0": Interface("docker0", Kind.VIRTUAL, 400_000, ("172.17.0.1/16",)),
    "br0": Interface("br0", Kind.VIRTUAL, 10_000, ("10.5.0.1/16",)),
}


@pytest.mark.parametrize(
    ("known", "names"),
    [
        (["10.0.0.1"], ["eth0", "ens2", "ib0"]),
        (["fd00::1"], ["eth0", "ens2", "ib0"]),
        (["10.3.0.1"], ["ens3", "ib0"]),
        (["10.5.0.1", "10.9.9.9"], ["ens2", "ib0", "br0"]),
        (["10.0.0.1", "10.5.0.1"], ["eth0", "ens2", "ib0"]),
        (["10.4.0.1"], ["ib0"]),
        (["127.0.1.1"], ["eth0", "ens1", "ens2", "ens3", "ib0"]),
        ([], ["eth0", "ens1", "ens2", "ens3", "ib0"]),
    ],
)
def test_other_nodes_are_reached_where_they_know_this_one_and_by_faster_interfaces(
    known: list[str], names: list[str]
) -> None:
    assert [one.name for one in leading(LINKS.values(), known)] == names


@pytest.mark.parametrize(
    ("of_name", "starter", "known"),
    [
        (["10.0.0.1", "fd00::1"], "127.0.0.1", {"10.0.0.1", "fd00::1"}),
        (["127.0.1.1"], "127.0.0.9", {"127.0.0.1"}),
        (["127.0.1.1"], "::1", {"::1"}),
        (["127.0.1.1"], "", set()),
        ([], "no address", set()),
    ],
)
def test_a_node_is_known_by_its_name_or_as_slurm_reaches_it(
    of_name: list[str], starter: str, known: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "addresses_of", lambda _: of_name)
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", starter)
    assert {*known_addresses()} == known
