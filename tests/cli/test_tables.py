"""The tables that `stagectl status` prints."""

from __future__ import annotations

import pytest

from stager.cli.tables import (
    FILE_HEADERS,
    FILE_HEADERS_WITH_BAR,
    HEADERS,
    USER_HEADERS,
    age_text,
    file_rows,
    missing,
    room_lines,
    rows,
    silent_lines,
    table,
    total_line,
    unread_lines,
    user_rows,
    with_shared,
)
from stager.cli.terminal import Blocks
from stager.store.states import DiskRoom, Entry, NodeStatus, Unread
from tests.support.entries import ENTRY

HOUR_LATER = 1_000_000.0 + 3600 + 59


def holds(*entries: Entry) -> NodeStatus:
    return NodeStatus(list(entries))


def shown(
    nodes: dict[str, NodeStatus], now: float = HOUR_LATER, *, whole_job: bool = False
) -> list[str]:
    return list(table(HEADERS, rows(nodes, now, whole_job=whole_job)))


def test_equal_rows_are_folded_over_nodes_and_others_are_not() -> None:
    nodes = {f"n{number}": holds(ENTRY) for number in range(1, 157)}
    nodes["n7"] = holds(ENTRY._replace(state="outdated"))
    nodes["n9"] = holds(ENTRY._replace(pinned=True))
    assert shown(nodes) == [
        f"{'NODE':<17}{'DST':<19}SIZE  STAGED   STATE     KEPT    SOURCE            LAST JOB",
        "n[1-6,8,10-156]  /nvme/img.sqsh  3.0 MiB  1 h ago  ready     -       /shared/img.sqsh  17",
        "n7               /nvme/img.sqsh  3.0 MiB  1 h ago  outdated  -       /shared/img.sqsh  17",
        "n9               /nvme/img.sqsh  3.0 MiB  1 h ago  ready     pinned  /shared/img.sqsh  17",
    ]


def test_nodes_of_a_job_that_lack_a_file_have_their_own_row() -> None:
    other = ENTRY._replace(destination="/nvme/b", size=10, used_by_job=0)
    root_s = ENTRY._replace(destination="/site/a", shared=True)
    nodes = {"n1": holds(ENTRY, other, root_s), "n2": holds(ENTRY), "n3": holds()}
    expected = [
        "NODE    DST                SIZE  STAGED   STATE    KEPT  SOURCE            LAST JOB",
        "n1      /nvme/b            10 B  1 h ago  ready    -     /shared/img.sqsh  -",
        "n[2-3]  /nvme/b            10 B  -        missing  -     /shared/img.sqsh  -",
        "n[1-2]  /nvme/img.sqsh  3.0 MiB  1 h ago  ready    -     /shared/img.sqsh  17",
        "n3      /nvme/img.sqsh  3.0 MiB  -        missing  -     /shared/img.sqsh  -",
        "n1      /site/a         3.0 MiB  1 h ago  ready    -     /shared/img.sqsh  17",
    ]
    assert shown(nodes, whole_job=True) == expected
    present = [line for line in expected if "missing" not in line]
    assert [line.split() for line in shown(nodes)] == [line.split() for line in present]
    assert missing(nodes) == {"/nvme/b": ["n2", "n3"], "/nvme/img.sqsh": ["n3"]}
    assert missing({}) == {}


