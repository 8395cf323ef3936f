"""Parts of a folder: which node has which file, and the list of that."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.base.errors import UsageError
from stager.tree.listing import Kind, Listing, Row
from stager.tree.shard import (
    balanced,
    by_number,
    list_row,
    list_text,
    part_of,
    split_name,
    with_hard_links,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Row(b"", Kind.FOLDER, 0o755)
#: The node of a row that is no file.
NO_NODE = -1

SIZES = st.lists(st.integers(0, 20) | st.integers(0, 2**40), max_size=30)
NODES = st.integers(1, 6)
#: Seeds of folders with so many small files that all nodes can have about as many bytes.
SEEDS = st.integers(0, 2**32)
#: The most by which the bytes of two nodes differ then, as a share of the mean.
SPREAD = 0.05


def files(sizes: Iterable[int]) -> Listing:
    """List a folder of files with those sizes; the first is in row 1."""
    rows = (Row(b"%06d" % number, Kind.FILE, 0o644, size) for number, size in enumerate(sizes))
    return Listing.of([ROOT, *rows])


def small_files(seed: int, count: int = 300) -> Listing:
    dice = random.Random(seed)
    return files(dice.randrange(1000) for _ in range(count))


def none_held(listing: Listing, nodes: int) -> list[bytes]:
    return [bytes(len(listing))] * nodes


def held_by(owners: Sequence[int], nodes: int) -> list[bytes]:
    """Return the marks of nodes that each have the files of which they are the owners."""
    return [bytes(owner == node for owner in owners) for node in range(nodes)]


def assign(listing: Listing, nodes: int) -> list[int]:
    """Return the owners among nodes that have nothing yet."""
    return list(balanced(listing, none_held(listing, nodes)))


def loads(listing: Listing, owners: Sequence[int], nodes: int) -> list[int]:
    """Return the bytes of each node."""
    found = Counter[int]()
    for size, owner in zip(listing.sizes, owners, strict=True):
        found[owner] += size
    return [found[node] for node in range(nodes)]


def spread(of: Sequence[int]) -> float:
    return (max(of) - min(of)) / (sum(of) / len(of))


def moved(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the rows whose files have another node than before."""
    return [row for row, (was, now) in enumerate(zip(before, after, strict=True)) if was != now]


@settings(max_examples=200)
@given(SIZES, NODES, st.data())
def test_each_file_is_assigned_to_one_node_whichever_nodes_have_it(
    sizes: list[int], nodes: int, data: st.DataObject
) -> None:
    listing = files(sizes)
    marks = st.binary(min_size=len(listing), max_size=len(listing))
    held = data.draw(st.lists(marks, min_size=nodes, max_size=nodes))
    owners = balanced(listing, held)
    assert owners[0] == NO_NODE
    assert all(0 <= owner < nodes for owner in owners[1:])
    assert balanced(listing, held) == owners


@settings(max_examples=50)
@given(SEEDS, NODES)
def test_of_many_small_files_each_node_has_about_as_many_bytes(seed: int, nodes: int) -> None:
    listing = small_files(seed)
    assert spread(loads(listing, assign(listing, nodes), nodes)) <= SPREAD


@settings(max_examples=50)
@given(SEEDS, NODES, st.floats(0, 1))
def test_the_bytes_are_even_whichever_nodes_had_the_files_before(
    seed: int, nodes: int, share: float
) -> None:
    listing = small_files(seed)
    dice = random.Random(seed)
    held = [bytes(dice.random() < share for _ in listing.paths) for _ in range(nodes)]
    owners = balanced(listing, held)
    assert spread(loads(listing, owners, nodes)) <= SPREAD
    assert list(balanced(listing, held_by(owners, nodes))) == list(owners)


@settings(max_examples=200)
@given(SIZES, NODES)
def test_files_stay_where_they_are_when_they_are_assigned_again(
    sizes: list[int], nodes: int
) -> None:
    listing = files(sizes)
    owners = assign(listing, nodes)
    assert list(balanced(listing, held_by(owners, nodes))) == owners


