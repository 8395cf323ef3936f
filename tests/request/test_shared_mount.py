"""What is asked for in the filesystem of a job's own disks, and where it is."""

from __future__ import annotations

import pytest

from stager.base.errors import StageError, UsageError
from stager.base.options import Options, Via
from stager.request.grammar import Directive
from stager.request.items import StageItem
from stager.request.policy import ANY, Policy, SharedFsSection
from stager.request.resolve import build_request, resolve

SECTION = SharedFsSection(driver="/opt/fs", folder="/nvme", mount="/mnt/stage")
SITE = Policy(roots=("/nvme",), destinations=("/nvme/jobs",), shared_fs=SECTION)
JOB = SITE.at({"j": "17"})
ROOT = "/mnt/stage/17"


@pytest.mark.parametrize(
    ("destination", "path"),
    [("shared:/", "img"), ("shared:/data/", "data/img"), ("shared://data/./x", "data/x")],
)
def test_a_file_goes_to_the_jobs_filesystem(destination: str, path: str) -> None:
    items = resolve([Directive("/data/img", destination)], JOB)
    assert items == (StageItem("/data/img", f"{ROOT}/{path}", ROOT),)
    request = build_request(items, JOB)
    assert request.variables == {"STAGE_SHARED": ROOT}
    assert (request.items, request.scratch) == (items, ())
    assert request.space.roots == ("/nvme", ROOT)
    assert request.space.private == (ROOT,)
    assert request.space.hints == {ROOT: "--nodes"}


def test_an_empty_folder_is_no_item_of_the_request() -> None:
    items = resolve([Directive("", "shared:/scratch/"), Directive("/a", "/nvme/jobs/a")], JOB)
    request = build_request(items, JOB)
    assert [item.source for item in request.items] == ["/a"]
    assert request.scratch == (f"{ROOT}/scratch",)
    assert request.variables == {"STAGE_SHARED": ROOT}


def test_other_jobs_have_none() -> None:
    request = build_request(resolve([Directive("/a", "/nvme/jobs/a")], JOB), JOB)
    assert (request.shared_mount, request.variables) == ("", {})
    assert request.space.roots == ("/nvme",)


def test_without_stage_toml_it_is_where_the_variable_says() -> None:
    [item] = resolve([Directive("/a", "shared:/b")], ANY)
    assert item.destination == "/$STAGE_SHARED/b"


@pytest.mark.parametrize(
    ("policy", "directive", "problem"),
    [
        (
            Policy(roots=("/nvme",)).at({"j": "17"}),
            Directive("/a", "shared:/b"),
            (
                "shared:/b: this site has no filesystem of a job's own disks; choose another "
                "destination, or ask the administrator ([shared_fs] of stage.toml)"
            ),
        ),
        (
            SITE.at({}),
            Directive("", "shared:/b"),
            "shared:/b is in the filesystem of a job's own disks; use it in a job",
        ),
        (
            JOB,
            Directive("/a", "shared:/."),
            "shared:/. is the whole filesystem; write shared:/ to stage into it",
        ),
        (
            JOB,
            Directive("", "shared:/a/.slurm-stage"),
            (
                f"{ROOT}/a/.slurm-stage: the name .slurm-stage is reserved for slurm-stage's own "
                "records; choose another destination"
            ),
        ),
        (
            JOB,
            Directive("/a", "shared:/b", Options(via=Via.LINK)),
            f"{ROOT}/b: via=link is for the folder of a job, at a site with a store; remove it",
        ),
    ],
)
def test_what_cannot_be_is_refused(policy: Policy, directive: Directive, problem: str) -> None:
    with pytest.raises(StageError) as caught:
        resolve([directive], policy)
    assert str(caught.value) == problem


def test_a_site_without_it_says_that_the_request_is_wrong() -> None:
    with pytest.raises(UsageError):
        resolve([Directive("", "shared:/")], Policy(roots=("/nvme",)))
