"""The facts of this machine's network are those that its own tools tell."""

from __future__ import annotations

import json
import socket
import subprocess
from typing import TYPE_CHECKING

from stager.doctor import network
from stager.doctor.network import Fabric, fabrics, links

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_interfaces_are_those_of_ip() -> None:
    told = json.loads(subprocess.check_output(["ip", "-json", "address"], text=True))
    up = {
        one["ifname"]
        for one in told
        if one["operstate"] != "DOWN" and "LOOPBACK" not in one["flags"]
    }
    assert {link.name for link in links()} == up


def test_the_name_of_the_machine_leads_to_the_interface_with_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = json.loads(subprocess.check_output(["ip", "-json", "-4", "address"], text=True))
    for one in told:
        if one["ifname"] != "lo" and one["operstate"] != "DOWN" and one["addr_info"]:
            address = one["addr_info"][0]["local"]
            monkeypatch.setattr(socket, "gethostname", lambda: address)  # noqa: B023
            assert [link.name for link in links() if link.named] == [one["ifname"]]


def test_fabrics_and_speeds_are_read_where_the_kernel_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in (
        ("infiniband/mlx5_0/ports/1/rate", "100 Gb/sec (4X EDR)\n"),
        ("infiniband/mlx5_1/ports/1/state", "1: DOWN\n"),
        ("cxi/cxi0/device/port/speed", "BS_200G\n"),
        ("net/ib0/speed", "100000\n"),
        ("net/veth/speed", "-1\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(network, "_CLASSES", tmp_path)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0"), (3, "veth")])
    assert fabrics() == [
        Fabric("mlx5_0", "100 Gb/sec (4X EDR)"), Fabric("mlx5_1", ""), Fabric("cxi0", "BS_200G"),
    ]  # fmt: skip
    assert [(link.name, link.speed) for link in links()] == [("ib0", 100_000), ("veth", 0)]
