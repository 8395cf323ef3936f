"""What directives become beneath a site's roots."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stager.base.errors import PolicyRefusal, StageError, UsageError
from stager.base.options import (
    ITSELF,
    FolderLayout,
    Lifetime,
    Mode,
    Options,
    Share,
    Validate,
    Verify,
    Via,
)
from stager.request.grammar import Directive
from stager.request.items import StageItem
from stager.request.policy import LOCAL, Policy, Shared, SourceSection
from stager.request.resolve import build_request, images_folder, resolve

SITE = Policy(roots=("/nvme", "/nvme/fast", "/scratch/local"))
STAT, ALWAYS = Validate.STAT, Validate.ALWAYS
ITEM = StageItem("/data/img", "/nvme/img", "/nvme", Options(validate=STAT))

PARTS = st.sampled_from(["nvme", "fast", "img", "a b", ".", "..", "", "..."])
LOOSE_PATHS = st.lists(PARTS, max_size=5).map("/".join).map("/{}".format)
LOOSE_DIRECTIVES = st.builds(
    Directive, LOOSE_PATHS, LOOSE_PATHS.filter(lambda path: ".." not in path.split("/"))
)


def destination_of(source: str, destination: str) -> tuple[str, str]:
    (item,) = resolve([Directive(source, destination)], SITE)
    return item.destination, item.root


@pytest.mark.parametrize("source", ["/data/img/", "//data/./img", "/data/img"])
def test_a_source_is_one_however_it_is_written(source: str) -> None:
    assert resolve([Directive(source, "/nvme/img"), Directive("/data/img", "/nvme/img")], SITE) == (
        replace(ITEM, options=Options()),
    )


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


def test_one_item_may_be_asked_for_with_its_name_and_without() -> None:
    directives = [Directive("/data/img", path) for path in ("/nvme/a/", "/nvme/a/img")]
    assert [item.destination for item in resolve(directives, SITE)] == ["/nvme/a/img"]


def test_an_item_keeps_the_source_and_the_ways_to_validate_and_verify() -> None:
    directives = [
        Directive("/data/img", "/nvme/img", Options(validate=ALWAYS, verify=Verify.READBACK))
    ]
    item = StageItem(
        "/data/img", "/nvme/img", "/nvme", Options(validate=ALWAYS, verify=Verify.READBACK)
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
                "/nvme/img is the destination of two directives: from /a/img (validate=stat) "
                "and from /b/img (validate=stat)"
            ),
        ),
        (
            Directive("/a", "/nvme/x", Options(validate=Validate.CHECKSUM)),
            Directive("/a", "/nvme/x", Options(validate=Validate.ALWAYS)),
            (
                "/nvme/x is the destination of two directives: from /a (validate=checksum) "
                "and from /a (validate=always)"
            ),
        ),
        (
            Directive("/a", "/nvme/x"),
            Directive("/a", "/nvme/x", Options(verify=Verify.READBACK)),
            (
                "/nvme/x is the destination of two directives: from /a (validate=stat) "
                "and from /a (validate=stat, verify=readback)"
            ),
        ),
        (
            Directive("/a", "/nvme/x"),
            Directive("/a", "/nvme/x", Options(mode=Mode.SHARD, by="part-{n}")),
            (
                "/nvme/x is the destination of two directives: from /a (validate=stat) "
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
    assert str(caught.value) == f"{message}; remove one of them, or change its destination"


@pytest.mark.parametrize("inner", ["/nvme/d/data", "/nvme/d/a/b/c", "//nvme/./d/data"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_destination_in_another_one_is_refused(inner: str, turned: bool) -> None:
    directives = [Directive("/a", "/nvme/d"), Directive("/b", "/nvme/c"), Directive("/c", inner)]
    with pytest.raises(UsageError) as caught:
        resolve(directives[::-1] if turned else directives, SITE)
    plain = os.path.normpath(inner.replace("//", "/"))
    assert str(caught.value) == (
        f"{plain} is in /nvme/d, which another directive stages as a whole; choose a destination "
        "outside of it"
    )


def test_destinations_side_by_side_may_begin_alike() -> None:
    names = ["/nvme/d", "/nvme/data", "/nvme/d.x/a", "/nvme/c/d"]
    items = resolve([Directive("/a", name) for name in names], SITE)
    assert [item.destination for item in items] == names


def test_the_time_to_compare_destinations_grows_with_their_number_only() -> None:
    def seconds(count: int) -> float:
        directives = [Directive("/a", f"/nvme/a/b/c/{number}") for number in range(count)]
        begun = time.process_time()
        assert len(resolve(directives, SITE)) == count
        return time.process_time() - begun

    few = min(seconds(1_000) for _ in range(3))
    many = min(seconds(16_000) for _ in range(3))
    assert many < 64 * few  # by their square it would be 256 times as long


def test_each_different_directive_is_an_item_once_and_in_order() -> None:
    one, two = Directive("/a", "/nvme/b"), Directive("/a", "/nvme/c", Options(validate=ALWAYS))
    items = resolve([two, one, two, one], SITE)
    assert [item.destination for item in items] == ["/nvme/c", "/nvme/b"]


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


@pytest.mark.parametrize(
    ("allowed", "share", "remedy"),
    [
        ("none", Share.ALL, "remove it"),
        ("none", Share.GROUP, "remove it"),
        ("group", Share.ALL, "use share=group or remove it"),
    ],
)
def test_a_site_may_forbid_to_share_copies(
    allowed: Literal["none", "group"], share: Share, remedy: str
) -> None:
    policy = Policy(roots=("/nvme",), allow_share=allowed)
    with pytest.raises(PolicyRefusal) as caught:
        resolve([Directive("/data/img", "/nvme/img", Options(share=share))], policy)
    assert str(caught.value) == f"/nvme/img: this site does not allow share={share}; {remedy}"


@pytest.mark.parametrize(
    ("allowed", "share"),
    [("none", Share.NONE), ("group", Share.GROUP), ("all", Share.GROUP), ("all", Share.ALL)],
)
def test_a_site_may_allow_to_share_copies(
    allowed: Literal["none", "group", "all"], share: Share
) -> None:
    options = Options(share=share)
    policy = Policy(roots=("/nvme",), allow_share=allowed)
    [item] = resolve([Directive("/data/img", "/nvme/img", options)], policy)
    assert item.options == options


SHARING = Policy(
    roots=("/nvme",),
    destinations=("/nvme/jobs",),
    shared=Shared(owner="nobody", roots=("/nvme/all", "/ssd/all")),
)


@pytest.mark.parametrize(
    ("destination", "root", "shared"),
    [
        ("/nvme/jobs/img", "/nvme", False),
        ("/nvme/all/img", "/nvme/all", True),
        ("/ssd/all/", "/ssd/all", True),
    ],
)
def test_a_destination_is_for_the_job_or_shared_by_all(
    destination: str, root: str, shared: bool
) -> None:
    (item,) = resolve([Directive("/data/img", destination)], SHARING)
    assert (item.root, item.shared) == (root, shared)
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


def test_a_destination_outside_is_refused_as_that_where_it_is_the_source_too() -> None:
    with pytest.raises(PolicyRefusal):
        destination_of("/data/img", "/data/img")


def test_all_folders_that_users_may_stage_to_are_named() -> None:
    policy = Policy(roots=("/nvme",), destinations=("/nvme/a", "/nvme/b"))
    with pytest.raises(PolicyRefusal) as caught:
        resolve([Directive("/data/img", "/nvme/img")], policy)
    assert str(caught.value) == (
        "/nvme/img is not beneath a folder that this site stages to; choose a destination "
        "beneath /nvme/a or /nvme/b"
    )


@pytest.mark.parametrize(
    ("policy", "folder"),
    [(SITE, "/nvme"), (SITE, "/nvme/fast"), (SHARING, "/nvme/jobs"), (SHARING, "/ssd/all")],
)
def test_a_folder_of_the_site_s_is_no_destination_without_a_slash(
    policy: Policy, folder: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve([Directive("/data/img", folder)], policy)
    problem = f"{folder} is a folder of the site's; write {folder}/ to stage into it"
    assert str(caught.value) == problem


@pytest.mark.parametrize("destination", ["/nvme/jobs/", "/nvme/jobs/img"])
def test_an_allowed_folder_takes_the_sources_name(destination: str) -> None:
    (item,) = resolve([Directive("/data/img", destination)], SHARING)
    assert (item.destination, item.root) == ("/nvme/jobs/img", "/nvme")


def test_one_destination_for_two_lifetimes_is_refused() -> None:
    directives = [
        Directive("/a", "/nvme/b"),
        Directive("/a", "/nvme/b", Options(lifetime=Lifetime.JOB)),
    ]
    with pytest.raises(UsageError) as caught:
        resolve(directives, SITE)
    assert str(caught.value) == (
        "/nvme/b is the destination of two directives: from /a (validate=stat) and from /a "
        "(validate=stat, lifetime=job); remove one of them, or change its destination"
    )


def test_two_copies_with_one_name_are_refused() -> None:
    options = Options(name="w")
    one, other = Directive("/a", "/nvme/", options), Directive("/b", "/nvme/c", options)
    assert len(resolve([one, one, Directive("/b", "/nvme/c", Options(name="W"))], SITE)) == 2
    with pytest.raises(UsageError) as caught:
        resolve([one, other], SITE)
    problem = "as=w is given to both /nvme/a and /nvme/c; choose two names"
    assert str(caught.value) == problem


def test_via_is_for_folders_of_jobs_at_a_site_with_a_store() -> None:
    roots = {"roots": ["/nvme", "/users/%u", "/jobs/%j"]}
    stored = Policy.model_validate({**roots, "cache": {"store": "/nvme"}})
    bare = Policy.model_validate(roots)
    [item] = resolve([Directive("/a", "/jobs/%j/", Options(via=Via.LINK))], stored)
    assert item.options.via is Via.LINK
    for policy, folder in ((stored, "/nvme"), (stored, "/users/%u"), (bare, "/jobs/%j")):
        with pytest.raises(PolicyRefusal) as caught:
            resolve([Directive("/a", f"{folder}/", Options(via=Via.COPY))], policy)
        assert str(caught.value) == (
            f"{folder}/a: via=copy is for the folder of a job, at a site with a store; remove it"
        )
    resolve([Directive("/a", "/anywhere/", Options(via=Via.COPY))], LOCAL)


def test_the_variables_are_the_names_and_the_lists_of_what_is_spread() -> None:
    directives = [
        Directive("/a b", "/nvme/", Options(name="w")),
        Directive("/c", "/nvme/c", Options(mode=Mode.SHARD)),
        Directive("/d", "/nvme/d", Options(mode=Mode.SHARD, name="d")),
    ]
    assert build_request(resolve(directives, SITE), SITE).variables == {
        "STAGE_w": "/nvme/a b",
        "STAGE_d": "/nvme/d",
        "STAGE_SHARDS": "/nvme/c/.stage-shards.tsv:/nvme/d/.stage-shards.tsv",
    }
    one = replace(ITEM, destination="/nvme/a\nb", options=Options(name="w"))
    assert build_request((one,), SITE).variables == {}


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


@pytest.mark.parametrize("source", ["/nvme/data", "/nvme//data/", "//nvme/./data"])
def test_source_and_destination_may_not_be_the_same(source: str) -> None:
    with pytest.raises(UsageError) as caught:
        destination_of(source, "/nvme/data")
    assert str(caught.value) == (
        "source and destination are both /nvme/data; choose another destination"
    )


@pytest.mark.parametrize(
    ("source", "destination", "inner", "outer"),
    [
        ("/nvme/data", "/nvme/data/copy", "/nvme/data/copy", "/nvme/data"),
        ("/nvme/data/", "/nvme/data/copy", "/nvme/data/copy", "/nvme/data"),
        ("/nvme/.//data", "/nvme/data/copy", "/nvme/data/copy", "/nvme/data"),
        ("/", "/nvme/data", "/nvme/data", "/"),
        ("//.", "/nvme/data", "/nvme/data", "/"),
        ("/nvme/data/part", "/nvme/data", "/nvme/data/part", "/nvme/data"),
    ],
)
def test_neither_of_source_and_destination_may_lie_beneath_the_other(
    source: str, destination: str, inner: str, outer: str
) -> None:
    with pytest.raises(UsageError) as caught:
        destination_of(source, destination)
    assert str(caught.value) == (
        f"{inner} is in {outer}: source and destination must not contain each other; "
        "choose another destination"
    )


@pytest.mark.parametrize("suffix", [".tar.gz", ".TGZ", ".zip"])
def test_what_is_unpacked_takes_the_archives_name_without_its_end(suffix: str) -> None:
    (item,) = resolve([Directive(f"/data/env{suffix}", "/nvme/", Options(extract=True))], SITE)
    assert item.destination == "/nvme/env"
    assert str(item.options) == "validate=stat, extract"


@pytest.mark.parametrize("suffix", [".gz", ".ZST", ".xz", ".bz2"])
def test_what_is_decompressed_takes_the_name_of_its_source_without_the_suffix(suffix: str) -> None:
    options = Options(decompress=ITSELF)
    (item,) = resolve([Directive(f"/data/set.tar{suffix}", "/nvme/", options)], SITE)
    assert item.destination == "/nvme/set.tar"
    assert str(item.options) == "validate=stat, decompress"
    (item,) = resolve([Directive(f"/data/set{suffix}", "/nvme/x.gz", options)], SITE)
    assert item.destination == "/nvme/x.gz"


def test_what_is_spread_over_the_nodes_has_a_list_of_who_holds_what() -> None:
    directives = [
        Directive("/a", "/nvme/", Options(mode=Mode.SHARD, by="{n}")),
        Directive("/b", "/nvme/"),
    ]
    spread, copied = resolve(directives, SITE)
    assert (spread.options.mode, spread.options.by) == (Mode.SHARD, "{n}")
    assert (spread.shard_list, copied.shard_list) == ("/nvme/a/.stage-shards.tsv", "")


ALLOWED = ("https://data.site", "s3://bucket/public/", "gs://", "hf://org/", "hf://other/model")


@pytest.mark.parametrize(
    "url",
    [
        "https://data.site/a",
        "s3://bucket/public/a",
        "gs://any/a",
        "gs://any/",
        "https://data.site/b/c",
    ],
)
def test_a_url_that_the_site_allows_is_an_item(url: str) -> None:
    site = Policy(roots=("/nvme",), source=SourceSection(allow=ALLOWED))
    [item] = resolve([Directive(url, "/nvme/")], site)
    assert (item.source, item.destination) == (url, f"/nvme/{url.rstrip('/').rpartition('/')[2]}")


@pytest.mark.parametrize(
    "url", ["hf://org/model@refs/pr/1", "hf://org/model", "hf://other/model@v1"]
)
def test_a_model_of_a_hub_has_its_name_without_the_revision(url: str) -> None:
    site = Policy(roots=("/nvme",), source=SourceSection(allow=ALLOWED))
    [item] = resolve([Directive(url, "/nvme/")], site)
    assert (item.source, item.destination) == (url, "/nvme/model")


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("team/image:v1", "team+image+v1.sqsh"),
        ("image", "image.sqsh"),
        ("image@sha256:" + "0123456789abcdef" * 4, "image+0123456789ab.sqsh"),
    ],
)
def test_the_copy_of_an_image_is_named_after_it(image: str, name: str) -> None:
    site = Policy(roots=("/nvme",), source=SourceSection(allow=("docker://host:5000/",)))
    [item] = resolve([Directive(f"docker://host:5000/{image}", "/nvme/")], site)
    assert item.destination == f"/nvme/{name}"


@pytest.mark.parametrize(
    "url",
    [
        "https://data.site.elsewhere/a", "https://data.site:8443/a", "http://data.site/a",
        "s3://bucket/private/a", "s3://bucket/publicity/a", "az://account/container/a",
        "hf://organ/model", "hf://datasets/org/model", "hf://other/model2", "hf://other/model-x@v1",
    ],
)  # fmt: skip
def test_a_url_that_only_resembles_an_allowed_one_is_refused(url: str) -> None:
    site = Policy(roots=("/nvme",), source=SourceSection(allow=ALLOWED))
    with pytest.raises(PolicyRefusal) as caught:
        resolve([Directive(url, "/nvme/a")], site)
    assert str(caught.value) == (
        f"{url}: this site stages only from {' or '.join(ALLOWED)}; copy it to the shared storage "
        "first, or ask the administrator (allow in [source] of stage.toml)"
    )


def test_a_model_in_the_layout_of_a_hub_has_the_name_that_programs_look_for() -> None:
    site = Policy(roots=("/nvme",), source=SourceSection(allow=ALLOWED))
    options = Options(layout=FolderLayout.HUB)
    url = "hf://org/model@v1"
    [item] = resolve([Directive(url, "/nvme/hub/", options)], site)
    assert item.destination == "/nvme/hub/models--org--model"
    with pytest.raises(UsageError) as caught:
        resolve([Directive(url, "/nvme/hub/model", options)], site)
    assert str(caught.value) == (
        "/nvme/hub/model: with layout=hub the last part of the destination must be "
        "models--org--model, for which programs look in HF_HUB_CACHE; write /nvme/hub/ with a '/' "
        "at its end"
    )


def test_images_that_no_destination_names_are_among_their_users_records() -> None:
    site = SourceSection(allow=("docker://registry.site/",))
    policy = Policy(roots=("/scratch", "/nvme"), destinations=("/nvme/users",), source=site)
    folder = images_folder(5001, policy)
    assert (folder, images_folder(5001, Policy(roots=("/a", "/b")))) == (
        "/nvme/.slurm-stage/5001/images", "/a/.slurm-stage/5001/images",
    )  # fmt: skip
    image = "docker://registry.site/a:1"
    [item] = resolve([Directive(image, f"{folder}/a.sqsh")], policy)
    assert (item.destination, item.root) == (f"{folder}/a.sqsh", "/nvme")
    with pytest.raises(UsageError, match="is reserved for slurm-stage's own records"):
        resolve([Directive("/shared/a.sqsh", f"{folder}/a.sqsh")], policy)
    for other in (
        f"{folder}/a/b",
        "/nvme/.slurm-stage/5001/records/a",
        "/nvme/x/.slurm-stage/1/images/a",
    ):
        with pytest.raises(UsageError, match="is reserved for slurm-stage's own records"):
            resolve([Directive(image, other)], policy)


@pytest.mark.parametrize(
    "destination", ["/scratch/img", "/scratch/.slurm-stage/5/store/1/img", "/scratch/alice.13/img"]
)
def test_no_destination_is_in_the_store_or_in_another_jobs_folder(destination: str) -> None:
    rules = Policy.model_validate({"roots": ["/scratch/%u.%j"], "cache": {"store": "/scratch"}})
    rules = rules.at({"u": "alice", "j": "12"})
    with pytest.raises((PolicyRefusal, UsageError), match=r"not beneath a folder|is reserved"):
        resolve([Directive("/data/img", destination)], rules)
    own = "/scratch/alice.12"
    assert resolve([Directive("/data/img", f"{own}/img")], rules)[0].root == own