@settings(max_examples=50)
@given(SEEDS, st.integers(2, 6), st.data())
def test_when_a_node_leaves_the_files_of_the_others_stay(
    seed: int, nodes: int, data: st.DataObject
) -> None:
    listing = small_files(seed)
    before = assign(listing, nodes)
    gone = data.draw(st.sampled_from(range(nodes)))
    held = held_by(before, nodes)
    del held[gone]
    after = balanced(listing, held)
    for was, now in zip(before, after, strict=True):
        # The nodes after the one that left have other numbers now.
        assert was == gone or now == was - (was > gone)
    assert spread(loads(listing, after, nodes - 1)) <= SPREAD


def test_when_four_nodes_become_three_only_the_files_of_the_fourth_move() -> None:
    listing = small_files(1)
    before = assign(listing, 4)
    after = balanced(listing, held_by(before, 4)[:3])
    assert moved(before, after) == [row for row, owner in enumerate(before) if owner == 3]


@settings(max_examples=50)
@given(SEEDS, NODES)
def test_a_new_node_gets_its_share_and_nothing_else_moves(seed: int, nodes: int) -> None:
    listing = small_files(seed)
    before = assign(listing, nodes)
    after = balanced(listing, [*held_by(before, nodes), bytes(len(listing))])
    rows = moved(before, after)
    assert {after[row] for row in rows} == {nodes}
    share = listing.size / (nodes + 1)
    assert 0.9 * share <= sum(listing.sizes[row] for row in rows) <= 1.05 * share
    assert spread(loads(listing, after, nodes + 1)) <= SPREAD


@settings(max_examples=50)
@given(SEEDS, NODES)
def test_nodes_that_all_have_the_whole_folder_keep_a_part_each(seed: int, nodes: int) -> None:
    listing = small_files(seed)
    owners = balanced(listing, [b"\1" * len(listing)] * nodes)
    assert spread(loads(listing, owners, nodes)) <= SPREAD


def test_a_file_that_several_nodes_have_stays_with_one_of_them() -> None:
    listing = small_files(2)
    held = none_held(listing, 4)
    held[1] = held[3] = b"\1" * 101 + bytes(len(listing) - 101)
    owners = balanced(listing, held)
    assert set(owners[1:101]) == {1, 3}


def test_files_of_a_single_node_move_until_all_have_as_much() -> None:
    listing = small_files(3)
    owners = balanced(listing, [b"\1" * len(listing), *none_held(listing, 3)])
    assert spread(loads(listing, owners, 4)) <= SPREAD
    # No more than that: three quarters.
    gone = sum(size for size, owner in zip(listing.sizes, owners, strict=True) if owner > 0)
    assert gone <= 0.77 * listing.size


def test_new_nodes_get_files_though_one_file_is_larger_than_an_even_share() -> None:
    listing = files([20_000, *[200] * 16])
    before = assign(listing, 2)
    assert loads(listing, before, 2) == [20_000, 3200]
    after = balanced(listing, [*held_by(before, 2), *none_held(listing, 2)])
    found = loads(listing, after, 4)
    assert found[0] == 20_000
    assert min(found) >= 1000
    assert list(balanced(listing, held_by(after, 4))) == list(after)


@pytest.mark.parametrize(
    ("sizes", "nodes", "holders"),
    [
        ([263, 102, 1112, 261, 398, 1159], 3, [0] * 6),
        ([77228, 486, 200, 200, 200, 1221, 340], 5, [1, 2, 1, 1, 0, 2, 2]),
    ],
)
def test_a_second_time_no_file_moves(sizes: list[int], nodes: int, holders: list[int]) -> None:
    listing = files(sizes)
    owners = balanced(listing, held_by([NO_NODE, *holders], nodes))
    assert list(balanced(listing, held_by(owners, nodes))) == list(owners)


