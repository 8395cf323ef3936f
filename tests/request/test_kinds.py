"""Options that do not fit what the source is are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stager.base.errors import PolicyRefusal, StageError, UsageError
from stager.base.options import ITSELF, Links, Mode, Options
from stager.request.items import StageItem, check_options

FILE, FOLDER = False, True

REFUSED: dict[str, tuple[Options, bool, bool, StageError]] = {
    "spread a file": (
        Options(mode=Mode.SHARD), False, FILE,
        UsageError("/shared/x is not a folder; mode=shard is for folders"),
    ),
    "include of a file": (
        Options(include=("a",)), False, FILE,
        UsageError(
            "/shared/x is not a folder; remove include and exclude, which are for folders"
        ),
    ),
    "exclude of a file": (
        Options(exclude=("a",)), False, FILE,
        UsageError(
            "/shared/x is not a folder; remove include and exclude, which are for folders"
        ),
    ),
    "extract a folder": (
        Options(extract=True), False, FOLDER,
        UsageError("/shared/x is a folder; extract is for archives"),
    ),
    "decompress a folder": (
        Options(decompress=ITSELF), False, FOLDER,
        UsageError(
            "/shared/x is a folder; name the files in it that are to be decompressed by a pattern, "
            "such as decompress=*"
        ),
    ),
    "links of a file": (
        Options(links=Links.FOLLOW), False, FILE,
        UsageError("/shared/x is not a folder on a filesystem; remove links=follow"),
    ),
    "a folder for all users": (
        Options(), True, FOLDER,
        PolicyRefusal(
            "/nvme/x would be a folder, but beneath /nvme only single files are staged, for all "
            "users; choose a destination elsewhere"
        ),
    ),
}  # fmt: skip


def item(options: Options, *, shared: bool) -> StageItem:
    return StageItem("/shared/x", "/nvme/x", "/nvme", options, shared=shared)


@pytest.mark.parametrize(("options", "shared", "is_folder", "error"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_fit_the_source_are_refused(
    options: Options, error: StageError, *, shared: bool, is_folder: bool
) -> None:
    with pytest.raises(type(error)) as refused:
        check_options(item(options, shared=shared), is_folder=is_folder)
    assert refused.value.message == error.message


@pytest.mark.parametrize(
    ("options", "shared", "is_folder"),
    [
        (Options(), False, FILE),
        (Options(), True, FILE),
        (Options(), False, FOLDER),
        (Options(extract=True), False, FILE),
        (Options(decompress=ITSELF), False, FILE),
        (Options(decompress=ITSELF), True, FILE),
        (Options(mode=Mode.SHARD), False, FOLDER),
        (Options(links=Links.FOLLOW), False, FOLDER),
    ],
)
def test_options_that_fit_the_source_are_accepted(
    options: Options, *, shared: bool, is_folder: bool
) -> None:
    check_options(item(options, shared=shared), is_folder=is_folder)


def test_the_objects_beneath_a_url_have_no_links() -> None:
    wanted = replace(item(Options(links=Links.FOLLOW), shared=False), source="s3://bucket/x/")
    with pytest.raises(UsageError, match=r"^s3://bucket/x/ is not a folder on a filesystem; "):
        check_options(wanted, is_folder=FOLDER)