@pytest.mark.parametrize(
    ("staged", "text"),
    [
        ([1_000_000, 1_000_009], "1 h ago"),  # one transfer, though the hour lies between
        ([1_003_650, 1_003_659], "9 s ago"),
        ([1_000_000, 1_003_600], "59 s to 1 h ago"),
        ([999_000, 1_000_000], "1 h ago"),
        ([1_999_999], "0 s ago"),  # by a clock that is ahead
    ],
)
def test_the_age_of_folded_rows(staged: list[int], text: str) -> None:
    nodes = {f"n{number}": holds(ENTRY._replace(staged_at=at)) for number, at in enumerate(staged)}
    [row] = rows(nodes, HOUR_LATER, whole_job=False)
    assert row[3] == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (86399, "23 h"), (2e5, "2 d")],
)
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "-"),
        ({"pinned": True}, "pinned"),
        ({"jobs": [17]}, "job 17"),
        ({"jobs": [17, 18]}, "jobs 17,18"),
        ({"lifetime": "job"}, "-"),
        ({"lifetime": "job", "jobs": [17]}, "job 17"),
        ({"lifetime": "job", "pinned": True}, "pinned"),
        ({"pinned": True, "jobs": [17]}, "pinned, job 17"),
    ],
)
def test_why_a_copy_is_kept(changes: dict[str, object], text: str) -> None:
    nodes = {"n1": holds(ENTRY._replace(**changes))}  # type: ignore[arg-type]
    [row] = rows(nodes, HOUR_LATER, whole_job=False)
    assert row[5] == text


def test_what_comes_from_records_is_printed_on_one_line() -> None:
    entry = ENTRY._replace(destination="/nvme/a\n\x1b[2J", source="/caf\udce9")
    [row] = rows({"n1": holds(entry)}, HOUR_LATER, whole_job=False)
    assert (row[1], row[6]) == ("/nvme/a??[2J", "/caf\\xe9")


def test_by_file_counts_nodes_by_state() -> None:
    larger = ENTRY._replace(size=5 << 20, state="outdated", source="/other", pinned=True)
    nodes = {"n1": holds(ENTRY), "n2": holds(ENTRY), "n3": holds(larger), "n4": holds()}
    assert file_rows(nodes, whole_job=True) == [
        (
            "/nvme/img.sqsh", "3.0 MiB to 5.0 MiB", "3", "2 ready, 1 outdated, 1 missing",
            "- or pinned", "/shared/img.sqsh or /other",
        )
    ]  # fmt: skip
    assert len(file_rows(nodes, whole_job=True)[0]) == len(FILE_HEADERS)
    assert file_rows(nodes, whole_job=False)[0][3] == "2 ready, 1 outdated"


def test_by_file_a_bar_counts_the_nodes_where_the_file_still_is() -> None:
    nodes = {
        "n1": holds(ENTRY, ENTRY._replace(destination="/nvme/b")),
        "n2": holds(ENTRY),
        "n3": holds(ENTRY._replace(state="missing")),
        "n4": holds(ENTRY._replace(state="outdated")),
    }
    found, source = file_rows(nodes, whole_job=True, blocks=Blocks("#", ".")), ENTRY.source
    assert list(table(FILE_HEADERS_WITH_BAR, found)) == [
        f"{'DST':<19}SIZE  ON NODES         {'STATE':<32}KEPT  SOURCE",
        f"/nvme/b         3.0 MiB  ##...... 1 of 4  3 missing, 1 ready              -     {source}",
        f"/nvme/img.sqsh  3.0 MiB  ######.. 3 of 4  2 ready, 1 missing, 1 outdated  -     {source}",
    ]


def test_by_user_sums_files_folders_and_bytes() -> None:
    bob = ENTRY._replace(user=1001, size=10)
    folder = ENTRY._replace(destination="/nvme/set", files=2, folder=True)
    nodes = {
        "n1": holds(ENTRY, bob, folder),
        "n2": holds(ENTRY, ENTRY._replace(destination="/nvme/b"), folder._replace(files=0)),
    }
    names = {1000: "alice", 1001: "bob"}
    assert list(table(USER_HEADERS, user_rows(nodes, names.__getitem__))) == [
        "USER   FILES  FOLDERS  COPIES      SIZE  NODES",
        "alice      2        1       5  15.0 MiB  n[1-2]",
        "bob        1        0       1      10 B  n1",
    ]