@settings(max_examples=200)
@given(SIZES, NODES, st.data())
def test_files_stay_whichever_nodes_had_them_first(
    sizes: list[int], nodes: int, data: st.DataObject
) -> None:
    listing = files(sizes)
    marks = st.binary(min_size=len(listing), max_size=len(listing))
    owners = balanced(listing, data.draw(st.lists(marks, min_size=nodes, max_size=nodes)))
    assert list(balanced(listing, held_by(owners, nodes))) == list(owners)


def test_beside_a_huge_file_no_file_moves_for_a_little_more_evenness() -> None:
    listing = files([20_000, *[200] * 16])
    before = [NO_NODE, 0, *[1] * 4, *[2] * 8, *[3] * 4]
    assert list(balanced(listing, held_by(before, 4))) == before


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 10, 100])
def test_empty_files_are_assigned_evenly_by_number(count: int, nodes: int) -> None:
    found = Counter(assign(files([0] * count), nodes)[1:])
    numbers = [found[node] for node in range(nodes)]
    assert sum(numbers) == count
    assert max(numbers) - min(numbers) <= 1


def test_empty_files_beside_others_are_assigned_evenly_too() -> None:
    listing = files([0] * 400 + [1000] * 400)
    owners = assign(listing, 4)
    for some in (owners[1:401], owners[401:]):
        assert Counter(some) == dict.fromkeys(range(4), 100)


def test_one_huge_file_is_alone_on_its_node_and_the_others_share_the_rest() -> None:
    listing = files([1 << 40] + [1000] * 300)
    owners = assign(listing, 4)
    huge = owners[1]
    assert huge not in owners[2:]
    rest = Counter(owners[2:])
    assert sorted(rest.values()) == [100, 100, 100]


def test_one_huge_file_stays_where_it_is() -> None:
    listing = files([1 << 40] + [1000] * 300)
    owners = balanced(listing, [bytes(len(listing)), b"\1" * len(listing), bytes(len(listing))])
    assert owners[1] == 1


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_folder_without_files_has_no_owners(nodes: int) -> None:
    listing = Listing.of([ROOT, Row(b"folder", Kind.FOLDER), Row(b"link", Kind.LINK, target=b"x")])
    assert assign(listing, nodes) == [NO_NODE] * 3


def test_files_fewer_than_nodes_are_on_as_many_nodes() -> None:
    assert sorted(assign(files([5, 6, 7]), 6)[1:]) == [0, 1, 2]


def tree(*paths: str) -> Listing:
    return Listing.of([ROOT, *(Row(path.encode(), Kind.FILE, 0o644, 1) for path in paths)])


def numbered(pattern: str, path: str, nodes: int) -> int:
    """Return the node of the file at the ``path``."""
    _, owner = by_number(tree(path), "/data/set", pattern, nodes)
    return owner


@given(st.integers(0, 10**12), st.integers(0, 5), NODES)
def test_the_node_is_the_number_modulo_the_nodes(number: int, zeros: int, nodes: int) -> None:
    path = f"part-{'0' * zeros}{number}.tar"
    assert numbered("part-{n}.*", path, nodes) == number % nodes


@pytest.mark.parametrize(
    ("pattern", "path", "number"),
    [
        ("part-{n}.*", "part-12.tar", 12),
        ("part-{n}.*", "deep/er/part-12.tar", 12),
        ("part-{n}", "part-007", 7),
        ("/part-{n}", "part-8", 8),
        ("rank{n}/", "rank3/a/file99", 3),
        ("rank{n}/", "run7/rank03/file99", 3),
        ("rank{n}/", "rank4/rank5/file", 5),
        ("/rank{n}/", "rank4/rank5/file", 4),
        ("/rank{n}", "rank4/in/it", 4),
        ("{n}/**", "6/a/b", 6),
        ("**/{n}*", "a/12b34", 12),
        ("{n}*", "12", 12),
        ("*{n}*", "a12b34c", 34),
        ("*-{n}-of-*", "x-00031-of-00064", 31),
        ("a.{n}", "a.5", 5),
    ],
)
def test_the_number_is_where_the_pattern_has_it(pattern: str, path: str, number: int) -> None:
    assert numbered(pattern, path, 1000) == number


