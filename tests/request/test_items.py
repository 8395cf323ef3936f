"""A request survives its way to the ranks as JSON, however long it is."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stager.base.errors import UsageError
from stager.base.options import ITSELF, Lifetime, Mode, Options, Relocate, Validate, Verify
from stager.request.grammar import MAX_LIST
from stager.request.items import (
    REQUEST_VARIABLE,
    Space,
    StageItem,
    StageRequest,
    Waiting,
    Work,
    copy_name,
)
from stager.request.policy import Policy
from stager.request.resolve import resolve
from stager.wire.layout import KEY_SIZE, Algorithm, Settings
from tests.support.directives import parse_script, parse_value

SITE = Policy(roots=("/nvme", "/nvme/fast", "/scratch/local"))
STAT = Validate.STAT
ITEM = StageItem("/data/img", "/nvme/img", "/nvme", Options(validate=STAT))

#: Bytes of the longest string that the kernel takes into an environment, its NUL among them
#: (MAX_ARG_STRLEN).
LONGEST = 128 * 1024

#: Texts as the operating system gives them: UTF-8, and other bytes as lone surrogates.
CHARS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXTS = st.text(CHARS, max_size=12) | st.binary(max_size=12).map(
    lambda block: os.fsdecode(block.replace(b"\0", b""))
)
PATHS = TEXTS.map("/{}".format)
ITEMS = st.builds(
    StageItem,
    PATHS,
    PATHS,
    PATHS,
    st.builds(
        Options,
        st.sampled_from(Validate),
        st.sampled_from(Verify),
        st.sampled_from(Lifetime),
        st.sampled_from(Relocate),
        st.lists(TEXTS, max_size=2).map(tuple),
        st.lists(TEXTS, max_size=2).map(tuple),
        st.booleans(),
        st.just(ITSELF) | st.lists(TEXTS, max_size=2).map(tuple),
        st.sampled_from(Mode),
        TEXTS,
    ),
    st.booleans(),
)
SETTINGS = st.builds(
    Settings,
    chunk=st.integers(4_096, 1 << 30),
    depth=st.integers(2, 64),
    readers=st.lists(st.integers(1, 64), max_size=1).map(tuple),
    writers=st.integers(0, 64),
    algorithm=st.sampled_from(Algorithm),
    direct=st.booleans(),
)
SPACES = st.builds(
    Space,
    keep_free=st.integers(0, 1 << 60),
    user_limit=st.sampled_from([0, 1 << 60, "60%"]),
    private=st.lists(PATHS, max_size=2).map(tuple),
    of_job=st.lists(PATHS, max_size=2).map(tuple),
    hints=st.dictionaries(PATHS, TEXTS, max_size=2),
)
REQUESTS = st.builds(
    StageRequest,
    items=st.lists(ITEMS, max_size=3).map(tuple),
    nodes=st.integers(1, 100_000),
    transfer=SETTINGS,
    space=SPACES,
    bench=st.integers(0, 1 << 40),
    lock_timeout=st.floats(min_value=0, allow_infinity=False),
    stall_timeout=st.floats(min_value=0, allow_infinity=False),
    job=st.integers(0, 2**32 - 1),
    shared_mount=st.just("") | PATHS,
    scratch=st.lists(PATHS, max_size=2).map(tuple),
    waiting=st.none() | st.builds(Waiting, TEXTS, TEXTS, st.booleans()),
    shared_owner=st.integers(0, 1 << 32),
    work=st.sampled_from(Work),
    silence=st.floats(0, 1e6),
    failed_nodes=st.lists(TEXTS).map(tuple),
    log_user=TEXTS,
    hosts=st.lists(st.text()).map(tuple),
    local_root=st.just("") | PATHS,
    key=st.binary(min_size=KEY_SIZE, max_size=KEY_SIZE).map(bytes.hex),
)


@pytest.mark.parametrize(
    "module", ["stager.request.items", "stager.rank.program", "stager.cli.main"]
)
def test_the_library_of_patterns_is_imported_only_where_patterns_are_used(module: str) -> None:
    code = f"import sys, {module}; print('pathspec' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@settings(max_examples=200, deadline=None)
@given(REQUESTS)
def test_a_request_is_read_back_from_its_json_as_it_was(request: StageRequest) -> None:
    again = StageRequest.from_json(request.to_json())
    assert again == request
    assert [type(item.options.validate) for item in again.items] == [Validate] * len(request.items)
    assert [type(item.options.verify) for item in again.items] == [Verify] * len(request.items)
    assert [type(item.options.mode) for item in again.items] == [Mode] * len(request.items)
    assert type(again.transfer.algorithm) is Algorithm


@settings(max_examples=100, deadline=None)
@given(REQUESTS)
def test_a_request_is_read_back_from_the_environment_as_it_was(request: StageRequest) -> None:
    text = request.to_json()
    assert set(text).isdisjoint("\0\n")
    assert StageRequest.from_json(os.fsdecode(os.fsencode(text))) == request


def test_the_json_of_a_request() -> None:
    request = StageRequest((ITEM,), nodes=4, lock_timeout=1800.0, job=7, key="0f" * 32)
    assert request.to_json() == (
        '{"items": [{"source": "/data/img", "destination": "/nvme/img", "root": "/nvme"}], '
        '"nodes": 4, "lock_timeout": 1800.0, "stall_timeout": 60.0, '
        '"transfer": {"chunk": 2097152, "depth": 0, "readers": [], "writers": 0, '
        '"algorithm": "auto", "requests": 1, "direct": true}, '
        '"space": {"keep_free": 0, "user_limit": 0, "roots": [], '
        '"private": [], "of_job": [], "hints": {}, "store": "", "store_size": 0, '
        '"unpacked_size": 1099511627776, "unpacked_members": 10000000}, "interface": "", '
        '"remote": {"requests": 8, "patience": 60.0, "ca_file": "", "proxy": "", '
        '"allow_http": false, "insecure_registries": [], "limit": 0}, '
        '"job": 7, "shared_mount": "", "scratch": [], "waiting": null, "shared_owner": 0, '
        '"work": "stage", "bench": 0, "silence": 0.0, "failed_nodes": [], "log_user": "", '
        '"hosts": [], "line": "", '
        '"local_root": "", "key": "' + "0f" * 32 + '"}'
    )


def test_each_stage_has_a_random_key_which_its_text_for_people_lacks() -> None:
    first, second = (StageRequest((ITEM,), nodes=4, lock_timeout=1.0) for _ in range(2))
    assert len({bytes.fromhex(one.key) for one in (first, second)}) == 2
    assert len(bytes.fromhex(first.key)) == KEY_SIZE
    assert replace(first, nodes=2, job=7).key == first.key
    assert StageRequest.from_json(first.to_json()) == first
    assert first.key not in f"{first} {first!r}"


def of_value(value: str) -> StageRequest:
    """The request for the directives of ``value``."""
    return StageRequest(
        resolve(parse_value(value), SITE), 4, 1800.0, job=7, waiting=Waiting("1", "0", True)
    )


def of_script(lines: list[str]) -> StageRequest:
    """The request for the ``#STAGE`` lines of a batch script."""
    return StageRequest(resolve(parse_script(lines), SITE), nodes=4, lock_timeout=1800.0)


