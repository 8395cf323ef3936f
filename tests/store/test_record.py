"""A record is read back as it was written, and whatever was done to its text, it is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stager.fs.files import CopyFacts
from stager.source.description import SourceFacts
from stager.store.record import VERSION, Record, TornError, TreeFacts, is_ours

if TYPE_CHECKING:
    from pathlib import Path

RECORD = Record(
    version=8,
    source="/data/img é",
    destination="/nvme/img",
    source_facts=SourceFacts(size=10, mtime_ns=-20, ctime_ns=30, inode=40, revision="7"),
    copy_facts=CopyFacts(size=10, mtime_ns=-20, inode=50, owner=60),
    digest="00112233445566778899aabbccddeeff",
    staged_at=70,
    used_at=80,
    used_by_job=90,
    lifetime="cache",
    pinned=False,
    made="decompressed",
    share="group",
    tree=TreeFacts(
        files=100,
        allocated=110,
        source_digest="0" * 32,
        table_digest="f" * 32,
        relocation="no",
        note="note: it is short",
        split="4:0123456789abcdef0123456789abcdef",
        by="part-{n}.*",
    ),
)

TREE = RECORD.tree
assert TREE is not None

#: The file of RECORD, which later versions must still read or know for another version's.
TEXT = """{
 "version": 8,
 "source": "/data/img \\u00e9",
 "destination": "/nvme/img",
 "source_facts": {
  "size": 10,
  "mtime_ns": -20,
  "ctime_ns": 30,
  "inode": 40,
  "revision": "7"
 },
 "copy_facts": {
  "size": 10,
  "mtime_ns": -20,
  "inode": 50,
  "owner": 60
 },
 "digest": "00112233445566778899aabbccddeeff",
 "staged_at": 70,
 "used_at": 80,
 "used_by_job": 90,
 "lifetime": "cache",
 "pinned": false,
 "made": "decompressed",
 "share": "group",
 "tree": {
  "files": 100,
  "allocated": 110,
  "source_digest": "00000000000000000000000000000000",
  "table_digest": "ffffffffffffffffffffffffffffffff",
  "relocation": "no",
  "note": "note: it is short",
  "split": "4:0123456789abcdef0123456789abcdef",
  "by": "part-{n}.*"
 }
}
"""


def holder(data: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    """The object in which the value at ``place`` stands."""
    for name in place[:-1]:
        data = data[name]
    return data


def value_at(place: tuple[str, ...]) -> object:
    return holder(asdict(RECORD), place)[place[-1]]


#: Where each value of a record stands in its JSON, objects among them.
PLACES = [
    *((name,) for name in asdict(RECORD)),
    *(("source_facts", name) for name in asdict(RECORD.source_facts)),
    *(("copy_facts", name) for name in asdict(RECORD.copy_facts)),
    *(("tree", name) for name in asdict(TREE)),
]
NUMBERS = [place for place in PLACES if type(value_at(place)) is int]
OBJECTS: list[tuple[str, ...]] = [(), ("source_facts",), ("copy_facts",), ("tree",)]

SIZES = st.integers(0, 2**63 - 1)
TIMES = st.integers(-(2**63), 2**63 - 1)
INODES = st.integers(0, 2**64 - 1)
SECONDS = st.integers(0, 2**40)
IDS = st.integers(0, 2**32 - 1)
CHARS = st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.characters(
    min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=["Cs"]
)
PATHS = st.text(CHARS, max_size=12).map("/{}".format)
DIGESTS = st.text("0123456789abcdef", min_size=32, max_size=32)
SPLITS = st.just("") | st.builds("{}:{}".format, st.integers(1, 10_000), DIGESTS)
RECORDS = st.builds(
    Record,
    version=st.just(VERSION),
    source=PATHS,
    destination=PATHS,
    source_facts=st.builds(SourceFacts, SIZES, TIMES, TIMES, INODES),
    copy_facts=st.builds(CopyFacts, SIZES, TIMES, INODES, IDS),
    digest=DIGESTS,
    staged_at=SECONDS,
    used_at=SECONDS,
    used_by_job=IDS,
    lifetime=st.sampled_from(["cache", "job"]),
    pinned=st.booleans(),
    made=st.sampled_from(["", "decompressed"]),
    tree=st.none()
    | st.builds(
        TreeFacts,
        SIZES,
        SIZES,
        DIGESTS,
        DIGESTS,
        st.text(CHARS, max_size=12),
        st.text(CHARS, max_size=12),
        SPLITS,
        st.text(CHARS, max_size=12),
    ),
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def refusal(text: str | bytes) -> str:
    try:
        record = Record.from_json(text)
    except ValueError as error:
        return str(error)
    pytest.fail(f"accepted as {record}")


def with_value(place: tuple[str, ...], value: object) -> str:
    data = asdict(RECORD)
    holder(data, place)[place[-1]] = value
    return json.dumps(data)


# as it was


def test_a_record_s_file_has_this_text() -> None:
    checksum = "28c74ce55939e243ac81104e2006dc13"  # by xxhsum -H128
    assert RECORD.to_json() == f'{{\n "checksum": "{checksum}",{TEXT[1:]}'


@pytest.mark.parametrize("blanks", [0, 40])
def test_a_record_that_is_whole_is_read_and_one_that_is_in_part_an_older_one_is_torn(
    blanks: int,
) -> None:
    old = RECORD.to_json()
    new = replace(RECORD, pinned=True, used_by_job=8).to_json().ljust(len(old) + blanks)
    assert Record.from_json(new) == replace(RECORD, pinned=True, used_by_job=8)
    for at in range(1, len(old)):
        text = new[:at] + old[at:]
        if text.rstrip() not in (new.rstrip(), old.rstrip()):
            with pytest.raises(TornError, match=r"^its checksum is wrong$"):
                Record.from_json(text)


@pytest.mark.parametrize("text", [TEXT, TEXT.encode(), TEXT.rstrip(), json.dumps(json.loads(TEXT))])
def test_a_record_is_read_from_its_file_s_text(text: str | bytes) -> None:
    assert Record.from_json(text) == RECORD


@settings(max_examples=300, deadline=None)
@given(RECORDS)
def test_a_record_is_read_back_as_it_was(record: Record) -> None:
    assert Record.from_json(record.to_json()) == record
    assert Record.from_json(record.to_json().encode()) == record


# damage, each kind with its message


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, 5, 6, 7, 9, -1, 10**30, None, "1", [1]])
def test_another_version_is_refused(version: object) -> None:
    assert refusal(with_value(("version",), version)) == f"version {version!r}, expected 8"


@pytest.mark.parametrize("version", [8.0])
def test_a_version_that_only_equals_the_known_one_is_refused(version: object) -> None:
    assert refusal(with_value(("version",), version)) == "version is not int"


@pytest.mark.parametrize("text", ["{}", "[]", "null", "1", '"version"', "true", "NaN"])
def test_what_is_not_a_versioned_object_is_refused(text: str) -> None:
    assert refusal(text) == "version None, expected 8"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("used_by_job",), True, "used_by_job is not int"),
        (("staged_at",), 70.0, "staged_at is not int"),
        (("staged_at",), float("nan"), "staged_at is not int"),
        (("used_at",), float("inf"), "used_at is not int"),
        (("used_at",), "80", "used_at is not int"),
        (("source",), None, "source is not str"),
        (("digest",), 11, "digest is not str"),
        (("source_facts", "size"), False, "size is not int"),
        (("copy_facts", "owner"), [60], "owner is not int"),
        (("source_facts",), [10, -20, 30, 40], "the fields are not those of SourceFacts"),
        (("copy_facts",), None, "the fields are not those of CopyFacts"),
        (("copy_facts",), asdict(RECORD.source_facts), "the fields are not those of CopyFacts"),
        (("note",), "", "the fields are not those of Record"),
        (("pinned",), 1, "pinned is not bool"),
        (("pinned",), "false", "pinned is not bool"),
        (("made",), 0, "made is not str"),
        (("lifetime",), None, "lifetime is not str"),
        (("lifetime",), "", "the value of lifetime is not valid"),
        (("lifetime",), "Job", "the value of lifetime is not valid"),
        (("tree",), False, "the fields are not those of TreeFacts"),
        (("tree", "files"), -1, "the value of files is not valid"),
        (("tree", "split"), None, "split is not str"),
        (("tree", "by"), 1, "by is not str"),
        (("share",), 1, "share is not str"),
    ],
)
def test_a_field_of_another_type_is_named(
    place: tuple[str, ...], value: object, message: str
) -> None:
    assert refusal(with_value(place, value)) == message


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PLACES), JSON)
def test_a_value_of_another_type_is_refused(place: tuple[str, ...], value: object) -> None:
    assume(type(value) is not type(value_at(place)))
    assume(place != ("tree",) or value is not None)
    assert refusal(with_value(place, value))


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_record_without_one_of_its_keys_is_refused(place: tuple[str, ...]) -> None:
    data = asdict(RECORD)
    del holder(data, place)[place[-1]]
    assert refusal(json.dumps(data))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(OBJECTS), st.text(max_size=8), JSON)
def test_a_record_with_another_key_is_refused(
    place: tuple[str, ...], name: str, value: object
) -> None:
    added = (*place, name)
    assume(name not in holder(asdict(RECORD), added))
    assert refusal(with_value(added, value))


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_record_with_a_key_given_twice_is_refused(place: tuple[str, ...]) -> None:
    data = asdict(RECORD)
    inside = holder(data, place)
    inside["twice"] = inside[place[-1]]
    assert refusal(json.dumps(data).replace('"twice"', json.dumps(place[-1])))


def test_a_record_whose_text_is_cut_anywhere_is_refused() -> None:
    whole = TEXT.rstrip()
    for length in range(len(whole)):
        assert refusal(whole[:length])
        assert refusal(whole[:length].encode())


def test_a_record_with_text_after_it_is_refused() -> None:
    assert refusal(TEXT + TEXT)
    assert refusal(TEXT + "\0")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 60_000,
        '{"a":' * 10_000,
        '{"version": ' + "[" * 50_000 + "]" * 50_000 + "}",
        TEXT.replace('"/data/img \\u00e9"', "[" * 50_000 + "]" * 50_000),
        TEXT.replace("70", '{"a":' * 10_000 + "0" + "}" * 10_000),
    ],
    ids=["arrays", "objects", "version", "source", "staged_at"],
)
def test_a_record_that_is_nested_without_end_is_refused(text: str) -> None:
    assert refusal(text)


def test_a_version_that_is_nested_deeply_is_refused() -> None:
    for depth in range(800, 1100):
        assert refusal('{"version": ' + "[" * depth + "]" * depth + "}")


@pytest.mark.parametrize("number", ["9" * 20, "-" + "9" * 20, "9" * 400, "9" * 5000], ids=len)
@pytest.mark.parametrize("place", NUMBERS, ids=".".join)
def test_a_number_that_no_filesystem_and_no_clock_gives_is_refused(
    place: tuple[str, ...], number: str
) -> None:
    assert refusal(with_value(place, "NUMBER").replace('"NUMBER"', number))


@pytest.mark.parametrize(
    "place", [place for place in NUMBERS if not place[-1].endswith("_ns")], ids=".".join
)
def test_a_number_below_zero_is_refused_but_for_a_file_s_times(place: tuple[str, ...]) -> None:
    assert refusal(with_value(place, -1))


@pytest.mark.parametrize("name", ["source", "destination"])
@pytest.mark.parametrize(
    "path", ["", "img", "./img", "/a\0b", f"/{chr(0xD800)}", f"/{chr(0xDC7F)}"], ids=ascii
)
def test_a_path_that_no_system_gives_is_refused(name: str, path: str) -> None:
    assert refusal(with_value((name,), path))


@pytest.mark.parametrize(
    "digest",
    ["", "0", "0" * 31, "0" * 33, "g" * 32, "A" * 32, " " * 32, "\u0660" * 32, f"{'0' * 32}\n"],
    ids=ascii,
)
def test_a_digest_that_is_not_32_hexadecimal_digits_is_refused(digest: str) -> None:
    assert refusal(with_value(("digest",), digest))


@pytest.mark.parametrize(
    "split",
    [
        "4", "4:", ":", f":{'0' * 32}", f"four:{'0' * 32}", f"-4:{'0' * 32}", f"4:{'0' * 31}",
        f"4:{'G' * 32}", f"4:4:{'0' * 32}", f" 4:{'0' * 32}", "0" * 32,
    ],
)  # fmt: skip
def test_a_split_that_is_not_a_number_of_nodes_and_a_digest_is_refused(split: str) -> None:
    text = with_value(("tree", "split"), split)
    assert refusal(text) == "the value of split is not valid"


@pytest.mark.parametrize("name", ["split", "by"])
def test_a_tree_that_is_no_part_has_no_split(name: str) -> None:
    tree = Record.from_json(with_value(("tree", name), "")).tree
    assert tree is not None
    assert getattr(tree, name) == ""


# damage of any kind


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(block: bytes) -> None:
    assert refusal(block)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=100) | JSON.map(json.dumps))
def test_random_text_is_refused(text: str) -> None:
    assert refusal(text)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 8), st.binary(max_size=8))
def test_a_record_with_other_bytes_within_is_refused_or_another_whole_record(
    start: int, length: int, block: bytes
) -> None:
    text = TEXT.encode()
    with suppress(ValueError):
        record = Record.from_json(text[:start] + block + text[start + length :])
        assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize("fact", ["size", "mtime_ns", "inode", "owner"])
def test_a_file_is_the_copy_while_all_of_its_facts_are_as_recorded(
    tmp_path: Path, fact: str
) -> None:
    (tmp_path / "copy").write_text("bytes")
    there = (tmp_path / "copy").stat()
    facts = CopyFacts(there.st_size, there.st_mtime_ns, there.st_ino, there.st_uid)
    assert is_ours(there, replace(RECORD, copy_facts=facts, tree=None))
    other = replace(facts, **{fact: getattr(facts, fact) + 1})
    assert not is_ours(there, replace(RECORD, copy_facts=other, tree=None))


def test_a_folder_is_the_copy_if_its_inode_is_recorded(
    tmp_path: Path,
) -> None:
    assert TREE is not None
    there = tmp_path.stat()
    new = CopyFacts(0, 0, there.st_ino, there.st_uid)
    assert is_ours(there, replace(RECORD, copy_facts=new))
    assert not is_ours(there, replace(RECORD, copy_facts=replace(new, inode=there.st_ino + 1)))
    assert not is_ours(there, replace(RECORD, copy_facts=replace(new, owner=there.st_uid + 1)))
    file = tmp_path / "file"
    file.touch()
    there = file.stat()
    assert not is_ours(
        there, replace(RECORD, copy_facts=CopyFacts(0, 0, there.st_ino, there.st_uid))
    )