def test_files_of_one_number_are_together_and_other_rows_have_no_node() -> None:
    rows = [Row(b"0", Kind.FOLDER), Row(b"1", Kind.FOLDER), Row(b"1/link", Kind.LINK, target=b"x")]
    paths = [b"0/a", b"0/b", b"1/a", b"1/z"]
    listing = Listing.of([ROOT, *rows, *(Row(path, Kind.FILE) for path in paths)])
    owners = dict(zip(listing.paths, by_number(listing, "/data", "{n}/", 2), strict=True))
    assert owners == {
        b"": NO_NODE, b"0": NO_NODE, b"0/a": 0, b"0/b": 0,
        b"1": NO_NODE, b"1/a": 1, b"1/link": NO_NODE, b"1/z": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("part-{n}.*", "readme"),
        ("part-{n}.*", "part-.tar"),
        ("part-{n}.*", "part-a1.tar"),
        ("part-{n}", "part-1.tar"),
        ("/part-{n}", "in/part-1"),
        ("rank{n}/", "rank1"),
        ("{n}0", "10"),
        ("{n}", "\N{ARABIC-INDIC DIGIT THREE}"),
    ],
)
def test_a_file_that_does_not_match_is_refused(pattern: str, path: str) -> None:
    with pytest.raises(UsageError) as caught:
        by_number(tree(path), "/data/set", pattern, 4)
    assert str(caught.value) == (
        f"/data/set/{path} does not match by={pattern}; leave it out by exclude="
    )


def test_a_folder_of_any_name_matches() -> None:
    rows = [ROOT, Row(b"a\nb", Kind.FOLDER), Row(b"a\nb/part-6", Kind.FILE)]
    assert by_number(Listing.of(rows), "/data", "part-{n}", 4)[2] == 2


def test_a_file_of_any_name_that_does_not_match_is_named() -> None:
    listing = Listing.of([ROOT, Row(b"\xff", Kind.FILE)])
    with pytest.raises(UsageError) as caught:
        by_number(listing, "/data", "{n}", 4)
    assert str(caught.value) == "/data/\\xff does not match by={n}; leave it out by exclude="


#: The rows of a folder with a hard link, each with its node.
ROWS = {
    Row(b"", Kind.FOLDER): NO_NODE,
    Row(b"a", Kind.FOLDER): NO_NODE,
    Row(b"a/first", Kind.FILE, size=5): 0,
    Row(b"a/link", Kind.LINK, target=b"first"): NO_NODE,
    Row(b"b", Kind.FILE, size=7): 1,
    Row(b"empty", Kind.FILE): 2,
    Row(b"z", Kind.HARD_LINK, target=b"b"): 1,
}
LISTING = Listing.of(ROWS)
OWNERS = list(ROWS.values())


def with_owners(listing: Listing, of: Mapping[bytes, int]) -> dict[bytes, int]:
    """Return the nodes of all paths, given those of the files."""
    owners = balanced(listing, none_held(listing, 1))
    for row in listing.rows(Kind.FILE):
        owners[row] = of[listing.paths[row]]
    return dict(zip(listing.paths, with_hard_links(listing, owners), strict=True))