def ordinary_lines(count: int) -> list[str]:
    folder = "/shared/projects/climate/alice/run-7"
    return [
        f"#STAGE {folder}/member-{number:04}/output.nc:/nvme/alice/member-{number:04}/"
        for number in range(count)
    ]


@pytest.mark.parametrize(
    "value",
    [
        "/a:/nvme/".ljust(MAX_LIST, "b"),
        "/a:/nvme/".ljust(MAX_LIST // 2, "é"),
        "/a:/nvme/".ljust(MAX_LIST // 4, "😀"),
        "/a:/nvme/".ljust(MAX_LIST // 3, "\udcff"),
        ";".join(f"/a:/nvme/{number:x}" for number in range(7_500)),
        ";".join(f"/a:/nvme/{sha256(bytes([n >> 8, n & 255])).hexdigest()}" for n in range(1_650)),
    ],
    ids=["letters", "accents", "pictures", "no UTF-8", "short paths", "random names"],
)
def test_the_longest_value_fits_into_one_environment_variable(value: str) -> None:
    request = of_value(value)
    text = request.to_json()
    assert len(os.fsencode(f"{REQUEST_VARIABLE}={text}\0")) <= LONGEST
    assert StageRequest.from_json(os.fsdecode(os.fsencode(text))) == request


@pytest.mark.parametrize("count", [1_500, 5_000])
def test_thousands_of_lines_in_a_script_fit_into_one_environment_variable(count: int) -> None:
    request = of_script(ordinary_lines(count))
    text = request.to_json()
    assert len(request.items) == count
    assert len(os.fsencode(f"{REQUEST_VARIABLE}={text}\0")) <= LONGEST
    assert StageRequest.from_json(text) == request


def test_five_thousand_lines_with_names_that_share_little_fit_too() -> None:
    parts = random.Random(5)
    words = ["train", "test", "images", "labels", "shard", "run", "model", "output", "final"]
    paths = [
        "/".join([*parts.choices(words, k=3), f"{parts.randrange(10**6)}-{number}.h5"])
        for number in range(5_000)
    ]
    request = of_script([f"#STAGE /shared/alice/{path}:/nvme/alice/{path}" for path in paths])
    assert StageRequest.from_json(request.to_json()) == request


@pytest.mark.parametrize(("count", "readable"), [(500, True), (1_500, False)])
def test_only_a_request_that_is_too_long_as_json_is_compressed(count: int, readable: bool) -> None:
    assert of_script(ordinary_lines(count)).to_json().startswith('{"items": [') is readable


def test_a_request_that_is_too_long_even_compressed_is_refused() -> None:
    names = [random.Random(number).randbytes(32).hex() for number in range(5_000)]
    request = of_script([f"#STAGE /a:/nvme/{name}" for name in names])
    with pytest.raises(UsageError) as caught:
        request.to_json()
    assert re.fullmatch(
        "5000 directives are too long for one job: they have [0-9]{6} compressed bytes; 130048 are "
        "allowed: stage a folder or an archive instead of many files",
        str(caught.value),
    )


def test_a_copy_that_is_decompressed_has_a_name_without_the_suffix() -> None:
    for source, options, name in (
        ("/data/set.tar.GZ", Options(decompress=ITSELF), "set.tar"),
        ("/data/set.tar.GZ", Options(extract=True), "set"),
        ("/data/set.gz", Options(), "set.gz"),
        ("https://host/my%20set.gz", Options(decompress=ITSELF), "my set"),
        ("https://host/a%2Fb%00", Options(), "a%2Fb%00"),
        ("s3://bucket/a%20b", Options(), "a%20b"),
    ):
        assert copy_name(source, options) == name


@pytest.mark.parametrize(
    ("source", "name"), [("/data/img", "img"), ("/data/img//", "img"), ("/img", "img"), ("/", "")]
)
def test_a_copy_has_its_source_s_own_name(source: str, name: str) -> None:
    assert copy_name(source, Options(validate=STAT)) == name
