"""The facts of this machine's network are those that its own tools tell."""

from __future__ import annotations

import json
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from stager.base.interfaces import Kind
from stager.node import probes
from stager.node.probes import Fabric, Link, fabrics, links

if TYPE_CHECKING:
    from pathlib import Path


def test_the_name_of_the_machine_leads_to_the_interface_with_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = json.loads(subprocess.check_output(["ip", "-json", "-4", "address"], text=True))
    for one in told:
        if one["ifname"] != "lo" and one["operstate"] != "DOWN" and one["addr_info"]:
            address = one["addr_info"][0]["local"]
            monkeypatch.setattr(socket, "gethostname", lambda: address)  # noqa: B023
            assert [link.name for link in links() if link.named] == [one["ifname"]]


@pytest.mark.parametrize(
    ("kind", "addresses", "named", "usable"),
    [
        (Kind.ETHERNET, ("10.0.0.1/24",), False, True),
        (Kind.ETHERNET, (), False, False),
        (Kind.ETHERNET, ("169.254.0.1/16",), False, False),
        (Kind.VIRTUAL, ("172.17.0.1/16",), False, False),
        (Kind.VIRTUAL, ("10.0.0.1/24",), True, True),
    ],
)
def test_other_nodes_are_reached_by_an_address_and_not_through_a_bridge_for_containers(
    kind: Kind, addresses: tuple[str, ...], *, named: bool, usable: bool
) -> None:
    assert Link("eth0", kind, 0, addresses, named=named).is_usable is usable


def test_fabrics_are_read_where_the_kernel_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in (
        ("infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (4X EDR)\n"),
        ("infiniband/mlx5_1/ports/1/state", "1: DOWN\n"),
        ("cxi/cxi0/device/port/speed", "BS_200G\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(probes, "_CLASSES", tmp_path)
    assert fabrics() == [
        Fabric("mlx5_0", "100 Gb/sec (4X EDR)"), Fabric("mlx5_1", ""), Fabric("cxi0", "BS_200G"),
    ]  # fmt: skip