def test_a_hard_link_is_on_the_node_of_its_file() -> None:
    owners = with_owners(LISTING, {b"a/first": 0, b"b": 3, b"empty": 2})
    assert owners == {
        b"": NO_NODE, b"a": NO_NODE, b"a/first": 0, b"a/link": NO_NODE, b"b": 3, b"empty": 2,
        b"z": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("node", "paths"),
    [
        (0, [b"", b"a", b"a/first", b"a/link"]),
        (1, [b"", b"a", b"a/link", b"b", b"z"]),
        (2, [b"", b"a", b"a/link", b"empty"]),
        (3, [b"", b"a", b"a/link"]),
    ],
)
def test_a_part_has_its_files_with_their_hard_links_and_all_folders_and_links(
    node: int, paths: list[bytes]
) -> None:
    assert [LISTING.paths[row] for row in part_of(LISTING, OWNERS, node)] == paths


def test_the_list_names_node_bytes_and_path_of_each_file() -> None:
    listing = Listing.of(row for row in ROWS if row.kind is not Kind.HARD_LINK)
    assert list_text(listing, OWNERS[:-1], ["n1", "n2", "n3"]) == (
        b"n1\t5\ta/first\nn2\t7\tb\nn3\t0\tempty\n"
    )


def test_the_list_has_hard_links_too() -> None:
    lines = list_text(LISTING, OWNERS, ["n1", "n2", "n3"]).splitlines()
    fields = [line.split(b"\t") for line in lines]
    assert [(node, path) for node, _, path in fields] == [
        (b"n1", b"a/first"), (b"n2", b"b"), (b"n3", b"empty"), (b"n2", b"z"),
    ]  # fmt: skip


def test_the_list_of_no_files_is_empty() -> None:
    assert list_text(Listing.of([ROOT]), [NO_NODE], ["n1"]) == b""


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (b"a b", b"a b"),
        (b"a\tb", b"a\\tb"),
        (b"a\nb", b"a\\nb"),
        (b"a\\b", b"a\\\\b"),
        (b"a\\n\n\\", b"a\\\\n\\n\\\\"),
        (b"\xff\r", b"\xff\\r"),
    ],
)
def test_characters_that_would_end_a_path_are_escaped(path: bytes, text: bytes) -> None:
    listing = Listing.of([ROOT, Row(path, Kind.FILE, size=3)])
    assert list_text(listing, [NO_NODE, 0], ["n1"]) == b"n1\t3\t" + text + b"\n"


def unescaped(text: bytes) -> bytes:
    """Return the path that a reader of the list gets."""
    marked = text.replace(b"\\\\", b"\0")
    return marked.replace(b"\\t", b"\t").replace(b"\\n", b"\n").replace(b"\0", b"\\")


NAMES = st.lists(st.sampled_from([b"\\", b"\t", b"\n", b"t", b"n", b"\xff"]), min_size=1).map(
    b"".join
)


@given(st.lists(NAMES, unique=True))
def test_a_reader_of_the_list_gets_any_paths_back(names: list[bytes]) -> None:
    listing = Listing.of([ROOT, *(Row(name, Kind.FILE) for name in names)])
    text = list_text(listing, [NO_NODE, *[0] * len(names)], ["n1"])
    found = [line.split(b"\t") for line in text.split(b"\n")[:-1]]
    assert [unescaped(path) for _, _, path in found] == sorted(names)


def test_a_split_is_identified_by_its_nodes_and_its_list() -> None:
    assert split_name(b"", 4) == "4:99aa06d3014798d86001c324468d497f"
    assert len({split_name(text, nodes) for text in (b"", b"n1\t0\ta\n") for nodes in (1, 2)}) == 4


@pytest.mark.parametrize(("top", "mode"), [(0o700, 0o400), (0o750, 0o440), (0o755, 0o444)])
def test_the_list_is_for_those_who_may_list_the_folder(top: int, mode: int) -> None:
    folder = Listing.of([Row(b"", Kind.FOLDER, top, group=6), Row(b"file", Kind.FILE, 0o644)])
    row = list_row(b"n1\t5\ta\n", 7, folder)
    assert row == Row(b".stage-shards.tsv", Kind.FILE, mode, 7, 7, group=6)
