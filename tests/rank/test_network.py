"""Ranks choose the fastest network that all of them are in, and never one that leads nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.base.errors import LaunchError
from stager.base.interfaces import Interface, Kind, interfaces
from stager.rank.network import OFFERS, Offer, choose, missing, offers, offers_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def ethernet(name: str, speed: int, address: str) -> Interface:
    return Interface(name, Kind.ETHERNET, speed, (address,))


def node(number: int) -> dict[str, Interface]:
    """The interfaces of a node of a large site, by their names."""
    return {
        "eth0": ethernet("eth0", 1_000, f"10.0.0.{number}/24"),
        "eth1": ethernet("eth1", 25_000, f"10.1.0.{number}/24"),
        "ib0": Interface("ib0", Kind.INFINIBAND, 0, (f"10.2.0.{number}/24",)),
        "hsn0": Interface("hsn0", Kind.SLINGSHOT, 200_000, (f"10.3.0.{number}/24",)),
        "docker0": Interface("docker0", Kind.VIRTUAL, 40_000, ("172.17.0.1/16",)),
        "usb0": ethernet("usb0", 100_000, "169.254.3.1/16"),
        "eth9": Interface("eth9", Kind.ETHERNET, 400_000),
    }


def offered(number: int, *names: str, wanted: str = "", also: Sequence[str] = ()) -> list[Offer]:
    """What a node with these interfaces offers; its name leads to eth0, NAME-ib0 to ``also``."""

    def look_up(end: str) -> Collection[str]:
        return {"": {f"10.0.0.{number}"}, "-ib0": set(also)}.get(end, set())

    every = node(number)
    return offers_of([every[name] for name in names], wanted, look_up)


def chosen(*ranks: Sequence[Offer]) -> list[str]:
    return [f"{one.name} {one.host}" for one in choose(ranks)]


EVERY = ("eth0", "eth1", "ib0", "hsn0", "docker0", "usb0", "eth9")


@pytest.mark.parametrize(
    ("of_n1", "of_n2", "name"),
    [
        (EVERY, EVERY, "hsn0"),
        (EVERY, ("eth0", "eth1", "ib0"), "ib0"),
        (EVERY, ("eth0", "eth1", "docker0", "usb0"), "eth1"),
        (("eth0", "hsn0"), ("eth0", "ib0"), "eth0"),
    ],
    ids=["all", "no hsn0 on n2", "Ethernet by its speed", "the one that both have"],
)
def test_the_fastest_network_of_all_nodes_is_chosen(
    of_n1: Sequence[str], of_n2: Sequence[str], name: str
) -> None:
    third = {"eth0": 0, "eth1": 1, "ib0": 2, "hsn0": 3}[name]
    expected = [f"{name} 10.{third}.0.1", f"{name} 10.{third}.0.2"]
    assert chosen(offered(1, *of_n1), offered(2, *of_n2)) == expected


def test_without_a_shared_network_none_is_chosen() -> None:
    assert chosen(offered(1, "eth0"), offered(2, "ib0")) == []
    assert chosen(offered(1, "docker0", "usb0", "eth9"), offered(2, "docker0")) == []


def test_a_network_that_each_node_has_for_itself_is_not_shared() -> None:
    """Its address is the same on all nodes, as that of VirtualBox or of a DPU's tmfifo."""
    own = ethernet("eth2", 400_000, "10.0.2.15/24")
    first, second, third = (
        offers_of([own, node(number)["eth0"]], "", lambda _: ()) for number in (1, 2, 3)
    )
    assert chosen(first, second, third) == ["eth0 10.0.0.1", "eth0 10.0.0.2", "eth0 10.0.0.3"]
    assert chosen(first[:1], second[:1]) == []
    assert chosen(first) == ["eth2 10.0.2.15"]


def test_a_network_counts_as_its_slowest_interface() -> None:
    slow = ethernet("eth1", 100, "10.1.0.2/24")
    second = offers_of([node(2)["eth0"], slow], "", lambda _: {"10.0.0.2"})
    assert chosen(offered(1, "eth0", "eth1"), second) == ["eth0 10.0.0.1", "eth0 10.0.0.2"]


def test_a_bridge_that_the_nodes_name_leads_to_is_used() -> None:
    bridge = Interface("br0", Kind.VIRTUAL, 0, ("10.0.0.1/24",))
    first = offers_of([bridge, node(1)["docker0"]], "", lambda _: {"10.0.0.1"})
    assert chosen(first, offered(2, "eth0", "docker0")) == ["br0 10.0.0.1", "eth0 10.0.0.2"]


def same_speed(speed: int) -> list[Interface]:
    return [ethernet("eth0", speed, "10.0.0.1/24"), ethernet("eth1", speed, "10.1.0.1/24")]


