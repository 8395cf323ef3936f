"""Who needs a file, who reads and who sends, for any surveys; and whose disk is too small."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.errors import Failure
from stager.plan import TransferPlan, make_plan, shortages
from stager.survey import Survey

ROOTS = ("/nvme", "/ssd")


def survey(rank: int, *, current: bool, free: int = 0) -> Survey:
    if current:
        return Survey(f"n{rank}", "", "digest", free)
    return Survey(f"n{rank}", "absent", "", free)


def surveys(current: list[bool]) -> list[Survey]:
    return [survey(rank, current=held) for rank, held in enumerate(current)]


WORLDS = st.lists(st.booleans(), min_size=1, max_size=12).map(surveys)


@pytest.mark.parametrize(
    ("current", "plan", "members"),
    [
        ([False], TransferPlan(9, (0,), (), (0,), True, ""), (0,)),
        ([True], TransferPlan(9, (), (0,), (0,), False, "digest"), (0,)),
        ([False] * 3, TransferPlan(9, (0, 1, 2), (), (0, 1), True, ""), (0, 1, 2)),
        ([True] * 3, TransferPlan(9, (), (0, 1, 2), (0,), False, "digest"), (0,)),
        ([False, True, False], TransferPlan(9, (0, 2), (1,), (1,), False, "digest"), (1, 0, 2)),
        ([False, True, True], TransferPlan(9, (0,), (1, 2), (1,), False, "digest"), (1, 0)),
        ([True, True, False], TransferPlan(9, (2,), (0, 1), (0,), False, "digest"), (0, 2)),
    ],
)
def test_a_plan_and_its_members(
    current: list[bool], plan: TransferPlan, members: tuple[int, ...]
) -> None:
    made = make_plan(9, surveys(current), readers=2)
    assert (made, made.members) == (plan, members)


@settings(max_examples=200, deadline=None)
@given(WORLDS)
def test_every_rank_that_is_not_current_receives_and_no_other(world: list[Survey]) -> None:
    plan = make_plan(9, world)
    assert [rank in plan.receivers for rank in range(len(world))] == [
        not answer.current for answer in world
    ]
    assert sorted(plan.receivers + plan.current) == list(range(len(world)))


@settings(max_examples=200, deadline=None)
@given(WORLDS)
def test_the_source_is_read_exactly_when_nobody_is_current(world: list[Survey]) -> None:
    plan = make_plan(9, world)
    assert plan.from_source == (not any(answer.current for answer in world))
    for sender in plan.senders:
        assert world[sender].current != plan.from_source
        assert plan.digest == world[sender].digest


@settings(max_examples=200, deadline=None)
@given(WORLDS, st.integers(0, 20))
def test_the_members_are_the_senders_and_the_receivers_without_repeats(
    world: list[Survey], readers: int
) -> None:
    plan = make_plan(9, world, readers)
    assert plan.members[: len(plan.senders)] == plan.senders
    assert sorted(plan.members) == sorted({*plan.senders, *plan.receivers})
    assert plan.senders == (plan.current[:1] or plan.receivers[: readers or 1])


@settings(max_examples=100, deadline=None)
@given(WORLDS, st.integers(0, 2**62))
def test_the_size_is_kept_and_changes_nothing_else(world: list[Survey], size: int) -> None:
    assert make_plan(size, world, 3) == replace(make_plan(9, world, 3), size=size)


@pytest.mark.parametrize(("size", "readers"), [(1, 1), ((64 << 20) - 1, 1), (64 << 20, 4)])
def test_auto_may_take_four_readers_where_a_file_is_worth_it(size: int, readers: int) -> None:
    assert len(make_plan(size, surveys([False] * 5)).senders) == readers


# room


def room(sizes: list[int], roots: list[str], current: list[list[bool]], free: int) -> list[Failure]:
    """The shortages where ``current[rank][i]`` says who has item i, and all roots are alike."""
    world = [
        [survey(rank, current=held, free=free) for held in row] for rank, row in enumerate(current)
    ]
    plans = [make_plan(size, [row[i] for row in world]) for i, size in enumerate(sizes)]
    return shortages(plans, world, roots, sizes)


def short(root: str, need: int, free: int, node: str) -> Failure:
    message = (
        f"{root}: {need} bytes are needed and {free} free, {need - free} too few; "
        "make room or ask for nodes with more"
    )
    return Failure(5, message, node)


def test_a_shortage_names_root_bytes_and_node() -> None:
    message = (
        "/nvme: 110 bytes are needed and 100 free, 10 too few; make room or ask for nodes with more"
    )
    assert room([110], ["/nvme"], [[False]], 100) == [Failure(5, message, "n0")]


def test_what_a_file_needs_on_the_disk_counts_and_not_its_size() -> None:
    """A file with holes needs less."""
    world = [[survey(0, current=False, free=100)] * 2]
    plans = [make_plan(size, [world[0][0]]) for size in (1000, 50)]
    assert shortages(plans, world, ["/nvme"] * 2, [60, 40]) == []
    assert shortages(plans, world, ["/nvme"] * 2, [60, 41]) == [short("/nvme", 101, 100, "n0")]


def test_a_file_that_just_fits_is_no_shortage() -> None:
    assert room([100], ["/nvme"], [[False], [False]], 100) == []


def test_an_empty_file_fits_on_a_full_disk() -> None:
    assert room([0], ["/nvme"], [[False]], 0) == []


def test_the_files_beneath_one_root_are_added_up() -> None:
    assert room([60, 50], ["/nvme", "/nvme"], [[False, False]], 100) == [
        short("/nvme", 110, 100, "n0")
    ]


def test_the_files_beneath_two_roots_are_not_added_up() -> None:
    assert room([60, 50], ["/nvme", "/ssd"], [[False, False]], 100) == []


def test_a_file_that_a_node_has_takes_no_room_there() -> None:
    current = [[True, False], [False, False], [True, True]]
    assert room([60, 50], ["/nvme", "/nvme"], current, 100) == [short("/nvme", 110, 100, "n1")]


def test_a_node_that_is_short_beneath_two_roots_fails_for_both() -> None:
    assert room([9, 8], ["/nvme", "/ssd"], [[False, False]], 1) == [
        short("/nvme", 9, 1, "n0"),
        short("/ssd", 8, 1, "n0"),
    ]


def test_every_node_that_is_short_fails() -> None:
    assert room([9], ["/nvme"], [[False], [True], [False]], 1) == [
        short("/nvme", 9, 1, "n0"),
        short("/nvme", 9, 1, "n2"),
    ]


def test_without_files_there_is_no_shortage() -> None:
    assert shortages([], [[], []], [], []) == []


@st.composite
def worlds_with_items(
    draw: st.DrawFn,
) -> tuple[list[int], list[str], list[list[bool]], list[dict[str, int]]]:
    """Sizes and roots of items, who has which, and the bytes free beneath each root of a node."""
    items, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 50), min_size=items, max_size=items))
    roots = draw(st.lists(st.sampled_from(ROOTS), min_size=items, max_size=items))
    row = st.lists(st.booleans(), min_size=items, max_size=items)
    current = draw(st.lists(row, min_size=ranks, max_size=ranks))
    disk = st.fixed_dictionaries({root: st.integers(0, 100) for root in ROOTS})
    return sizes, roots, current, draw(st.lists(disk, min_size=ranks, max_size=ranks))


@settings(max_examples=200, deadline=None)
@given(worlds_with_items())
def test_shortages_are_counted_for_each_node_and_root(
    world: tuple[list[int], list[str], list[list[bool]], list[dict[str, int]]],
) -> None:
    sizes, roots, current, free = world
    answers = [
        [
            survey(rank, current=held, free=free[rank][root])
            for held, root in zip(row, roots, strict=True)
        ]
        for rank, row in enumerate(current)
    ]
    plans = [make_plan(size, [row[i] for row in answers]) for i, size in enumerate(sizes)]
    expected = []
    for rank, row in enumerate(current):
        for root in ROOTS:
            lacking = [sizes[i] for i, held in enumerate(row) if not held and roots[i] == root]
            if sum(lacking) > free[rank][root]:
                expected.append(short(root, sum(lacking), free[rank][root], f"n{rank}"))
    found = shortages(plans, answers, roots, sizes)
    assert sorted(found, key=repr) == sorted(expected, key=repr)