def test_totals() -> None:
    other = ENTRY._replace(destination="/nvme/b", size=1 << 20)
    assert total_line({"n1": holds(ENTRY)}) == "1 file, 3.0 MiB in all"
    nodes = {"n1": holds(ENTRY, other), "n2": holds(ENTRY)}
    assert total_line(nodes) == "2 files, 3 copies, 7.0 MiB in all"
    assert total_line({}) == "0 files, 0 B in all"
    gone = {"n1": holds(ENTRY), "n2": holds(ENTRY._replace(state="missing"))}
    assert total_line(gone) == "1 file, 1 copy, 3.0 MiB in all"
    assert user_rows(gone, str) == user_rows({"n1": holds(ENTRY)}, str)


def test_the_totals_count_folders_apart() -> None:
    folder = ENTRY._replace(destination="/nvme/set", files=2, folder=True)
    nodes = {"n1": holds(folder), "n2": holds(folder._replace(files=0))}
    assert total_line(nodes) == "1 folder, 2 copies, 6.0 MiB in all"
    nodes["n3"] = holds(ENTRY, folder._replace(destination="/nvme/other"))
    assert total_line(nodes) == "1 file and 2 folders, 4 copies, 12.0 MiB in all"


def test_free_space_is_shown_for_each_root_from_least_to_most() -> None:
    nodes = {
        "n1": NodeStatus(rooms=[DiskRoom("/nvme", 1 << 30, 4 << 30), DiskRoom("/a", 5, 10)]),
        "n2": NodeStatus(rooms=[DiskRoom("/nvme", 3 << 30, 4 << 30)]),
    }
    assert room_lines(nodes) == [
        "/nvme: 1.0 GiB to 3.0 GiB free of 4.0 GiB on n[1-2]", "/a: 5 B free of 10 B on n1",
    ]  # fmt: skip


def test_records_that_cannot_be_read_are_counted_by_node() -> None:
    one, two = Unread("/nvme/.slurm-stage/5001/records/K.json", "version 3\n"), Unread("/z", "why")
    nodes = {
        "n1": NodeStatus(),
        "n2": NodeStatus(unread=[one]),
        "n3": NodeStatus(unread=[two, one]),
        "n4": NodeStatus(unread=[Unread("/nvme/.slurm-stage/5001", "Input/output error", True)]),
    }
    path = "/nvme/.slurm-stage/5001/records/K.json: version 3?"
    one_copy = (
        "1 record cannot be read, so its copy, if there is one, is not listed; its user can stage "
        "it again (if it is a folder, first delete that folder). The record"
    )
    two_copies = (
        "2 records cannot be read, so their copies, if there are any, are not listed; their users "
        "can stage them again (first delete those that are folders). One of the records"
    )
    assert unread_lines(nodes) == [
        f"n2: {one_copy}: {path}",
        f"n3: {two_copies}: {path}",
        (
            "n4: copies are not listed, because the folder of their records cannot be read: "
            "/nvme/.slurm-stage/5001: Input/output error"
        ),
    ]


def test_a_table_may_have_ten_thousand_rows() -> None:
    entries = [ENTRY._replace(destination=f"/nvme/{number}") for number in range(10_000)]
    assert len(shown({"n1": holds(*entries)})) == 10_001


#: 78 columns wide.
NARROW_HEADERS = ("NODE", "DST", "SIZE", "SOURCE")
NARROW = [
    ("n[1-4]", "/nvme/alice/models/img.sqsh", "3.0 MiB", "/shared/projects/models/img.sqsh"),
    ("n5", "/nvme/a", "10 B", "/shared/a"),
]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            78,
            [
                f"NODE    {'DST':<32}SIZE  SOURCE",
                "n[1-4]  /nvme/alice/models/img.sqsh  3.0 MiB  /shared/projects/models/img.sqsh",
                f"n5      {'/nvme/a':<32}10 B  /shared/a",
            ],
        ),
        (
            67,
            [
                f"NODE    {'DST':<29}SIZE  SOURCE",
                "n[1-4]  /nvme/a…/models/img.sqsh  3.0 MiB  /shared…/models/img.sqsh",
                f"n5      {'/nvme/a':<29}10 B  /shared/a",
            ],
        ),
        (
            40,
            [
                f"NODE    {'DST':<28}SIZE", "    SOURCE",
                "n[1-4]  /nvme/a…models/img.sqsh  3.0 MiB", "    /shared/projects/models/img.sqsh",
                f"n5      {'/nvme/a':<28}10 B", "    /shared/a",
            ],
        ),
        (
            24,
            [
                "NODE    n[1-4]", "DST     /nvme/alice/mode", "        ls/img.sqsh",
                "SIZE    3.0 MiB", "SOURCE  /shared/projects", "        /models/img.sqsh", "",
                "NODE    n5", "DST     /nvme/a", "SIZE    10 B", "SOURCE  /shared/a",
            ],
        ),
    ],
    ids=["as it is", "less of paths", "sources below", "blocks"],
)  # fmt: skip
def test_a_table_fits_the_terminal(width: int, lines: list[str]) -> None:
    found = list(table(NARROW_HEADERS, NARROW, width))
    assert found == lines
    assert max(map(len, found)) <= width