def test_where_speeds_do_not_tell_the_names_do() -> None:
    """First NAME-ib0, then the node's own name."""
    asked: list[str] = []

    def look_up(end: str) -> Collection[str]:
        asked.append(end)
        return {"": ["10.0.0.1"], "-ib0": ["10.1.0.1"]}.get(end, [])

    (first,) = choose([offers_of(same_speed(25_000), "", look_up)])
    assert (first.name, first.is_fast, asked) == ("eth1", True, ["", "-hsn0", "-ib0"])
    (first,) = choose([offers_of(same_speed(25_000), "", lambda end: [] if end else ["10.0.0.1"])])
    assert (first.name, first.is_fast, first.is_named) == ("eth0", False, True)


@pytest.mark.parametrize(
    "found",
    [
        [node(1)["eth0"]],
        [node(1)["eth0"], node(1)["eth1"]],
        [node(1)["eth0"], node(1)["ib0"]],
        [node(1)["docker0"]],
        same_speed(0),
    ],
    ids=["one", "two speeds", "two kinds", "none usable", "speeds not known"],
)
def test_other_names_are_looked_up_only_where_kind_and_speed_do_not_tell(
    found: Sequence[Interface],
) -> None:
    asked: list[str] = []

    def look_up(end: str) -> Collection[str]:
        asked.append(end)
        return ()

    offers_of(found, "", look_up)
    assert asked == [""]


@pytest.mark.parametrize(
    ("wanted", "name"), [("eth0", "eth0"), ("10.1.0.0/16", "eth1"), ("docker0", "docker0")]
)
def test_what_the_site_names_is_taken_whatever_else_is_there(wanted: str, name: str) -> None:
    assert [one.name for one in offered(1, *EVERY, wanted=wanted)] == [name]


@pytest.mark.parametrize("wanted", ["ib7", "eth9", "192.168.0.0/16", "usb0"])
def test_a_node_without_what_the_site_names_offers_nothing(wanted: str) -> None:
    assert offered(1, *EVERY, wanted=wanted) == []


def test_the_error_says_what_is_missing_and_what_to_do() -> None:
    end = (
        "by which other nodes can reach it; tell the administrator (interface in [launch] of "
        "stage.toml)"
    )
    assert isinstance(missing("ib7"), LaunchError)
    assert missing("ib7").message == f"this node has no interface ib7 with an address {end}"
    assert missing("10.1.0.0/16").message == f"this node has no address in 10.1.0.0/16 {end}"


def test_offers_travel_and_strange_ones_do_not() -> None:
    own = offered(1, *EVERY)
    assert OFFERS.decode(OFFERS.encode(own)) == own
    with pytest.raises(ValueError, match="the value of kind is not valid"):
        OFFERS.decode(OFFERS.encode(own).replace(b"Slingshot", b"token ring"))


def test_this_machine_offers_its_own_addresses() -> None:
    own = {one.partition("/")[0] for link in interfaces() for one in link.addresses}
    assert {one.host for one in offers("")} <= own
    assert offers("no-such-if") == []


NETWORKS = ("10.0.0.0/24", "10.1.0.0/24", "10.2.0.0/24")
OFFER = st.builds(
    Offer,
    name=st.sampled_from(["eth0", "ib0", "hsn0"]),
    kind=st.sampled_from(Kind),
    speed=st.sampled_from([0, 1_000, 100_000]),
    host=st.just(""),
    network=st.sampled_from(NETWORKS),
    is_fast=st.booleans(),
    is_named=st.booleans(),
)


@given(
    st.lists(st.lists(OFFER, max_size=4), min_size=1, max_size=5),
    st.sets(st.sampled_from(NETWORKS)),
)
def test_all_ranks_are_in_one_network_and_the_order_of_offers_does_not_count(
    drawn: list[list[Offer]], private: set[str]
) -> None:
    """In ``private`` networks, all nodes have the same address."""
    ranks = [
        [
            replace(one, host=f"{one.network} {0 if one.network in private else number}")
            for one in of_rank
        ]
        for number, of_rank in enumerate(drawn)
    ]
    found = choose(ranks)
    shared = set.intersection(*({one.network for one in offers} for offers in ranks))
    if len(ranks) > 1:
        shared -= private
    assert {one.network for one in found} <= shared
    if not shared:
        assert found == []
        return
    assert len({one.network for one in found}) == 1
    assert all(one in of_rank for one, of_rank in zip(found, ranks, strict=True))
    turned = choose([of_rank[::-1] for of_rank in ranks])
    assert [one.network for one in turned] == [one.network for one in found]
