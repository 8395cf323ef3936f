"""What directives become beneath a site's roots, and that a request survives its way as JSON."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stager.base.errors import PolicyRefusal, StageError, UsageError
from stager.base.options import Lifetime, Mode, Options, Relocate, Validate, Verify
from stager.request.directive import MAX_LIST, Directive, parse_value
from stager.request.items import REQUEST_VARIABLE, Space, StageItem, StageRequest
from stager.request.policy import LOCAL, Policy
from stager.request.resolve import resolve
from stager.wire.route import Algorithm
from stager.wire.settings import Settings

SITE = Policy(roots=("/nvme", "/nvme/fast", "/scratch/local"))
STAT, SIZE = Validate.STAT, Validate.SIZE
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
        st.sampled_from(Mode),
        TEXTS,
    ),
    st.booleans(),
)
SETTINGS = st.builds(
    Settings,
    chunk=st.integers(4_096, 1 << 30),
    depth=st.integers(2, 64),
    readers=st.integers(0, 64),
    writers=st.integers(0, 64),
    algorithm=st.sampled_from(Algorithm),
    direct=st.booleans(),
)
SPACES = st.builds(
    Space,
    keep_free=st.integers(0, 1 << 60),
    keep_free_percent=st.floats(0, 100, exclude_max=True),
    user_limit=st.integers(0, 1 << 60),
)
REQUESTS = st.builds(
    StageRequest,
    items=st.lists(ITEMS, max_size=3).map(tuple),
    nodes=st.integers(1, 100_000),
    transfer=SETTINGS,
    space=SPACES,
    bench=st.integers(0, 1 << 40),
    lock_timeout=st.floats(min_value=0, allow_infinity=False),
    job=st.integers(0, 2**32 - 1),
    status_file=TEXTS,
    directives=TEXTS,
    dry_run=st.booleans(),
    local_root=st.just("") | PATHS,
)

PARTS = st.sampled_from(["nvme", "fast", "img", "a b", ".", "..", "", "..."])
LOOSE_PATHS = st.lists(PARTS, max_size=5).map("/".join).map("/{}".format)
LOOSE_DIRECTIVES = st.builds(
    Directive, LOOSE_PATHS, LOOSE_PATHS.filter(lambda path: ".." not in path.split("/"))
)


def destination_of(source: str, destination: str) -> tuple[str, str]:
    (item,) = resolve([Directive(source, destination)], SITE)
    return item.destination, item.root


@pytest.mark.parametrize("module", ["stager.request.items", "stager.rank.main", "stager.cli.main"])
def test_the_library_of_patterns_is_imported_only_where_patterns_are_used(module: str) -> None:
    code = f"import sys, {module}; print('pathspec' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


# JSON


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
    request = StageRequest((ITEM,), nodes=4, lock_timeout=1800.0, job=7)
    assert request.to_json() == (
        '{"items": [{"source": "/data/img", "destination": "/nvme/img", "root": "/nvme"'
        '}], "nodes": 4, "lock_timeout": 1800.0, '
        '"transfer": {"chunk": 2097152, "depth": 0, "readers": 0, "writers": 0, '
        '"algorithm": "auto", "direct": true}, '
        '"space": {"keep_free": 0, "keep_free_percent": 0.0, "user_limit": 0, "roots": [], '
        '"unpacked_size": 1099511627776, "unpacked_members": 10000000}, '
        '"job": 7, "status_file": "", "step": "", "directives": "", "dry_run": false, "bench": 0, '
        '"local_root": ""}'
    )


def as_travelling(value: str) -> StageRequest:
    """The request for the directives of ``value``, which it also says behind the exit code."""
    items = resolve(parse_value(value), SITE)
    return StageRequest(items, 4, 1800.0, job=7, status_file="1", directives=f"0 {value}")


@pytest.mark.parametrize(
    "value",
    [
        "/a:/nvme/".ljust(MAX_LIST, "b"),
        "/a:/nvme/".ljust(MAX_LIST // 2, "é"),
        "/a:/nvme/".ljust(MAX_LIST // 4, "😀"),
        "/a:/nvme/".ljust(MAX_LIST, "\udcff"),
        ";".join(f"/a:/nvme/{number:x}" for number in range(1_000)),
    ],
    ids=["letters", "accents", "pictures", "no UTF-8", "short paths"],
)
def test_a_long_request_fits_into_one_environment_variable(value: str) -> None:
    text = as_travelling(value).to_json()
    assert len(os.fsencode(f"{REQUEST_VARIABLE}={text}\0")) <= LONGEST


@pytest.mark.parametrize(
    "value",
    [
        "/a:/nvme/".ljust(MAX_LIST, "😀"),
        ";".join(f"/a:/nvme/{number:x}" for number in range(2_500)),
    ],
    ids=["pictures", "short paths"],
)
def test_a_longer_request_is_refused(value: str) -> None:
    request = as_travelling(value)
    with pytest.raises(UsageError) as caught:
        request.to_json()
    assert str(caught.value) == "too many directives for one job: stage an archive instead"


# resolving


@pytest.mark.parametrize(
    ("destination", "resolved", "root"),
    [
        ("/nvme/img", "/nvme/img", "/nvme"),
        ("/nvme/a/b/img", "/nvme/a/b/img", "/nvme"),
        ("/nvme/fast/img", "/nvme/fast/img", "/nvme/fast"),
        ("/nvme/faster/img", "/nvme/faster/img", "/nvme"),
        ("/scratch/local/img", "/scratch/local/img", "/scratch/local"),
        ("//nvme///a/./img", "/nvme/a/img", "/nvme"),
        ("/nvme/..a/img..", "/nvme/..a/img..", "/nvme"),
        ("/nvme/a b", "/nvme/a b", "/nvme"),
    ],
)
def test_a_destination_belongs_to_the_longest_root_above_it(
    destination: str, resolved: str, root: str
) -> None:
    assert destination_of("/data/img", destination) == (resolved, root)


def test_the_order_of_the_roots_does_not_matter() -> None:
    site = Policy(roots=SITE.roots[::-1])
    directives = [Directive("/data/img", "/nvme/fast/img"), Directive("/data/img", "/nvme/img")]
    assert resolve(directives, site) == resolve(directives, SITE)


@pytest.mark.parametrize(
    ("source", "destination", "resolved"),
    [
        ("/data/img", "/nvme/", "/nvme/img"),
        ("/data/img", "/nvme//", "/nvme/img"),
        ("/data/img", "/nvme/a/", "/nvme/a/img"),
        ("/data/img/", "/nvme/a/", "/nvme/a/img"),
        ("/img", "/nvme/", "/nvme/img"),
        ("/data/a:b, c", "/nvme/", "/nvme/a:b, c"),
    ],
)
def test_a_destination_with_a_slash_at_its_end_takes_the_source_s_name(
    source: str, destination: str, resolved: str
) -> None:
    assert destination_of(source, destination)[0] == resolved


def test_a_root_is_a_folder_and_takes_the_source_s_name() -> None:
    assert destination_of("/data/img", "/nvme") == ("/nvme/img", "/nvme")


@pytest.mark.parametrize(
    ("source", "name"), [("/data/img", "img"), ("/data/img//", "img"), ("/img", "img"), ("/", "")]
)
def test_an_item_knows_its_source_s_own_name(source: str, name: str) -> None:
    assert StageItem(source, "/nvme/x", "/nvme", Options(validate=STAT)).name == name


def test_an_item_keeps_the_source_and_the_ways_to_validate_and_verify() -> None:
    directives = [
        Directive("/data//./img", "/nvme/img", Options(validate=SIZE, verify=Verify.READBACK))
    ]
    item = StageItem(
        "/data//./img", "/nvme/img", "/nvme", Options(validate=SIZE, verify=Verify.READBACK)
    )
    assert resolve(directives, SITE) == (item,)


def test_nothing_asked_for_is_nothing_to_stage() -> None:
    assert resolve([], SITE) == ()


def test_items_keep_the_order_of_their_directives() -> None:
    names = ["c", "a", "b"]
    items = resolve([Directive(f"/data/{name}", "/nvme/") for name in names], SITE)
    assert [item.destination for item in items] == ["/nvme/c", "/nvme/a", "/nvme/b"]


@pytest.mark.parametrize("again", ["/nvme/img", "/nvme/", "//nvme/./img"])
def test_what_is_asked_for_twice_alike_is_staged_once(again: str) -> None:
    directives = [Directive("/data/img", "/nvme/img"), Directive("/data/img", again)]
    assert resolve(directives, SITE) == (ITEM,)


def test_one_source_may_go_to_two_destinations() -> None:
    items = resolve([Directive("/a", "/nvme/x"), Directive("/a", "/nvme/y")], SITE)
    assert [item.destination for item in items] == ["/nvme/x", "/nvme/y"]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            Directive("/a/img", "/nvme/img"),
            Directive("/b/img", "/nvme/"),
            (
                "/nvme/img is asked for twice: from /a/img (validate=stat) "
                "and from /b/img (validate=stat)"
            ),
        ),
        (
            Directive("/a", "/nvme/x", Options(validate=SIZE)),
            Directive("/a", "/nvme/x", Options(validate=Validate.ALWAYS)),
            "/nvme/x is asked for twice: from /a (validate=size) and from /a (validate=always)",
        ),
        (
            Directive("/a", "/nvme/x"),
            Directive("/a", "/nvme/x", Options(verify=Verify.READBACK)),
            (
                "/nvme/x is asked for twice: from /a (validate=stat) "
                "and from /a (validate=stat, verify=readback)"
            ),
        ),
        (
            Directive("/a", "/nvme/x"),
            Directive("/a", "/nvme/x", Options(mode=Mode.SHARD, by="part-{n}")),
            (
                "/nvme/x is asked for twice: from /a (validate=stat) "
                "and from /a (validate=stat, mode=shard, by=part-{n})"
            ),
        ),
    ],
)
def test_two_sources_or_ways_for_one_destination_are_refused(
    one: Directive, other: Directive, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve([one, Directive("/c", "/nvme/c"), other], SITE)
    assert str(caught.value) == message


def test_a_list_that_is_too_long_is_refused_however_it_came_together() -> None:
    directives = [Directive("/a", f"/nvme/{name}".ljust(20_000, "b")) for name in "xy"]
    with pytest.raises(UsageError) as caught:
        resolve(directives, SITE)
    assert str(caught.value) == (
        "the list of directives has 40007 characters; 32768 are allowed: "
        "stage an archive instead of many files"
    )


@pytest.mark.parametrize(
    ("destination", "named"),
    [
        ("/tmp/img", "/tmp/img"),
        ("/nvmex/img", "/nvmex/img"),
        ("/NVME/img", "/NVME/img"),
        ("/scratch/img", "/scratch/img"),
        ("/scratch/local2/", "/scratch/local2/img"),
        ("/", "/img"),
    ],
)
def test_a_destination_outside_of_the_roots_is_refused(destination: str, named: str) -> None:
    with pytest.raises(PolicyRefusal) as caught:
        resolve([Directive("/data/img", destination)], SITE)
    assert str(caught.value) == (
        f"{named} is not beneath a folder that this site stages to; "
        "choose a destination beneath /nvme or /nvme/fast or /scratch/local"
    )


SHARING = Policy(
    roots=("/nvme",), destinations=("/nvme/jobs",), shared_roots=("/nvme/all", "/ssd/all")
)


@pytest.mark.parametrize(
    ("destination", "root", "shared"),
    [
        ("/nvme/jobs/img", "/nvme", False),
        ("/nvme/all/img", "/nvme/all", True),
        ("/ssd/all/", "/ssd/all", True),
        ("/ssd/all", "/ssd/all", True),
    ],
)
def test_a_destination_is_for_the_job_or_shared_by_all(
    destination: str, root: str, shared: bool
) -> None:
    (item,) = resolve([Directive("/data/img", destination)], SHARING)
    assert (item.root, item.shared, item.name) == (root, shared, "img")
    assert item.destination.endswith("/img")


@pytest.mark.parametrize(
    "destination", ["/nvme/img", "/nvme/jobs2/img", "/nvme/img/all", "/ssd/img"]
)
def test_a_destination_beside_the_allowed_ones_is_refused(destination: str) -> None:
    with pytest.raises(PolicyRefusal) as caught:
        resolve([Directive("/data/img", destination)], SHARING)
    assert str(caught.value) == (
        f"{destination} is not beneath a folder that this site stages to; choose a destination "
        "beneath /nvme/jobs"
    )


def test_all_folders_that_users_may_stage_to_are_named() -> None:
    policy = Policy(roots=("/nvme",), destinations=("/nvme/a", "/nvme/b"))
    with pytest.raises(PolicyRefusal) as caught:
        resolve([Directive("/data/img", "/nvme/img")], policy)
    assert str(caught.value) == (
        "/nvme/img is not beneath a folder that this site stages to; choose a destination "
        "beneath /nvme/a or /nvme/b"
    )


@pytest.mark.parametrize("destination", ["/nvme/jobs", "/nvme/jobs/", "/nvme/jobs/img"])
def test_an_allowed_folder_takes_the_sources_name(destination: str) -> None:
    (item,) = resolve([Directive("/data/img", destination)], SHARING)
    assert (item.destination, item.root) == ("/nvme/jobs/img", "/nvme")


def test_one_destination_for_two_lifetimes_is_refused() -> None:
    wishes = [
        Directive("/a", "/nvme/b"),
        Directive("/a", "/nvme/b", Options(lifetime=Lifetime.JOB)),
    ]
    with pytest.raises(UsageError) as caught:
        resolve(wishes, SITE)
    assert str(caught.value) == (
        "/nvme/b is asked for twice: from /a (validate=stat) and from /a (validate=stat, "
        "lifetime=job)"
    )


def test_without_a_site_any_absolute_destination_will_do() -> None:
    items = resolve([Directive("/data/img", "/anywhere/img"), Directive("/data/img", "/")], LOCAL)
    assert [(item.destination, item.root) for item in items] == [
        ("/anywhere/img", ""),
        ("/img", ""),
    ]


@settings(max_examples=200, deadline=None)
@given(LOOSE_DIRECTIVES)
@example(Directive("/data/..", "/nvme/"))
@example(Directive("/data/.", "/nvme/"))
@example(Directive("/", "/nvme/"))
def test_whatever_is_accepted_is_a_plain_path_beneath_its_root(directive: Directive) -> None:
    with suppress(StageError):
        (item,) = resolve([directive], SITE)
        assert item.destination == os.path.normpath(item.destination)
        assert item.destination.startswith(f"{item.root}/")


@pytest.mark.parametrize(
    ("source", "destination", "inner", "outer"),
    [
        ("/nvme/data", "/nvme/data/copy", "/nvme/data/copy", "/nvme/data"),
        ("/nvme/data/", "/nvme/data/copy", "/nvme/data/copy", "/nvme/data"),
        ("/nvme/data/part", "/nvme/data", "/nvme/data/part", "/nvme/data"),
    ],
)
def test_neither_of_source_and_destination_may_lie_beneath_the_other(
    source: str, destination: str, inner: str, outer: str
) -> None:
    with pytest.raises(UsageError) as told:
        destination_of(source, destination)
    assert str(told.value) == (f"{inner} lies beneath {outer}; one of them cannot become the other")


@pytest.mark.parametrize("suffix", [".tar.gz", ".TGZ", ".zip"])
def test_what_is_unpacked_takes_the_archives_name_without_its_end(suffix: str) -> None:
    (item,) = resolve([Directive(f"/data/env{suffix}", "/nvme/", Options(extract=True))], SITE)
    assert item.destination == "/nvme/env"
    assert str(item.options) == "validate=stat, extract"


def test_what_is_spread_over_the_nodes_has_a_list_of_who_holds_what() -> None:
    wishes = [
        Directive("/a", "/nvme/", Options(mode=Mode.SHARD, by="{n}")),
        Directive("/b", "/nvme/"),
    ]
    spread, copied = resolve(wishes, SITE)
    assert (spread.options.mode, spread.options.by) == (Mode.SHARD, "{n}")
    assert (spread.shard_list, copied.shard_list) == ("/nvme/a/.stage-shards.tsv", "")