def test_wide_characters_take_two_columns() -> None:
    assert list(table(("DST", "SIZE"), [("/nvme/数据", "1 B"), ("/nvme/a", "10 B")])) == [
        "DST         SIZE", "/nvme/数据   1 B", "/nvme/a     10 B",
    ]  # fmt: skip


def test_a_colour_takes_no_room() -> None:
    found = table(("A", "B"), [("a", "b"), ("long", "b")], paint=lambda _, cell: f"<{cell}>")
    assert list(found) == ["<A>     <B>", "<a>     <b>", "<long>  <b>"]


def test_users_who_did_not_answer_are_named_with_their_nodes() -> None:
    nodes = {"n1": NodeStatus(silent=[5001, 5002]), "n2": NodeStatus()}
    message = (
        "n1: the copies of u5001, u5002 are not listed: a process that looks at them as this user "
        "did not answer in time; look for a filesystem of that user that does not answer, or for a "
        "process of that user that stops it"
    )
    assert silent_lines(nodes, lambda uid: f"u{uid}") == [message]


def test_what_the_store_has_is_named_by_its_source_and_missing_nowhere() -> None:
    path = "/local/.slurm-stage/1000/store/{:032x}/img.sqsh"
    one, other = (
        ENTRY._replace(destination=path.format(number), store=True, jobs=jobs)
        for number, jobs in ((1, [12, 13]), (2, []))
    )
    nodes = {"n1": holds(one, other), "n2": holds(one)}
    assert shown(nodes, whole_job=True) == [
        "NODE    DST         SIZE  STAGED   STATE  KEPT        SOURCE            LAST JOB",
        "n[1-2]  (store)  3.0 MiB  1 h ago  ready  jobs 12,13  /shared/img.sqsh  17",
        "n1      (store)  3.0 MiB  1 h ago  ready  -           /shared/img.sqsh  17",
    ]
    assert [row[:3] for row in file_rows(nodes, whole_job=True)] == [
        ("(store)", "3.0 MiB", "2"),
        ("(store)", "3.0 MiB", "1"),
    ]
    assert missing(nodes) == {}


def test_a_copy_that_all_nodes_see_is_one_row() -> None:
    shared, own = ENTRY._replace(cache="1a"), ENTRY._replace(destination="/nvme/own", cache="2b")
    other = own._replace(cache="3c")
    nodes = with_shared({"n1": holds(shared, own), "n2": holds(shared, other)})
    assert [row[:2] for row in rows(nodes, 1_000_000, whole_job=True)] == [
        ("shared", "/nvme/img.sqsh"),
        ("n[1-2]", "/nvme/own"),
    ]
    found = file_rows(nodes, whole_job=True)
    assert [(row[0], row[2], row[3]) for row in found] == [
        ("/nvme/img.sqsh", "shared", "1 ready"),
        ("/nvme/own", "2", "2 ready"),
    ]
    assert user_rows(nodes, str)[0][3:] == ("3", "9.0 MiB", "shared, n[1-2]")
    assert total_line(nodes) == "2 files, 3 copies, 9.0 MiB in all"
    alone = {"n1": holds(shared)}
    assert with_shared(alone) is alone
