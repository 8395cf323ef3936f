"""Who needs a file, who reads and who sends, for any surveys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.base.options import ITSELF, Mode, Options
from stager.rank.plan import (
    TransferPlan,
    joint_digest,
    make_plan,
    plan_item,
    plan_parts,
    settings_for,
    settings_to_send,
)
from stager.request.items import StageItem
from stager.source.description import Source, SourceFacts
from stager.source.endpoints import DEFAULT_REMOTE
from stager.store.validity import Reason, Survey
from stager.wire.layout import Settings


def survey(rank: int, *, current: bool) -> Survey:
    if current:
        return Survey(f"n{rank}", None, "digest")
    return Survey(f"n{rank}", Reason.ABSENT, "")


def surveys(current: list[bool]) -> list[Survey]:
    return [survey(rank, current=held) for rank, held in enumerate(current)]


WORLDS = st.lists(st.booleans(), min_size=1, max_size=12).map(surveys)


@pytest.mark.parametrize(
    ("current", "plan", "members"),
    [
        ([False], TransferPlan(9, (0,), (), (0,), True, ""), (0,)),
        ([True], TransferPlan(9, (), (0,), (0,), False, "digest"), (0,)),
        ([False] * 3, TransferPlan(9, (0, 1, 2), (), (0, 1), True, "", (2,)), (0, 1, 2)),
        ([True] * 3, TransferPlan(9, (), (0, 1, 2), (0,), False, "digest"), (0,)),
        ([False, True, False], TransferPlan(9, (0, 2), (1,), (1,), False, "digest"), (1, 0, 2)),
        ([False, True, True], TransferPlan(9, (0,), (1, 2), (1,), False, "digest"), (1, 0)),
        ([True, True, False], TransferPlan(9, (2,), (0, 1), (0,), False, "digest"), (0, 2)),
    ],
)
def test_a_plan_and_its_members(
    current: list[bool], plan: TransferPlan, members: tuple[int, ...]
) -> None:
    made = make_plan(9, surveys(current), [2])
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
@given(WORLDS, st.lists(st.integers(1, 20), min_size=1, max_size=3).map(sorted))
def test_the_members_are_the_senders_and_the_receivers_without_repeats(
    world: list[Survey], readers: list[int]
) -> None:
    plan = make_plan(9, world, readers)
    assert plan.members[: len(plan.senders)] == plan.senders
    assert sorted(plan.members) == sorted({*plan.senders, *plan.receivers})
    assert plan.senders == (plan.current[:1] or plan.receivers[: readers[-1]])
    assert plan.readers[-1] == len(plan.senders)
    assert set(plan.readers) == {min(count, len(plan.senders)) for count in readers}


@settings(max_examples=100, deadline=None)
@given(WORLDS, st.integers(0, 2**62))
def test_the_size_is_kept_and_changes_nothing_else(world: list[Survey], size: int) -> None:
    assert make_plan(size, world, [3]) == replace(make_plan(9, world, [3]), size=size)


FILE = Source(SourceFacts(size=9, mtime_ns=2, ctime_ns=3, inode=4), 0o644, 0, 9)
FOLDER = replace(FILE, files=1, listing="digest")


def item(**options: object) -> StageItem:
    return StageItem("/shared/x", "/nvme/x", "/nvme", Options(**options))  # type: ignore[arg-type]


def settled(
    source: str, size: int, *, readers: tuple[int, ...] = (), ranks: int = 20, **remote: int
) -> Settings:
    """The settings to stage a file of ``size`` bytes in a world of so many ``ranks``."""
    file = replace(FILE, facts=replace(FILE.facts, size=size))
    site = replace(DEFAULT_REMOTE, **remote)  # type: ignore[arg-type]
    return settings_for(
        replace(item(), source=source), file, Settings(readers=readers), site, ranks
    )


FILE_URL, LARGE = "s3://bucket/x", 64 << 20


@pytest.mark.parametrize(
    ("settings", "readers"),
    [
        (settled("/shared/x", LARGE - 1), (1,)),
        (settled("/shared/x", LARGE), (1, 4)),
        (settled("/shared/x", LARGE, ranks=3), (1, 3)),
        (settled("/shared/x", LARGE, limit=1), (1, 4)),  # it is for stores
        (settled("/shared/x", LARGE, readers=(6,)), (6,)),
        (settled(FILE_URL, LARGE - 1), (1,)),
        (settled(FILE_URL, LARGE), (4, 8)),  # more have no buffers for their requests
        (settled(FILE_URL, LARGE, requests=4), (4, 8, 16)),
        (settled(FILE_URL, LARGE, requests=4, ranks=10), (4, 8, 10)),
        (settled(FILE_URL, LARGE, ranks=4), (4,)),
        (settled(FILE_URL, LARGE, requests=64), (4,)),
        (settled(FILE_URL, LARGE, limit=1), (4,)),  # they share it
        (settled(FILE_URL, LARGE, readers=(10,)), (10,)),
        (settled("docker://registry/image:tag", LARGE), (1,)),
    ],
)
def test_auto_takes_more_readers_for_a_large_source(
    settings: Settings, readers: tuple[int, ...]
) -> None:
    assert settings.readers == readers


def test_an_unpacked_archive_is_not_sent_to_others() -> None:
    plan = make_plan(9, surveys([True, False]), [4], from_copies=False)
    assert plan == TransferPlan(9, (1,), (0,), (1,), True, "")
    plan = make_plan(9, surveys([True, True]), [4], from_copies=False)
    assert plan == TransferPlan(9, (), (0, 1), (0,), False, "digest")


@pytest.mark.parametrize("options", [Options(extract=True), Options(decompress=ITSELF)])
def test_what_is_unpacked_is_read_again_and_written_in_order(options: Options) -> None:
    source = Source(SourceFacts(9, 1, 1, 1), 0o644, 0, 9)
    item = StageItem("/shared/x.tar.gz", "/nvme/x", "/nvme", options)
    plan = plan_item(item, source, surveys([True, False]), [1])
    assert plan == TransferPlan(9, (1,), (0,), (1,), True, "")
    chosen = Settings(writers=4, readers=(3,))
    assert settings_for(item, source, chosen, DEFAULT_REMOTE, 3) == replace(chosen, writers=1)


def part(rank: int, split: str) -> Survey:
    """The survey of a node that has a part of ``split``, or lacks it."""
    survey_of = survey(rank, current=bool(split))
    return replace(survey_of, split=split)


def parts(*splits: str) -> list[Survey]:
    return [part(rank, split) for rank, split in enumerate(splits)]


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_nothing_moves_if_all_parts_of_one_split_are_current(nodes: int) -> None:
    ranks = tuple(range(nodes))
    plan = plan_parts(9, parts(*[f"{nodes}:a"] * nodes))
    digest = joint_digest(["digest"] * nodes)
    assert plan == TransferPlan(9, (), ranks, (0,), False, digest)
    assert not plan.is_sharded


@pytest.mark.parametrize(
    "splits",
    [
        ("", "", ""),
        ("3:a", "3:a", ""),
        ("", "3:a", "3:a"),
        ("3:a", "3:a", "3:b"),
        ("4:a", "4:a", "4:a"),
        ("2:a", "2:a", "2:a"),
        ("30:a", "30:a", "30:a"),
    ],
    ids=["none", "the last lacks it", "the first lacks it", "of two splits", "of more nodes",
         "of fewer nodes", "of many more nodes"],
)  # fmt: skip
def test_all_nodes_read_what_they_lack_if_a_part_of_the_split_is_missing(
    splits: tuple[str, ...],
) -> None:
    plan = plan_parts(9, parts(*splits))
    assert plan == TransferPlan(9, (0, 1, 2), (), (0, 1, 2), True, "", is_sharded=True)
    assert plan.members == (0, 1, 2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["", "2:a", "3:a", "3:b"]), min_size=1, max_size=5))
def test_parts_move_exactly_if_one_is_missing(splits: list[str]) -> None:
    plan = plan_parts(9, parts(*splits))
    whole = len(set(splits)) == 1 and splits[0].startswith(f"{len(splits)}:")
    assert (not plan.receivers, plan.is_sharded) == (whole, not whole)


def test_only_rank_0_reads_a_folder_and_an_archive_is_written_in_order() -> None:
    chosen = Settings(readers=(3,), writers=4)
    assert settings_for(item(), FILE, chosen, DEFAULT_REMOTE, 3) == chosen
    assert settings_for(item(), FOLDER, chosen, DEFAULT_REMOTE, 3) == replace(chosen, readers=(1,))
    assert settings_for(item(extract=True), FILE, chosen, DEFAULT_REMOTE, 3) == replace(
        chosen, writers=1
    )


@pytest.mark.parametrize(("readers", "limit"), [(1, 10), (3, 4), (10, 1), (11, 1)])
def test_the_ranks_that_read_share_the_limit(readers: int, limit: int) -> None:
    assert replace(DEFAULT_REMOTE, limit=10).shared_by(readers).limit == limit
    assert DEFAULT_REMOTE.shared_by(readers) == DEFAULT_REMOTE


@pytest.mark.parametrize(
    ("settings", "chunk", "depth"),
    [
        (settled(FILE_URL, 1000), 8 << 20, 16),
        (settled(FILE_URL, LARGE), 4 << 20, 64),
        (settled(FILE_URL, LARGE, readers=(1,)), 8 << 20, 16),
        (settled(FILE_URL, 1000, readers=(2,)), 4 << 20, 32),
        (settled(FILE_URL, LARGE, requests=64), 4 << 20, 64),
        (settled(FILE_URL, LARGE, requests=2, ranks=4), 4 << 20, 16),
        (settled(FILE_URL, LARGE, requests=2, limit=1), 4 << 20, 16),
        (settled(FILE_URL, 1000, readers=(1,), requests=1), 8 << 20, 2),
    ],
)
def test_all_readers_of_an_object_have_buffers_for_their_requests(
    settings: Settings, chunk: int, depth: int
) -> None:
    assert (settings.chunk, settings.depth) == (chunk, depth)


@pytest.mark.parametrize(
    ("memory", "readers", "depth"),
    [
        (16 << 20, (4, 8), 64),  # as much as the requests of the readers need
        (256 << 20, (4, 8), 64),
        (512 << 20, (4, 8, 16), 128),
    ],
)
def test_the_buffers_for_an_object_take_the_memory_that_the_site_gives(
    memory: int, readers: tuple[int, ...], depth: int
) -> None:
    chosen = Settings(chunk=2 << 20, depth=memory >> 21)
    file = replace(FILE, facts=replace(FILE.facts, size=LARGE))
    found = settings_for(replace(item(), source=FILE_URL), file, chosen, DEFAULT_REMOTE, 32)
    assert (found.chunk, found.readers, found.depth) == (4 << 20, readers, depth)


def test_one_thread_reads_a_copy_that_is_sent() -> None:
    settings = Settings(requests=8)
    from_source, from_copy = make_plan(9, surveys([False])), make_plan(9, surveys([True, False]))
    assert settings_to_send(settings, from_source) == settings
    assert settings_to_send(settings, from_copy) == replace(settings, requests=1)


def test_an_item_is_planned_by_its_options() -> None:
    world = surveys([True, False])
    assert plan_item(item(), FILE, world, [2]) == make_plan(9, world, [2])
    from_source = make_plan(9, world, [2], from_copies=False)
    assert plan_item(item(extract=True), FILE, world, [2]) == from_source
    assert plan_item(item(mode=Mode.SHARD), FOLDER, world, [2]) == plan_parts(9, world)
